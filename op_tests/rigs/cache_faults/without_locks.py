"""A file system without locks, such as NFS without its lock daemon: flock fails, for filelock too.

Whoever came first builds then, as far as the others can see. What keeps the cache right is that an
entry appears by one rename.
"""

from __future__ import annotations

import errno
import os

from jitfmha.bench.report import Progress
from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .callers import (
    Call,
    Callers,
    Scratch,
    expect_answer,
    expect_clean,
    new_scratch,
    shared_callers,
)
from .damaged_files import is_intact
from .faulty_system import without_locks
from .outcome import Extent, Figure, Outcome
from .watched_compiler import WatchedCompiler

_ERRORS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_CALLERS = {Extent.SHORT: 8, Extent.LONG: 32}
_ROUNDS = {Extent.SHORT: 1, Extent.LONG: 5}


def run(extent: Extent, progress: Progress, _seed: int | None = None) -> Outcome:
    """Two callers at once, then many, on an empty cache; then a damaged entry."""
    outcome = Outcome()
    callers = shared_callers()
    most = 0
    for error in _ERRORS:
        for _ in range(_ROUNDS[extent]):
            most = max(most, _at_once(callers, error, 2, "tiny1", outcome))
            if extent is Extent.LONG or error == _ERRORS[0]:
                builds = _at_once(callers, error, _CALLERS[extent], "tiny1", outcome)
                progress(f"{os.strerror(error)}: {_CALLERS[extent]} at once, {builds} built")
                most = max(most, builds)
        if extent is Extent.LONG or error == _ERRORS[0]:
            _damaged_entry(callers, error, outcome)
    if extent is Extent.LONG:
        most = max(most, _at_once(callers, errno.ENOLCK, 2, "attention", outcome))
    outcome.figures.append(Figure("builds of one entry without locks", most, 2, "builds"))
    return outcome


def _at_once(callers: Callers, error: int, count: int, kernel: str, outcome: Outcome) -> int:
    """Calls at once on an empty cache; returns how many of them compiled."""
    what = f"{os.strerror(error)}, {count} callers of {kernel} at once"
    with new_scratch() as scratch:
        compiler = WatchedCompiler.install(scratch.root, list(find_host_cpp().command))
        environment = {**scratch.environment, **without_locks(error), "CXX": str(compiler.path)}
        for answer in callers.at_once([Call(environment, kernel)] * count):
            expect_answer(outcome, answer, what)
        builds = compiler.runs().count("compile")
        outcome.expect(1 <= builds <= count, f"{what}: {builds} builds")
        _expect_one_entry(scratch, what, outcome)
        answer = callers.call(Call(environment, kernel))
        expect_answer(outcome, answer, f"the call after {what}", how="loaded")
        outcome.expect(compiler.runs().count("compile") == builds, f"{what}: was built again")
        # Others may have locks there, or get them later.
        answer = callers.call(Call({**environment, "FAULTY_LOCKS": None}, kernel))
        expect_answer(outcome, answer, f"the call with locks after {what}", how="loaded")
        return builds


def _damaged_entry(callers: Callers, error: int, outcome: Outcome) -> None:
    what = f"{os.strerror(error)}, a damaged entry"
    with new_scratch() as scratch:
        environment = {**scratch.environment, **without_locks(error)}
        expect_answer(outcome, callers.call(Call(environment)), what, how="built")
        library = scratch.entries / scratch.entry_names()[0] / "tiny.so"
        library.write_bytes(library.read_bytes()[:-1])
        expect_answer(outcome, callers.call(Call(environment)), what, how="built", warnings=1)
        outcome.expect(
            len(scratch.entry_names()) == 1 and is_intact(library.parent),
            f"{what}: it is still not valid",
        )
        # Nobody knows whether the damaged library is mapped somewhere; it stays for a day.
        discarded = [path.name for path in (scratch.cache / "v1" / "trash").iterdir()]
        outcome.expect(len(discarded) == 1, f"{what}: the trash holds {discarded}")


def _expect_one_entry(scratch: Scratch, what: str, outcome: Outcome) -> None:
    names = scratch.entry_names()
    intact = [name for name in names if is_intact(scratch.entries / name)]
    outcome.expect(len(names) == len(intact) == 1, f"{what}: entries {names}, valid {intact}")
    expect_clean(outcome, scratch, what)
