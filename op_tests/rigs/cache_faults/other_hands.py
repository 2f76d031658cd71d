"""A cache in the hands of others: owned by them, open to them, or with links that they planted.

Root gives files away for real; for an ordinary user, who cannot, files only appear to be owned by
somebody else (:mod:`.faulty_system`). Whatever was planted, nothing that it leads to may change.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from .callers import Call, Scratch, Trial, new_scratch
from .damaged_files import is_intact
from .faulty_system import foreign_owner

_STRANGER = 54321
_CACHE_FOLDERS = ("v1", "v1/entries", "v1/building", "v1/locks", "v1/trash", "v1/logs")
_UMASKS = (0, 0o022, 0o077, 0o777)

_Case = TypeVar("_Case")
_Environment = dict[str, str]


def run(trial: Trial) -> None:
    """Everything in every folder; the short form takes a third of each."""
    is_real = os.geteuid() == 0
    trial.progress(f"files are owned by others {'for real' if is_real else 'in appearance'}")
    with new_scratch() as original:
        _spoiled_caches(_FilledCache(trial, original))
    kernels = ("tiny1", "attention") if trial.is_long else ("tiny1",)
    for umask in _UMASKS:
        for kernel in kernels:
            _modes_of_a_new_cache(trial, umask, kernel)


def _spoiled_caches(filled: _FilledCache) -> None:
    trial = filled.trial

    def some(cases: Sequence[_Case]) -> Sequence[_Case]:
        return cases if trial.is_long else trial.rng.sample(cases, math.ceil(len(cases) / 3))

    for where in some(("..", ".", *_CACHE_FOLDERS)):
        _owned_by_another(filled, where)
    for where in some(("..", ".", *_CACHE_FOLDERS)):
        _writable_by_others(filled, where)
    for where in some(_CACHE_FOLDERS):
        _link_instead_of_folder(filled, where)
    for what, spoil in some(_SPOILED_ENTRIES):
        _spoiled_entry(filled, what, spoil)
    for what, plant in some(_PLANTED_LINKS):
        _planted_link(filled, what, plant)
    _links_to_the_cache(filled)


def _give_away(path: Path) -> _Environment:
    """Make `path` another user's; what a caller needs in its environment for that."""
    if os.geteuid() == 0:
        os.chown(path, _STRANGER, -1, follow_symlinks=False)
        return {}
    return {**foreign_owner(path, _STRANGER)}


class _FilledCache:
    """A cache with one entry, copied for each attempt."""

    def __init__(self, trial: Trial, original: Scratch) -> None:
        self.trial = trial
        self._original = original
        trial.builds(Call(original.environment), "a call before anything is done")

    def copy_to(self, scratch: Scratch) -> Path:
        """The entry in the copy."""
        shutil.copytree(self._original.cache, scratch.cache)
        return scratch.entries / scratch.entry_names()[0]


def _nested(scratch: Scratch) -> Scratch:
    """Scratch folders with a parent directory that can be given away with nothing else in it."""
    (scratch.root / "home").mkdir(mode=0o700)
    (scratch.root / "home" / "temporary").mkdir(mode=0o700)
    return Scratch(scratch.root / "home")


def _owned_by_another(filled: _FilledCache, where: str) -> None:
    with new_scratch() as outside:
        scratch = _nested(outside)
        filled.copy_to(scratch)
        path = (scratch.cache / where).resolve()
        appearance = _give_away(path)
        environment = {**outside.environment, "JITFMHA_CACHE_DIR": str(scratch.cache), **appearance}
        _expect_refused_untouched(
            filled, environment, scratch, f"owned by user id {_STRANGER}", path
        )


def _writable_by_others(filled: _FilledCache, where: str) -> None:
    with new_scratch() as outside:
        scratch = _nested(outside)
        filled.copy_to(scratch)
        path = (scratch.cache / where).resolve()
        environment = {**outside.environment, "JITFMHA_CACHE_DIR": str(scratch.cache)}
        path.chmod(0o777)
        reason = "can be written to by everybody (mode 0777)"
        _expect_refused_untouched(filled, environment, scratch, reason, path)
        group = _foreign_group()
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(0o770)
            reason = f"can be written to by group id {group} (mode 0770)"
            _expect_refused_untouched(filled, environment, scratch, reason, path)
        path.chmod(0o1777)
        if where == "..":
            filled.trial.loads(Call(environment), "a parent with the sticky bit")
        else:
            reason = "can be written to by everybody (mode 1777)"
            if where != ".":
                _expect_refused_untouched(filled, environment, scratch, reason, path)


