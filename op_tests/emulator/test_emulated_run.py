"""What `emulate` gives: findings of the sanitizer, profiles, and launches with their memory."""

import struct
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from subprocesses import run_forked

from jitfmha.emulator import DEVICES, EmulatedRun, EmulatorError, SanitizerWarning, emulate
from jitfmha.emulator.session import Emulation, _run_here, extent
from jitfmha.jit.toolchain.device_compiler import compile_hip

# Copies; reads as many words of `from` as there are threads, whatever it holds.
_SOURCE = """
extern "C" __global__ void copy(const int* from, int* to) {
  const int i = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
  to[i] = from[i];
}
"""


def _launch(run: EmulatedRun, given: torch.Tensor, to: torch.Tensor, kernel: str = "copy") -> None:
    """As a launcher does it: the kernel is told of two tensors and given `given` and `to`."""
    emulation = run.emulation
    code_object = compile_hip(_SOURCE.replace("copy", kernel), emulation.arch[:6])
    with emulation.launching((given, None, to)) as emulator:
        kernarg = struct.pack("<QQ", given.data_ptr(), to.data_ptr())
        with emulator.loaded(code_object, emulation.device, kernel) as function:
            emulator.launch(function, (to.numel() // 64, 1, 1), (64, 1, 1), kernarg)


@pytest.fixture
def output() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize("chip", list(DEVICES))
def test_a_clean_launch(chip, output, rng):
    given = torch.randint(2**31 - 1, (64,), dtype=torch.int32, generator=rng)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with emulate(chip, check=True) as run:
            _launch(run, given, output)
            assert run.findings() == ()
    assert torch.equal(output, given)


def test_an_access_outside_of_the_tensors_is_found(output, capfd, seed):
    memory = torch.arange(64, dtype=torch.int32)
    kernel = f"overrun_{seed}"  # findings of a kernel are printed once in a process
    with emulate("gfx942", check=True) as run:
        _launch(run, memory[:60], output, kernel)
        (finding,) = run.findings()
    assert finding.kind == "global-bounds"
    assert (finding.kernel, finding.wave, finding.lane) == (kernel, 0, 60)
    assert finding.count == 4
    assert finding.address.startswith(f"{kernel}+0x")
    assert finding.instruction.startswith("global_load_dword")
    printed = capfd.readouterr().err
    assert printed == f"jitfmha emulator: {finding}\n"
    # What lies outside is zero to the kernel.
    assert output.tolist() == [*range(60), 0, 0, 0, 0]

    with emulate("gfx942", check=True) as run:
        for _ in range(2):
            _launch(run, memory[:60], output, kernel)
        (again,) = run.findings()
        assert again.count == 8
    assert capfd.readouterr().err == "", "printed once"


def test_without_checks_it_is_an_error(output):
    memory = torch.arange(64, dtype=torch.int32)
    with emulate("gfx942") as run, pytest.raises(EmulatorError, match="lane 60: load of 4 bytes"):
        _launch(run, memory[:60], output)


def test_findings_that_nobody_read_are_a_warning(output):
    memory = torch.arange(64, dtype=torch.int32)
    with (
        pytest.warns(SanitizerWarning, match="1 faults that nobody asked for.*global-bounds"),
        emulate("gfx950", check=True) as run,
    ):
        _launch(run, memory[:32], output)


def test_an_inner_block_keeps_its_findings(output):
    memory = torch.arange(64, dtype=torch.int32)
    with emulate("gfx942", check=True) as outer:
        _launch(outer, memory, output)
        with emulate("gfx950", check=True) as inner:
            _launch(inner, memory[:32], output)
            assert [finding.kind for finding in inner.findings()] == ["global-bounds"]
        assert outer.findings() == ()


def test_launches_of_another_emulation_are_not_the_blocks(output):
    memory = torch.arange(64, dtype=torch.int32)
    with emulate("gfx942", check=True) as before:
        pass
    with emulate("gfx950", check=True) as run:
        _launch(before, memory[:32], output)
        assert run.findings() == ()
        of_process = _run_here(before.emulation)
        assert [finding.kind for finding in of_process.findings()] == ["global-bounds"]


def test_only_what_was_asked_for(output):
    with emulate("gfx942", profile=True) as run:
        with pytest.raises(RuntimeError, match="check=True"):
            run.findings()
        _launch(run, torch.zeros(64, dtype=torch.int32), output)
        (profile,) = run.profiles()
        assert profile.kernel == "copy"
    with emulate("gfx942", check=True) as run, pytest.raises(RuntimeError, match="profile=True"):
        run.profiles()
    for arguments in ({"sample": 4}, {"sample": 0, "profile": True}):
        with pytest.raises(ValueError, match="sample is"), emulate("gfx942", **arguments):
            pass


def test_a_sample_of_the_workgroups_runs(rng):
    given = torch.randint(1, 2**31 - 1, (64 * 100,), dtype=torch.int32, generator=rng)
    output = torch.zeros_like(given)
    with emulate("gfx950", profile=True, sample=10) as run:
        _launch(run, given, output)
        (profile,) = run.profiles()
    written = output.view(100, 64).ne(0).all(1)
    assert written.sum() == profile.selected_workgroups == profile.ended_workgroups == 10
    assert [timed.number for timed in profile.timed] == written.nonzero().flatten().tolist()
    assert torch.equal(output.view(100, 64)[written], given.view(100, 64)[written])
    estimate = profile.estimate()
    assert estimate is not None
    assert estimate.workgroups == 100


def test_threads_do_not_see_each_others_memory_and_findings():
    both = threading.Barrier(2)
    found: dict[int, list[str]] = {}

    def work(words: int) -> None:
        memory, output = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        with emulate("gfx942", check=True) as run:
            for _ in range(5):
                both.wait()
                _launch(run, memory[:words], output)
            found[words] = [f"{finding.lane} {finding.count}" for finding in run.findings()]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (64, 40)))
    assert found == {64: [], 40: ["40 120"]}


