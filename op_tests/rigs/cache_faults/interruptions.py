"""Forks, threads, interpreter shutdown, KeyboardInterrupt and SIGTERM, most of them mid-build.

Where an end has to come during a build, the compiler is held: it would never finish by itself, so
whatever returns did not wait for it, and a compiler that nobody ends is there to be found.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from jitfmha.jit.fresh_process import fresh_python

from .attention_call import AttentionCall
from .outcome import Extent, Outcome
from .processes import Ending, Gate, Worker, wait_for_exit, wait_until
from .sandbox import Sandbox
from .watched_compiler import BUILD

_REPEATS = {Extent.SHORT: 1, Extent.LONG: 3}
_RANDOM_MOMENTS = {Extent.SHORT: 1, Extent.LONG: 60}
LIMIT_SECONDS = {Extent.SHORT: 300.0, Extent.LONG: 3600.0}
_CALL_LIMIT_SECONDS = 60.0
# What ends a process or a compiler acts at once, but for the imports of a first build, which come
# to their end; this is for a machine that is busy, where none is held that would end by itself.
_GRACE_SECONDS = 3.0
_THREADS = 32

_INTERPRETER = """
import signal, sys, threading, time
from pathlib import Path
import torch
from rigs.cache_faults.attention_call import AttentionCall
way, compiler_runs, number = sys.argv[1:]
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
call = AttentionCall.draw(int(number))
if way == "in the main thread":
    call.make()
else:
    threading.Thread(target=call.make, daemon=True).start()
    # The compiler's script creates the file before it writes to it; ended in between, it would
    # never have been seen.
    while not (Path(compiler_runs).exists() and Path(compiler_runs).read_text()):
        time.sleep(0.01)
    sys.exit(7)
