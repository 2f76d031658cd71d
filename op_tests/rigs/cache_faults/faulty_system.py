"""Files that cannot be written, missing locks, wrong clocks and foreign owners, for real processes.

A library that is preloaded into a process stands in front of the C library there
(``faulty_system.cpp``) and obeys the process's environment, so that no
file system has to be mounted and no right is needed.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from jitfmha import jit

_SOURCE = Path(__file__).with_suffix(".cpp")
_COUNTER_BYTES = 4096
_NOTE_OFFSET = 64


def faulty_system() -> Path:
    """The library for ``LD_PRELOAD``, built where needed."""
    spec = jit.BuildSpec(
        name="faulty_system",
        sources={_SOURCE.name: _SOURCE.read_text(encoding="utf-8")},
        cflags=("-std=c++17", "-O2", "-fvisibility=hidden"),
        ldflags=("-ldl",),
        why="the cache is tried on a system with faults",
    )
    # Kept loaded, so that nobody evicts it while processes are started with it.
    return Path(jit.load(spec)._name)


@dataclass(frozen=True)
class FileFault:
    """File operations that fail below some folders, in a process and in those that it starts.

    Attributes:
        below: the folders.
        counter: a file of this fault alone, created by :meth:`environment`.
        at: the number of the operation that fails, from 1; 0 only counts.
        error: the error number.
        stays: whether all later operations fail too.
        only: the operations that count (open, mkdir, rename, write, fsync, close, and access for
            writing); all if empty.
        spared: folders below those in which nothing fails.
    """

    below: tuple[Path, ...]
    counter: Path
    at: int
    error: int
    stays: bool = False
    only: tuple[str, ...] = ()
    spared: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        """What the process needs in its environment."""
        self.counter.write_bytes(bytes(_COUNTER_BYTES))
        values = {
            "FAULTY_BELOW": "\n".join(map(str, self.below)),
            "FAULTY_SPARED": "\n".join(map(str, self.spared)),
            "FAULTY_COUNTER": str(self.counter),
            "FAULTY_AT": str(self.at),
            "FAULTY_ERRNO": str(self.error),
        }
        if self.stays:
            values["FAULTY_STAYS"] = "1"
        if self.only:
            values["FAULTY_ONLY"] = ",".join(self.only)
        return values

    def operations(self) -> int:
        """How many there were."""
        return int.from_bytes(self.counter.read_bytes()[:8], "little")

    def what_failed(self) -> str:
        """The first operation that was made to fail and its path; empty if none was."""
        note = self.counter.read_bytes()[_NOTE_OFFSET:]
        return note[: note.index(0)].decode(errors="replace")


def without_locks(error: int) -> dict[str, str]:
    """The environment in which every ``flock`` fails with ``error``."""
    return {"FAULTY_LOCKS": str(error)}


def wrong_clock(*seconds: int) -> dict[str, str]:
    """The environment in which the time of day is off, at each reading by the next of these."""
    return {"FAULTY_CLOCK": ",".join(map(str, seconds))}


def foreign_owner(path: Path, user: int) -> dict[str, str]:
    """The environment in which ``path`` appears to be owned by ``user``."""
    status = os.lstat(path)
    return {"FAULTY_FOREIGN": f"{status.st_dev} {status.st_ino} {user}"}
