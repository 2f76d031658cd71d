"""Kernels that do not end: signals and budgets stop them. And launches that cannot begin."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from launches import assembled, kernel_text
from subprocesses import run_forked

from jitfmha import emulate, fmha_fwd
from jitfmha.amd.runtime import HipError
from jitfmha.emulator import DEVICES, Emulator, EmulatorError, Function
from jitfmha.jit.toolchain.device_compiler import compile_hip

# So that a test fails, rather than hangs, where nothing stops a kernel: some ten seconds.
_BUDGET = 300_000_000
_SOON = 30.0
_SOURCE = """
extern "C" __global__ void endless(unsigned odd_ones_only) {
  if (odd_ones_only && __builtin_amdgcn_workgroup_id_x() % 2 == 0) return;
  for (;;) asm volatile("s_nop 0");
}
"""


class _AlarmRings(Exception):
    pass


@pytest.fixture
def after() -> Iterator[Callable[[float, Callable[[], None]], None]]:
    """Calls a function, as a signal handler, so many seconds from now and then every 0.1 s."""

    def ring_after(seconds: float, answer: Callable[[], None]) -> None:
        signal.signal(signal.SIGALRM, lambda number, frame: answer())
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)

    before = signal.getsignal(signal.SIGALRM)
    yield ring_after
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def endless(emulator: Emulator) -> Iterator[Function]:
    code_object = compile_hip(_SOURCE, "gfx942")
    loaded = emulator.loaded(code_object, DEVICES["gfx942"], "endless")
    with loaded as function, emulator.keep_options():
        emulator.set_options(threads=2, instruction_budget=_BUDGET)
        yield function


def _ring() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise _AlarmRings


@contextmanager
def _interrupted(after: Callable[..., None], seconds: float = 0.2) -> Iterator[None]:
    """What runs inside is ended by a signal handler that raises, soon after it rings."""
    start = time.monotonic()
    with pytest.raises(_AlarmRings):  # noqa: PT012 - on a busy machine it rings before the launch
        after(seconds, _ring)
        yield
    assert seconds <= time.monotonic() - start < seconds + _SOON


@pytest.mark.parametrize(("workgroups", "odd_ones_only"), [(1, 0), (2, 0), (2, 1), (7, 1)])
def test_a_signal_handler_that_raises_ends_a_launch(
    emulator, endless, after, workgroups, odd_ones_only
):
    """Also where the thread that launches has no workgroup left and waits for the others."""
    kernarg = odd_ones_only.to_bytes(4, "little")
    with _interrupted(after):
        emulator.launch(endless, (workgroups, 1, 1), (128, 1, 1), kernarg)
    # Nothing is left of it.
    emulator.set_options(threads=2, instruction_budget=1000)
    with pytest.raises(EmulatorError, match="budget of 1000 instructions"):
        emulator.launch(endless, (2, 1, 1), (64, 1, 1), bytes(4))


_WAITS_SOURCE = """
extern "C" __global__ void waits(unsigned* turn, unsigned failing) {
  if (__builtin_amdgcn_workgroup_id_x() == failing) {
    while (__scoped_atomic_load_n(turn, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) == 0)
      __builtin_amdgcn_s_sleep(1);
    __builtin_trap();
  }
  __scoped_atomic_store_n(turn, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  while (__scoped_atomic_load_n(turn, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) != 2)
    __builtin_amdgcn_s_sleep(1);
}
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_workgroup_that_waits_for_a_failed_one_ends(emulator, after, failing):
    """The failed one would have let it go on. The failure is what is reported."""
    code_object = compile_hip(_WAITS_SOURCE, "gfx942")
    turn = torch.zeros(1, dtype=torch.int32)
    kernarg = turn.data_ptr().to_bytes(8, "little") + failing.to_bytes(8, "little")
    # One before the failed one is left after 2^26 instructions: a minute where all are busy.
    after(600, _ring)
    with (
        emulator.keep_options(),
        emulator.loaded(code_object, DEVICES["gfx942"], "waits") as function,
    ):
        emulator.set_options(threads=2)
        with pytest.raises(EmulatorError, match=rf"s_trap.*workgroup \({failing}, 0, 0\)"):
            emulator.launch(function, (2, 1, 1), (64, 1, 1), kernarg)
    assert turn.item() == 1


@pytest.mark.parametrize(
    "options", [{"time_slice": 2**32 - 1}, {"random_order": True}], ids=["long", "random"]
)
def test_turns_of_any_length_end(emulator, endless, after, options):
    emulator.set_options(instruction_budget=_BUDGET, **options)
    with _interrupted(after):
        emulator.launch(endless, (1, 1, 1), (256, 1, 1), bytes(4))


def test_a_signal_handler_that_returns_is_no_end(emulator, endless, after):
    """It runs meanwhile, and the launch goes on."""
    rings: list[float] = []

    def answer() -> None:
        rings.append(time.monotonic())
        if len(rings) == 4:
            _ring()

    start = time.monotonic()
    with pytest.raises(_AlarmRings):  # noqa: PT012 - as above
        after(0.1, answer)
        emulator.launch(endless, (1, 1, 1), (64, 1, 1), bytes(4))
    assert len(rings) == 4
    assert time.monotonic() - start < _SOON
    # Once for each alarm; a busy machine answers late.
    assert all(ring - start >= 0.1 * count for count, ring in enumerate(rings, start=1))


def test_a_call_is_interrupted(after):
    """Through the launcher, with what a user sees."""
    q, k, v = (torch.ones(1, 16384, 2, 128, dtype=torch.bfloat16) for _ in "qkv")
    with emulate("gfx942"):
        fmha_fwd(*(x[:, :3] for x in (q, k, v)))  # builds what it needs
        with _interrupted(after, 0.5):
            fmha_fwd(q, k, v)


def test_ctrl_c_in_a_program_of_its_own():
    """With Python's own handler, and the exit code that shells know."""
    program = f"""
import os, signal, threading
from jitfmha.jit.toolchain.device_compiler import compile_hip
from jitfmha.emulator import Emulator
# A shell starts what runs in the background with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
emulator = Emulator()
emulator.set_options(instruction_budget={_BUDGET})
module = emulator.load_module(compile_hip('''{_SOURCE}''', "gfx942"), 0)
kernel = emulator.function(module, "endless")
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    emulator.launch(kernel, (1, 1, 1), (64, 1, 1), bytes(4))
except KeyboardInterrupt as error:
    print("interrupted;", error.__context__)
"""
    done = run_forked("-c", program)
    assert done.stdout.startswith("interrupted; hipErrorLaunchFailure: kernel endless was inter")
    assert done.stderr == ""


def test_other_threads_launch_as_well(emulator, endless):
    """Python's handlers do not run there; a budget ends them."""
    errors: list[str] = []

    def launch() -> None:
        emulator.set_options(instruction_budget=100_000)
        try:
            emulator.launch(endless, (2, 1, 1), (64, 1, 1), bytes(4))
        except EmulatorError as error:
            errors.append(str(error))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(launch) for _ in range(3)]:
            done.result()
    assert len(errors) == 3
    assert all("budget of 100000 instructions is used up" in error for error in errors)