def _foreign_group() -> int | None:
    """A group that this process may give files to and that is not its user's own; None if none."""
    if os.geteuid() == 0:
        return _STRANGER
    groups = [group for group in os.getgroups() if group not in (0, os.geteuid())]
    return groups[0] if groups else None


def _expect_refused_untouched(
    filled: _FilledCache, environment: _Environment, scratch: Scratch, reason: str, path: Path
) -> None:
    before = _snapshot(scratch.root)
    for kernel in ("tiny1", "tiny2"):  # What is in the cache, and what would have to be built.
        what = f"{path.relative_to(scratch.root.parent)}: {reason}"
        answer = filled.trial.refused(
            Call(environment, kernel), what, repr(str(path)), reason, "JITFMHA_CACHE_DIR"
        )
        filled.trial.expect(not answer.loaded, f"{what}: loaded {answer.loaded}")
    filled.trial.expect(_snapshot(scratch.root) == before, f"{path}: the cache was changed")


def _link_instead_of_folder(filled: _FilledCache, where: str) -> None:
    with new_scratch() as scratch:
        filled.copy_to(scratch)
        planted = scratch.cache / where
        target = scratch.root / "elsewhere"
        shutil.move(planted, target)
        planted.symlink_to(target)
        _expect_refused_untouched(
            filled, scratch.environment, scratch, "is a symbolic link", planted
        )


def _links_to_the_cache(filled: _FilledCache) -> None:
    """The way to the cache may lead over links, of this user, to what is in safe hands."""
    with new_scratch() as scratch:
        filled.copy_to(scratch)
        (scratch.root / "link").symlink_to("cache")
        environment = {**scratch.environment, "JITFMHA_CACHE_DIR": str(scratch.root / "link")}
        filled.trial.loads(Call(environment), "a link of this user to the cache")
        appearance = _give_away(scratch.root / "link")
        call = Call({**environment, **appearance})
        what = "a link of another user to the cache"
        filled.trial.refused(call, what, f"owned by user id {_STRANGER}")


# Each takes an entry and a folder outside of the cache, spoils the entry, and returns the reason
# that must be given and what callers need in their environment.
_Spoil = Callable[[Path, Path], tuple[str, _Environment]]


def _opened(file: str, mode: int) -> _Spoil:
    def spoil(entry: Path, _outside: Path) -> tuple[str, _Environment]:
        (entry / file).chmod(mode)
        return f"{file}' can be written to by everybody" if file else "written to by everybody", {}

    return spoil


def _given_away(file: str) -> _Spoil:
    def spoil(entry: Path, _outside: Path) -> tuple[str, _Environment]:
        reason = f"owned by user id {_STRANGER}"
        return f"{file}' is {reason}" if file else reason, _give_away(entry / file)

    return spoil


def _linked(file: str) -> _Spoil:
    def spoil(entry: Path, outside: Path) -> tuple[str, _Environment]:
        shutil.move(entry / file, outside / "moved")
        (entry / file).symlink_to(outside / "moved")
        return f"{file or 'it'} is a symbolic link", {}

    return spoil


def _hard_link_library(entry: Path, outside: Path) -> tuple[str, _Environment]:
    shutil.copy(entry / "tiny.so", outside / "foreign.so")
    (entry / "tiny.so").unlink()
    os.link(outside / "foreign.so", entry / "tiny.so")
    return f"tiny.so' is owned by user id {_STRANGER}", _give_away(outside / "foreign.so")


def _pipe_instead_of_meta(entry: Path, _outside: Path) -> tuple[str, _Environment]:
    (entry / "meta.json").unlink()
    os.mkfifo(entry / "meta.json", 0o600)
    return "meta.json is not a regular file", {}


_SPOILED_ENTRIES: tuple[tuple[str, _Spoil], ...] = (
    ("open entry to all", _opened("", 0o777)),
    ("open library to all", _opened("tiny.so", 0o666)),
    ("give entry away", _given_away("")),
    ("give library away", _given_away("tiny.so")),
    ("give meta away", _given_away("meta.json")),
    ("link entry", _linked("")),
    ("link library", _linked("tiny.so")),
    ("link source", _linked("tiny.cpp")),
    ("link meta", _linked("meta.json")),
    ("hard link library", _hard_link_library),
    ("pipe instead of meta", _pipe_instead_of_meta),
)


