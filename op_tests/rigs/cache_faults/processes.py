"""Forked processes that start together, report what they found, and are never waited for in vain.

Forked, because a process that imports torch itself spends a second on that: sixty-four of them
would hardly meet. A fork has everything of a new process that matters to the build cache: a pid,
locks, mappings and a memory of its own.
"""

import ctypes
import faulthandler
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_FORK = multiprocessing.get_context("fork")
_STACK_DUMP_SECONDS = 5.0
_ARRIVAL_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        status: its exit code, negated if it is a signal; None if it was stuck and had to be killed.
        report: what its work returned.
        output: its stdout and stderr, with the stacks of all threads if it crashed or was stuck.
    """

    pid: int
    status: int | None
    report: dict[str, object]
    output: str

    def __str__(self) -> str:
        how = "was stuck" if self.status is None else f"ended with {self.status}"
        return f"pid {self.pid} {how}, and said {self.output[-3000:]!r}"


class Worker:
    """One forked process."""

    def __init__(
        self, folder: Path, work: Callable[[], Mapping[str, object]], environment: Mapping[str, str]
    ) -> None:
        """Start it.

        Args:
            folder: a new directory for its output.
            work: what it does; the result must be fit for JSON.
            environment: on top of this process's.
        """
        folder.mkdir(parents=True)
        (folder / "output").touch(mode=0o600)  # It may be killed before it gets as far as that.
        self._folder = folder
        self._process = _FORK.Process(target=self._run, args=(work, environment), daemon=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        # As a shell does, here and there: whoever signals the group may be first.
        os.setpgid(self.pid, self.pid)

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process alone, or to all of the process group that it leads.

        One that has ended by itself gets none.
        """
        # Starting another worker reaps those that have ended, and their numbers are free then.
        if self._process.is_alive():
            os.kill(-self.pid if group else self.pid, number)

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def end(self, limit_seconds: float) -> Ending:
        """Wait for its end; what takes longer than the limit is killed."""
        self._process.join(limit_seconds)
        status = self._process.exitcode
        if status is None:
            self.signal(signal.SIGABRT)  # Dumps all stacks first.
            self._process.join(_STACK_DUMP_SECONDS)
            self._process.kill()
            self._process.join()
        output = (self._folder / "output").read_text(encoding="utf-8", errors="replace")
        return Ending(self.pid, status, self._report(), output)

    def _report(self) -> dict[str, object]:
        try:
            report: dict[str, object] = json.loads((self._folder / "report").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return report

    def _run(
        self, work: Callable[[], Mapping[str, object]], environment: Mapping[str, str]
    ) -> None:
        end_with_parent()
        # A group of its own, as a shell gives it to each job.
        os.setpgid(0, 0)
        output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        faulthandler.enable(file=2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        report = work()
        (self._folder / "report").write_text(json.dumps(report), encoding="utf-8")


def end_with_parent() -> None:
    """Be killed when the parent ends, so that nothing stays behind a run that was broken off."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Gate:
    """Where a number of processes wait until the last has come and somebody opens it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._arrivals = os.pipe()
        self._go = os.pipe()

    def wait(self) -> None:
        """Arrive, and return once the gate is open."""
        os.write(self._arrivals[1], b".")
        os.read(self._go[0], 1)

    def open(self) -> None:
        """Wait for all to arrive, then let them go at once.

        Raises:
            TimeoutError: some do not arrive.
        """
        missing = self._count
        while missing:
            if not select.select([self._arrivals[0]], [], [], _ARRIVAL_SECONDS)[0]:
                raise TimeoutError(f"{missing} of {self._count} processes do not arrive")
            missing -= len(os.read(self._arrivals[0], missing))
        os.write(self._go[1], b"." * self._count)
        for descriptor in (*self._arrivals, *self._go):
            os.close(descriptor)


def wait_until(condition: Callable[[], bool], limit_seconds: float = 30.0) -> bool:
    """Whether the condition came true within the limit."""
    end = time.monotonic() + limit_seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def wait_for_exit(child: int, limit_seconds: float) -> int | None:
    """The exit code of a forked child, negated if it is a signal; None if it was stuck."""
    statuses: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            statuses.append(os.waitstatus_to_exitcode(status))
        return bool(pid)

    if wait_until(has_ended, limit_seconds):
        return statuses[0]
    os.kill(child, signal.SIGABRT)
    os.waitpid(child, 0)
    return None


def live_processes(session: int, below: Path) -> dict[int, str]:
    """The processes of a session and those that work below a directory, with their commands.

    Zombies are left out: they run nothing, and wait for whoever adopted them.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            status = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ")
            where = os.readlink(f"/proc/{name}/cwd")
        except OSError:
            continue  # It has ended, or belongs to somebody else.
        state, _parent, _group, its_session = status.rpartition(")")[2].split()[:4]
        is_ours = int(its_session) == session or where.startswith(f"{below}/")
        if is_ours and state not in "ZX":
            found[int(name)] = command.decode(errors="replace").strip()
    return found