@pytest.mark.parametrize("turns", [{}, {"random_order": 1}])
def test_the_budget_is_exact(emulator, turns):
    code_object = assembled("gfx942", kernel_text("idle", "s_nop 0\n" * 40))
    loaded = emulator.loaded(code_object, DEVICES["gfx942"], "idle")
    with loaded as function, emulator.keep_options():
        emulator.set_options(instruction_budget=41, **turns)  # with the end
        emulator.launch(function, (2, 1, 1), (128, 1, 1), b"")
        emulator.set_options(instruction_budget=40, **turns)
        with pytest.raises(EmulatorError, match="budget of 40 instructions is used up"):
            emulator.launch(function, (2, 1, 1), (128, 1, 1), b"")


@pytest.mark.parametrize("checks", [False, True])
def test_the_budget_of_a_block(checks):
    q, k, v = (torch.ones(1, 100, 3, 64, dtype=torch.float16) for _ in "qkv")
    with emulate("gfx950", check=checks, instruction_budget=100) as run:
        with pytest.raises(HipError, match="the wave's budget of 100 instructions is used up"):
            fmha_fwd(q, k, v)
        with emulate("gfx950", check=checks, instruction_budget=10_000_000):
            inner = fmha_fwd(q, k, v)
        with pytest.raises(HipError, match="the wave's budget of 100 instructions is used up"):
            fmha_fwd(q, k, v)
        assert run.emulation.instruction_budget == 100
    torch.testing.assert_close(inner, v)


_THREADS_THAT_DO_NOT_START = f"""
import resource
from jitfmha.jit.toolchain.device_compiler import compile_hip
from jitfmha.emulator import Emulator, EmulatorError
emulator = Emulator()
module = emulator.load_module(compile_hip('''{_SOURCE}''', "gfx942"), 0)
kernel = emulator.function(module, "endless")
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
# Each thread asks for the address space of its stack.
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 29), resource.RLIM_INFINITY))
emulator.set_options(threads=5000, instruction_budget=100_000)
try:
    emulator.launch(kernel, (5000, 1, 1), (64, 1, 1), bytes(4))
except EmulatorError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
emulator.set_options(threads=2, instruction_budget=1000)
try:
    emulator.launch(kernel, (2, 1, 1), (64, 1, 1), bytes(4))
except EmulatorError as error:
    print(error)
"""


def test_threads_that_do_not_start():
    """The process ended. The next launch finds nothing of the one that failed."""
    first, second = run_forked("-c", _THREADS_THAT_DO_NOT_START).stdout.splitlines()
    assert first == (
        "hipErrorLaunchFailure: kernel endless: a worker thread does not start: "
        "Resource temporarily unavailable"
    )
    assert "budget of 1000 instructions is used up" in second
