"""A file system without locks, such as NFS without its lock daemon.

Whoever came first builds then, as far as the others can see. What keeps the cache right is that an
entry appears by one rename.
"""

import errno
import os

from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .callers import Call, Scratch, Trial, new_scratch
from .damaged_files import is_intact
from .faulty_system import without_locks
from .outcome import Extent
from .watched_compiler import WatchedCompiler

_ERRORS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_CALLERS = {Extent.SHORT: 8, Extent.LONG: 32}
_ROUNDS = {Extent.SHORT: 1, Extent.LONG: 5}


def run(trial: Trial) -> None:
    """Two callers at once, then many, on an empty cache; then a damaged entry."""
    most = 0
    for error in _ERRORS:
        for _ in range(_ROUNDS[trial.extent]):
            most = max(most, _at_once(trial, error, 2, "tiny1"))
            if trial.is_long or error == _ERRORS[0]:
                builds = _at_once(trial, error, _CALLERS[trial.extent], "tiny1")
                trial.progress(
                    f"{os.strerror(error)}: {_CALLERS[trial.extent]} at once, {builds} built"
                )
                most = max(most, builds)
        if trial.is_long or error == _ERRORS[0]:
            _damaged_entry(trial, error)
    if trial.is_long:
        most = max(most, _at_once(trial, errno.ENOLCK, 2, "attention"))
    trial.outcome.at_most("builds of one entry without locks", most, 2, "builds")


def _at_once(trial: Trial, error: int, count: int, kernel: str) -> int:
    """Calls at once on an empty cache; returns how many of them compiled."""
    what = f"{os.strerror(error)}, {count} callers of {kernel} at once"
    with new_scratch() as scratch:
        compiler = WatchedCompiler.install(scratch.root, list(find_host_cpp().command))
        environment = {**scratch.environment, **without_locks(error), "CXX": str(compiler.path)}
        for answer in trial.callers.at_once([Call(environment, kernel)] * count):
            trial.expect_right(answer, what)
        builds = compiler.runs().count("link")
        trial.expect(1 <= builds <= count, f"{what}: {builds} builds")
        _expect_one_entry(trial, scratch, what)
        trial.loads(Call(environment, kernel), f"the call after {what}")
        trial.expect(compiler.runs().count("link") == builds, f"{what}: was built again")
        # Others may have locks there, or get them later.
        trial.loads(
            Call({**environment, "FAULTY_LOCKS": None}, kernel), f"the call with locks after {what}"
        )
        return builds


def _damaged_entry(trial: Trial, error: int) -> None:
    what = f"{os.strerror(error)}, a damaged entry"
    with new_scratch() as scratch:
        environment = {**scratch.environment, **without_locks(error)}
        trial.builds(Call(environment), what)
        library = scratch.entries / scratch.entry_names()[0] / "tiny.so"
        library.write_bytes(library.read_bytes()[:-1])
        trial.builds(Call(environment), what, warnings=1)
        trial.expect(
            len(scratch.entry_names()) == 1 and is_intact(library.parent),
            f"{what}: it is still not valid",
        )
        # Nobody knows whether the damaged library is mapped somewhere; it stays for a day.
        discarded = [path.name for path in (scratch.cache / "v1" / "trash").iterdir()]
        trial.expect(len(discarded) == 1, f"{what}: the trash holds {discarded}")


def _expect_one_entry(trial: Trial, scratch: Scratch, what: str) -> None:
    names = scratch.entry_names()
    intact = [name for name in names if is_intact(scratch.entries / name)]
    trial.expect(len(names) == len(intact) == 1, f"{what}: entries {names}, valid {intact}")
    trial.expect_clean(scratch, what)
