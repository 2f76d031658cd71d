"""Processes that make a first call, each in surroundings of its own.

Importing torch takes longer than most of what is tried here, so one process imports it and forks
a caller for each call. Such a caller has never looked at a cache: it is as good as a new process.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, final

from jitfmha.bench.report import Progress
from jitfmha.jit.fresh_process import fresh_python

from .faulty_system import faulty_system
from .outcome import Extent, Outcome, reported_seed

_SERVE = "from rigs.cache_faults.caller_process import serve; serve()"
_WARNING = "RuntimeWarning: jitfmha: "
# Variables of this process that would change what a caller does.
_OWN_VARIABLES = ("JITFMHA_", "FAULTY_", "XDG_", "AITER_", "PYTEST", "TMPDIR")


@dataclass(frozen=True)
class Call:
    """One first call.

    Attributes:
        environment: on top of this process's, without what concerns the cache; None removes.
        kernel: "attention" for ``fmha_fwd``, or "tiny" and a number for a launcher that gives it.
        directory: the current directory; None leaves it.
        umask: None leaves it.
        is_ordinary: whether permissions bind, also where this process is root.
        is_nobody: whether no user data base knows the user.
        mounts: (folder, options) of memory file systems that the caller alone sees.
        attributes: "module.name" to a value that it has in the caller.
        answers: "module.function" to what it always returns in the caller.
        listed_folders: folders whose content the answer holds, as the caller sees it in the end.
        hold: whether to stay, with the library in use, until the answer's ``release``.
    """

    environment: Mapping[str, str | None] = field(default_factory=dict)
    kernel: str = "tiny1"
    directory: Path | None = None
    umask: int | None = None
    is_ordinary: bool = False
    is_nobody: bool = False
    mounts: Sequence[tuple[str, str]] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)
    answers: Mapping[str, object] = field(default_factory=dict)
    listed_folders: Sequence[str] = ()
    hold: bool = False


@dataclass(frozen=True)
class Answer:
    """How a call ended.

    Attributes:
        status: of the process; None if it hung and was ended.
        right: whether it returned what it should.
        how: "built", "loaded", or "" if nothing was.
        error: the name of the exception, or "".
        message: of the exception.
        warnings: the package's warnings on stderr.
        stderr: all of it.
        library: the path of the loaded library.
        loaded: path and SHA-256 of each library at the moment it was given to the loader.
        files_left: what was below ``Call.listed_folders``.
        seconds: for the call.
    """

    status: int | None
    right: bool
    how: str
    error: str
    message: str
    warnings: tuple[str, ...]
    stderr: str
    library: str
    loaded: tuple[tuple[str, str], ...]
    files_left: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        result = "right" if self.right else self.error or "wrong"
        parts = [f"status {self.status}, {result}, {self.how or 'nothing loaded'}"]
        parts += [self.message, *self.warnings]
        if self.status != 0:
            parts.append(self.stderr[-500:])
        return "; ".join(filter(None, parts))


class RunningCall:
    """A caller under way."""

    def __init__(self, callers: Callers, pid: int, folder: Path, pipe: int | None) -> None:
        self.pid = pid
        self._callers = callers
        self._folder = folder
        self._pipe = pipe

    def wait_until_held(self, seconds: float = 300.0) -> Answer:
        """How the call ended, while the process goes on holding what it loaded."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            content = (self._folder / "report").read_bytes() if self._has_report() else b""
            if content.endswith(b"}"):
                return _answer(self._folder, 0)
            time.sleep(0.01)
        return _answer(self._folder, None)

    def finish(self, seconds: float = 300.0) -> Answer:
        """Let the process end, and tell how."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        reply = self._callers._ask({"wait": self.pid, "seconds": seconds})
        answer = _answer(self._folder, reply["status"])
        shutil.rmtree(self._folder, ignore_errors=True)
        return answer

    def _has_report(self) -> bool:
        return (self._folder / "report").exists()


@final
class Callers:
    """A process with the package imported that forks callers; a context manager.

    Attributes:
        folder: where the callers report.
    """

    def __init__(self, *package_parent: Path) -> None:
        """Start it.

        Args:
            package_parent: where another copy of the package is; by default it is this process's.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="jitfmha-callers-"))
        self._count = 0
        self._faulty_system = shutil.copy(faulty_system(), self.folder / "faulty_system.so")
        environment = _base_environment()
        preloaded = filter(None, [os.environ.get("LD_PRELOAD"), str(self._faulty_system)])
        self._process = subprocess.Popen(
            fresh_python(_SERVE, first=package_parent),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env={**environment, "LD_PRELOAD": " ".join(preloaded)},
        )
        if not self._reply()["is_faulty"]:
            self.close()
            raise RuntimeError(f"{self._faulty_system} cannot be preloaded")

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; callers under way go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, call: Call) -> RunningCall:
        """Begin a call."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        pipe = None
        if call.hold:
            os.mkfifo(folder / "held")
            pipe = os.open(folder / "held", os.O_RDWR | os.O_CLOEXEC)
        request = vars(call) | {
            "folder": str(folder),
            "environment": self._environment(call),
            "directory": None if call.directory is None else str(call.directory),
        }
        return RunningCall(self, int(self._ask(request)["pid"]), folder, pipe)

    def call(self, call: Call) -> Answer:
        """Make a call and wait for its end."""
        return self.start(call).finish()

    def at_once(self, calls: Sequence[Call]) -> list[Answer]:
        """Make calls at once and wait for all."""
        return [running.finish() for running in [self.start(call) for call in calls]]

    def _environment(self, call: Call) -> dict[str, str]:
        values: dict[str, str | None] = {**_base_environment(), **call.environment}
        if any(name.startswith("FAULTY_") for name in values) and "LD_PRELOAD" not in values:
            values["LD_PRELOAD"] = str(self._faulty_system)  # For the compiler, too.
        return {name: value for name, value in values.items() if value is not None}

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks callers ended")
        reply: dict[str, Any] = json.loads(line)
        return reply


@cache
def shared_callers() -> Callers:
    """One process for all scenarios that this process runs, ended at exit."""
    callers = Callers()
    atexit.register(callers.close)
    return callers


@dataclass(frozen=True)
class Scratch:
    """Folders of one attempt: private to this user, as those of a user are."""

    root: Path

    @property
    def cache(self) -> Path:
        """For ``JITFMHA_CACHE_DIR``; not created."""
        return self.root / "cache"

    @property
    def entries(self) -> Path:
        """Where finished builds are."""
        return self.cache / "v1" / "entries"

    @property
    def temporary(self) -> Path:
        """For ``TMPDIR``."""
        return self.root / "temporary"

    @property
    def environment(self) -> dict[str, str]:
        """That leads a caller here."""
        return {"JITFMHA_CACHE_DIR": str(self.cache), "TMPDIR": str(self.temporary)}

    def debris(self) -> list[str]:
        """What no process should have left behind."""
        folders = [self.temporary, self.cache / "v1" / "building", self.cache / "v1" / "trash"]
        return [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()]

    def entry_names(self) -> list[str]:
        """The entries of the cache."""
        return sorted(os.listdir(self.entries)) if self.entries.is_dir() else []


@contextmanager
def new_scratch() -> Iterator[Scratch]:
    """Scratch folders that go with everything in them, whatever became of its permissions."""
    with tempfile.TemporaryDirectory(prefix="jitfmha-fault-", ignore_cleanup_errors=True) as folder:
        scratch = Scratch(Path(folder).resolve())
        scratch.temporary.mkdir(mode=0o700)
        try:
            yield scratch
        finally:
            for root, names, _ in os.walk(folder):
                for name in names:
                    path = os.path.join(root, name)
                    if not os.path.islink(path):
                        os.chmod(path, 0o700)


class Trial:
    """A scenario under way: how much of it is run, who makes its calls, and what it found."""

    def __init__(self, scenario: str, extent: Extent, progress: Progress, seed: int | None) -> None:
        self.extent = extent
        self.progress = progress
        self.rng = random.Random(reported_seed(scenario, progress, seed))
        self.callers = shared_callers()
        self.outcome = Outcome()

    @property
    def is_long(self) -> bool:
        """Whether this is what the bars mean."""
        return self.extent is Extent.LONG

    def expect(self, holds: bool, sentence: str) -> None:
        """As :meth:`Outcome.expect` does."""
        self.outcome.expect(holds, sentence)

    def builds(self, call: Call, what: str, *, warnings: int = 0) -> Answer:
        """Make a call, and expect that it builds and is right."""
        answer = self.callers.call(call)
        self.expect_right(answer, what, how="built", warnings=warnings)
        return answer

    def loads(self, call: Call, what: str) -> Answer:
        """Make a call, and expect that it finds everything built, and is right."""
        answer = self.callers.call(call)
        self.expect_right(answer, what, how="loaded")
        return answer

    def expect_right(self, answer: Answer, what: str, *, how: str = "", warnings: int = 0) -> None:
        """Expect a right result without an error, ``how`` if given, and so many warnings."""
        holds = answer.status == 0 and answer.right and not answer.error
        holds = holds and (not how or answer.how == how) and len(answer.warnings) == warnings
        wanted = f"a right result{how and ', ' + how}, {warnings} warnings"
        self.expect(holds, f"{what}: expected {wanted}; got {answer}")

    def refused(self, call: Call, what: str, *words: str, warnings: int = 0) -> Answer:
        """Make a call, and expect a CacheError with these words and at most so many warnings."""
        answer = self.callers.call(call)
        self.expect_refused(answer, what, *words, warnings=warnings)
        return answer

    def expect_refused(self, answer: Answer, what: str, *words: str, warnings: int = 0) -> None:
        """Expect a CacheError that has these words in it, and at most so many warnings."""
        holds = answer.status == 0 and answer.error == "CacheError"
        holds = holds and len(answer.warnings) <= warnings
        holds = holds and all(word in answer.message for word in words)
        self.expect(holds, f"{what}: expected CacheError with {words}; got {answer}")

    def expect_clean(self, scratch: Scratch, what: str) -> None:
        """Expect no debris."""
        debris = scratch.debris()
        self.expect(not debris, f"{what}: left behind {', '.join(debris)}")


def _base_environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)
    }


def _answer(folder: Path, status: int | None) -> Answer:
    report: dict[str, Any] = {}
    if (folder / "report").exists():
        content = (folder / "report").read_bytes()
        report = json.loads(content) if content.endswith(b"}") else {}
    error_file = folder / "stderr"
    stderr = error_file.read_bytes().decode(errors="replace") if error_file.exists() else ""
    warnings = [line.partition(_WARNING)[2] for line in stderr.split("\n") if _WARNING in line]
    return Answer(
        status=status,
        right=bool(report.get("right", False)),
        how=report.get("how", ""),
        error=report.get("error", "" if report else "no report"),
        message=report.get("message", ""),
        warnings=tuple(warnings),
        stderr=stderr,
        library=report.get("library", ""),
        loaded=tuple((path, digest) for path, digest in report.get("loaded", [])),
        files_left=tuple(report.get("files_left", [])),
        seconds=report.get("seconds", 0.0),
    )