"""


def run_inside(sandbox: Sandbox, extent: Extent) -> Outcome:
    """All interruptions, one after the other."""
    interruptions = _Interruptions(sandbox, Outcome())
    for number in range(_REPEATS[extent]):
        interruptions.fork_after_load()
        interruptions.fork_after_a_parallel_call()
        interruptions.fork_during_a_build()
        interruptions.threads_race_to_the_first_call()
        interruptions.interpreter_shuts_down_during_a_build()
        interruptions.interrupt_ends_the_interpreter()
        for group in _groups(sandbox, extent):
            interruptions.interrupt_while_building(group)
            interruptions.interrupt_while_waiting(group)
            interruptions.terminate_the_builder(group)
        sandbox.progress(f"every interruption {number + 1} times: {interruptions.summary()}")
    for _ in range(_RANDOM_MOMENTS[extent]):
        interruptions.interrupt_at_a_random_moment(group=sandbox.rng.random() < 0.5)
    sandbox.progress(interruptions.summary())
    return interruptions.outcome


def _groups(sandbox: Sandbox, extent: Extent) -> tuple[bool, ...]:
    """Whether signals go to the whole process group: both in turn, or one drawn."""
    return (False, True) if extent is Extent.LONG else (sandbox.rng.random() < 0.5,)


class _Interruptions:
    """Each method is one kind of interruption on an empty cache; a call that works follows."""

    def __init__(self, sandbox: Sandbox, outcome: Outcome) -> None:
        self.outcome = outcome
        self._sandbox = sandbox
        self._call = self._draw()
        self._interrupted_before_the_end = 0
        self._random_moments = 0
        self._ends: list[float] = []

    def fork_after_load(self) -> None:
        """The child has the library already, and can build another."""
        call, other = self._call, self._draw(hdim=16)

        def work() -> dict[str, object]:
            call.make()
            return {"child": _status_of_fork(lambda: (call.make(), other.make()))}

        with self._case("fork after load"):
            ending = self._run(work)
            self._expect(ending.report.get("child") == 0, f"the child of a fork: {ending}")

    def fork_after_a_parallel_call(self) -> None:
        """As the workers of a data loader, which torch gives one thread.

        With more, the child of a process that used torch's threads would hang in any operator.
        """
        large = self._draw(seqlen=256)

        def work() -> dict[str, object]:
            torch.set_num_threads(2)
            large.make()

            def child() -> None:
                torch.set_num_threads(1)
                large.make()

            return {"child": _status_of_fork(child)}

        with self._case("fork after a parallel call"):
            ending = self._run(work)
            self._expect(ending.report.get("child") == 0, f"the child of a fork: {ending}")

    def fork_during_a_build(self) -> None:
        """The child waits for the thread of its parent, as any other process."""
        call, compiler = self._call, self._sandbox.compiler

        def work() -> dict[str, object]:
            thread = threading.Thread(target=call.make)
            thread.start()
            wait_until(lambda: bool(compiler.runs()))
            child = os.fork()
            if child == 0:
                _exit_after(call.make)
            time.sleep(0.2)
            compiler.hold.unlink()
            thread.join()
            return {"child": wait_for_exit(child, _CALL_LIMIT_SECONDS / 2)}

        with self._case("fork during a build", hold=True):
            ending = self._run(work)
            self._expect(ending.report.get("child") == 0, f"the child of a fork: {ending}")
            self._expect(compiler.runs() == BUILD, f"built {compiler.runs()}")

    def threads_race_to_the_first_call(self) -> None:
        """One of them builds, all have the right result."""
        call = self._call

        def work() -> dict[str, object]:
            barrier = threading.Barrier(_THREADS)
            one_at_a_time = threading.Lock()
            reports = []

            def race() -> None:
                # Torch sets itself up in each thread, and fails now and then ("Invalid thread
                # pool!") where several do so at one moment.
                with one_at_a_time:
                    torch.zeros(1 << 16).add_(1)
                barrier.wait()
                reports.append(call.make())

            threads = [threading.Thread(target=race) for _ in range(_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return {"right": len(reports), "loads": len(reports[0]["how"])}  # type: ignore[arg-type]

        with self._case(f"{_THREADS} threads"):
            ending = self._run(work)
            self._expect(ending.report == {"right": _THREADS, "loads": 1}, f"threads: {ending}")
            runs = self._sandbox.compiler.runs()
            self._expect(runs == BUILD, f"{_THREADS} threads built {runs}")

    def interpreter_shuts_down_during_a_build(self) -> None:
        """`sys.exit` while a daemon thread builds: the exit code is the program's, and soon."""
        with self._case("interpreter shutdown", hold=True):
            process = self._interpreter("in a daemon thread")
            self._await_compiler()
            self._expect_end(process, 7)

    def interrupt_ends_the_interpreter(self) -> None:
        """Ctrl-C that the program does not catch ends it as it ends any Python program."""
        with self._case("uncaught KeyboardInterrupt", hold=True):
            process = self._interpreter("in the main thread")
            self._await_compiler()
            os.killpg(process.pid, signal.SIGINT)
            output = self._expect_end(process, -signal.SIGINT)
            self._expect(output.rstrip().endswith("KeyboardInterrupt"), f"it said {output!r}")

    def interrupt_while_building(self, group: bool) -> None:
        """A notebook sends it to the process alone, a terminal to the whole group."""
        with self._case(f"interrupt while building, group={group}", hold=True):
            builder = self._sandbox.start(self._interruptible)
            self._await_compiler()
            builder.signal(signal.SIGINT, group=group)
            self._expect_nothing_running("after the interrupt", beside=builder)
            self._sandbox.compiler.hold.unlink()
            self._expect_interrupted(builder.end(_CALL_LIMIT_SECONDS))

    def interrupt_while_waiting(self, group: bool) -> None:
        """Who waits gets the interrupt; the builder has nothing to do with it."""
        with self._case(f"interrupt while waiting, group={group}", hold=True):
            builder = self._sandbox.start(self._call.make)
            self._await_compiler()
            gate = Gate(1)
            waiter = self._sandbox.start(lambda: self._interruptible(gate))
            gate.open()
            time.sleep(self._sandbox.rng.uniform(0.3, 1.5))
            waiter.signal(signal.SIGINT, group=group)
            self._expect(builder.is_running(), "the builder ended when the waiter was interrupted")
            self._sandbox.compiler.hold.unlink()
            self._expect_interrupted(waiter.end(_CALL_LIMIT_SECONDS))
            ending = builder.end(_CALL_LIMIT_SECONDS)
            self._expect(ending.status == 0, f"the builder: {ending}")

    def interrupt_at_a_random_moment(self, group: bool) -> None:
        """Anywhere between the call and its end, the imports of the first build included."""
        with self._case(f"interrupt at a random moment, group={group}"):
            gate = Gate(1)
            caller = self._sandbox.start(lambda: self._interruptible(gate))
            gate.open()
            time.sleep(self._sandbox.rng.uniform(0, max(self._ends)))
            caller.signal(signal.SIGINT, group=group)
            ending = caller.end(_CALL_LIMIT_SECONDS)
            self._expect_interrupted(ending)
            self._random_moments += 1
            self._interrupted_before_the_end += ending.report.get("finished") is False

    def terminate_the_builder(self, group: bool) -> None:
        """SIGTERM has its default action, and takes the compiler along."""
        with self._case(f"SIGTERM, group={group}", hold=True):
            builder = self._sandbox.start(self._call.make)
            self._await_compiler()
            builder.signal(signal.SIGTERM, group=group)
            ending = builder.end(_CALL_LIMIT_SECONDS)
            self._expect(ending.status == -signal.SIGTERM, f"a terminated builder: {ending}")
            self._expect_nothing_running("after SIGTERM")

    def summary(self) -> str:
        """What the random moments hit."""
        return (
            f"{len(self.outcome.failures)} failures in {self.outcome.attempts} checks; "
            f"{self._interrupted_before_the_end} of {self._random_moments} interrupts at random "
            "moments came before the call had returned"
        )

    @contextmanager
    def _case(self, label: str, *, hold: bool = False) -> Iterator[None]:
        self._label = label
        self._sandbox.empty_cache()
        if hold:
            self._sandbox.compiler.hold.touch()
        try:
            yield
        finally:
            self._sandbox.compiler.hold.unlink(missing_ok=True)
        self._expect_nothing_running("in the end")
        ending = self._run(self._call.make)
        if ending.report.get("how") == ["built"]:
            began, ended = ending.report["began"], ending.report["ended"]
            assert isinstance(began, float)
            assert isinstance(ended, float)
            self._ends.append(ended - began)
        counts = self._sandbox.counts()
        left = {name: counts[name] for name in ("building", "trash", "logs", "tmp") if counts[name]}
        # Who only loads does not clean up; what is left then goes with the next build.
        if ending.report.get("how") == ["loaded"]:
            left.pop("building", None)
        self._expect(not left, f"left behind {left}")

    def _interruptible(self, gate: Gate | None = None) -> dict[str, object]:
        """Calls until it is interrupted, which must happen, and then once more.

        The second call waits until compilers may work: it builds too, and whoever looks for what
        the first one left behind would find that.
        """
        finished = False
        try:
            if gate:
                gate.wait()  # An interrupt may come before the process has got any further.
            self._call.make()
            finished = True
            time.sleep(2 * _CALL_LIMIT_SECONDS)
        except KeyboardInterrupt:
            caught = time.monotonic()
        wait_until(lambda: not self._sandbox.compiler.hold.exists())
        return {"caught": caught, "finished": finished, "again": self._call.make()}

    def _expect_nothing_running(self, when: str, *, beside: Worker | None = None) -> None:
        is_held = self._sandbox.compiler.hold.exists()
        grace_seconds = _CALL_LIMIT_SECONDS if is_held else _GRACE_SECONDS
        running = self._sandbox.still_running(grace_seconds, beside=beside)
        self._expect(not running, f"still running {when}: {running}")

    def _expect_interrupted(self, ending: Ending) -> None:
        self._expect(
            ending.status == 0 and "again" in ending.report,
            f"KeyboardInterrupt did not reach the caller, or the next call failed: {ending}",
        )

    def _interpreter(self, way: str) -> subprocess.Popen[str]:
        log, number = str(self._sandbox.compiler.log), str(self._sandbox.rng.randrange(2**31))
        return subprocess.Popen(
            fresh_python(_INTERPRETER, way, log, number),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=os.setpgrp,
        )

    def _expect_end(self, process: subprocess.Popen[str], status: int) -> str:
        try:
            _, output = process.communicate(timeout=_CALL_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, output = process.communicate()
            self._expect(False, f"an interpreter does not end; it said {output!r}")
            return output
        self._expect(
            process.returncode == status,
            f"an interpreter ended with {process.returncode}: {output}",
        )
        self._expect_nothing_running("after the interpreter")
        return output

    def _await_compiler(self) -> None:
        began = wait_until(lambda: bool(self._sandbox.compiler.runs()), _CALL_LIMIT_SECONDS)
        self._expect(began, "no compiler is started")

    def _run(self, work: Callable[[], dict[str, object]]) -> Ending:
        ending = self._sandbox.run(work, _CALL_LIMIT_SECONDS)
        self._expect(ending.status == 0, f"a call: {ending}")
        return ending

    def _draw(self, *, seqlen: int = 48, hdim: int = 32) -> AttentionCall:
        return AttentionCall.draw(self._sandbox.rng.randrange(2**31), seqlen=seqlen, hdim=hdim)

    def _expect(self, holds: bool, sentence: str) -> None:
        self.outcome.expect(holds, f"{self._label}: {sentence}")


def _status_of_fork(work: Callable[[], object]) -> int | None:
    child = os.fork()
    if child == 0:
        _exit_after(work)
    return wait_for_exit(child, _CALL_LIMIT_SECONDS / 2)


def _exit_after(work: Callable[[], object]) -> None:
    try:
        work()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)