def _spoiled_entry(filled: _FilledCache, what: str, spoil: _Spoil) -> None:
    """Such an entry is not loaded but built again, with the reason."""
    with new_scratch() as scratch:
        entry = filled.copy_to(scratch)
        outside = scratch.root / "outside"
        outside.mkdir(mode=0o700)
        reason, environment = spoil(entry, outside)
        before = _snapshot(outside)
        answer = filled.trial.builds(Call({**scratch.environment, **environment}), what, warnings=1)
        filled.trial.expect(
            bool(answer.warnings) and reason in answer.warnings[0],
            f"{what}: expected the reason {reason!r}; got {answer}",
        )
        filled.trial.expect(_snapshot(outside) == before, f"{what}: the target was changed")
        filled.trial.expect(
            not entry.is_symlink() and is_intact(entry), f"{what}: the new entry is not valid"
        )
        filled.trial.loads(Call(scratch.environment), f"the call after {what}")
        filled.trial.expect_clean(scratch, what)


# Each takes scratch folders whose cache has an entry, and a target outside; returns whether the
# cache can be used in spite of what it plants.
_Plant = Callable[[Scratch, Path], bool]


def _lock(name: str, leads_to: str, *, is_usable: bool) -> _Plant:
    def plant(scratch: Scratch, target: Path) -> bool:
        lock = scratch.cache / "v1" / "locks" / f"{name or scratch.entry_names()[0]}.lock"
        lock.unlink()
        lock.symlink_to(target / leads_to)
        return is_usable

    return plant


def _in_building(scratch: Scratch, target: Path) -> bool:
    building = scratch.cache / "v1" / "building"
    (building / f"{scratch.entry_names()[0]}.0123456789abcdef").symlink_to(target)
    abandoned = building / "abandoned"
    abandoned.mkdir(mode=0o700)
    (abandoned / "owner").symlink_to(target / "file")
    (abandoned / "inside").symlink_to(target)
    return True


def _in_trash(scratch: Scratch, target: Path) -> bool:
    trash = scratch.cache / "v1" / "trash"
    (trash / "link").symlink_to(target)
    (trash / "entry").mkdir(mode=0o700)
    (trash / "entry" / "tiny.so").symlink_to(target / "file")
    (trash / "entry" / "inside").symlink_to(target)
    return True


_PLANTED_LINKS: tuple[tuple[str, _Plant], ...] = (
    ("lock of the entry", _lock("", "file", is_usable=False)),
    ("dangling lock of the entry", _lock("", "not-there", is_usable=False)),
    ("lock of eviction", _lock("eviction", "not-there", is_usable=True)),
    ("in building", _in_building),
    ("in trash", _in_trash),
)


def _planted_link(filled: _FilledCache, where: str, plant: _Plant) -> None:
    """A link where the cache writes, locks or deletes: never followed."""
    what = f"a link planted: {where}"
    with new_scratch() as scratch:
        filled.copy_to(scratch)
        target = scratch.root / "target"
        target.mkdir(mode=0o700)
        (target / "file").write_text("precious", encoding="ascii")
        is_usable = plant(scratch, target)
        shutil.rmtree(scratch.entries / scratch.entry_names()[0])
        before = _snapshot(target)
        answer = filled.trial.builds(
            Call(scratch.environment), what, warnings=0 if is_usable else 1
        )
        if not is_usable:
            filled.trial.expect(
                "symbolic link" in str(answer.warnings), f"{what}: no reason: {answer}"
            )
        filled.trial.expect(_snapshot(target) == before, f"{what}: the target was changed")


def _modes_of_a_new_cache(trial: Trial, umask: int, kernel: str) -> None:
    with new_scratch() as scratch:
        call = Call(scratch.environment, kernel, umask=umask, is_ordinary=True)
        what = f"umask {umask:04o}, {kernel}"
        trial.builds(call, what)
        wrong = {
            str(path.relative_to(scratch.root)): oct(mode)
            for path, mode in _modes(scratch.cache).items()
            if mode != (0o700 if path.is_dir() else 0o600)
        }
        trial.expect(not wrong, f"{what}: modes {wrong}")
        trial.loads(call, f"{what}, second call")
        trial.expect_clean(scratch, what)


def _modes(folder: Path) -> dict[Path, int]:
    paths = [folder, *folder.rglob("*")]
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}


def _snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything about the files that must not change, links not followed."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        facts = (status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_mtime_ns)
        found[str(path)] = (*facts, content)
    return found