def test_options_hold_inside_only(output):
    emulation = Emulation("gfx942", threads=3, random_order=5)
    emulator = Emulation("gfx942").emulator()
    emulator.set_options(instruction_budget=1)
    try:
        with emulation.launching((output,)):
            pass
        run = EmulatedRun(Emulation("gfx942"))
        _launch(run, output, output.clone())  # options of the emulation: no budget
        kernarg = struct.pack("<QQ", output.data_ptr(), output.data_ptr())
        with (
            emulator.loaded(compile_hip(_SOURCE, "gfx942"), 0, "copy") as function,
            pytest.raises(EmulatorError, match="budget of 1 instructions"),
        ):
            emulator.launch(function, (1, 1, 1), (64, 1, 1), kernarg)
    finally:
        emulator.set_options()


@pytest.mark.parametrize("layout", ["dense", "transposed", "expanded", "column"])
def test_extent_of_a_tensor(layout):
    base = torch.zeros(4, 6, dtype=torch.float64)
    tensor = {
        "dense": base,
        "transposed": base.T,
        "expanded": base[1:2].expand(9, 6),
        "column": base[1:, 2],
    }[layout]
    address, size = extent(tensor)
    places = [
        tensor.data_ptr() + 8 * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in torch.cartesian_prod(*map(torch.arange, tensor.shape))
        .view(-1, tensor.dim())
        .tolist()
    ]
    assert (address, address + size) == (min(places), max(places) + 8)


_PROCESS = """
import struct, torch
from jitfmha.emulator import emulation
from jitfmha.jit.toolchain.device_compiler import compile_hip
current = emulation()
assert current.variant == "check"
memory, to = torch.zeros(32, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
with current.launching((memory, to)) as emulator:
    module = emulator.load_module(compile_hip('''SOURCE''', current.arch), current.device)
    kernarg = struct.pack("<QQ", memory.data_ptr(), to.data_ptr())
    emulator.launch(emulator.function(module, "copy"), (1, 1, 1), (64, 1, 1), kernarg)
print("end of the program")
"""


def test_the_environment_makes_findings_reach_the_user():
    environment = {"JITFMHA_EMULATE": "gfx942", "JITFMHA_EMULATE_CHECK": "1"}
    program = textwrap.dedent(_PROCESS).replace("SOURCE", _SOURCE)
    done = run_forked("-c", program, **environment)
    found, at_end = done.stderr.strip().splitlines()[-2:]
    assert found.startswith("jitfmha emulator: global-bounds: kernel copy, at copy+0x")
    assert "workgroup (0, 0, 0), wave 0, lane 32: load of 4 bytes" in found
    assert at_end.startswith("jitfmha: the emulator's sanitizer found 1 faults that nobody asked")
