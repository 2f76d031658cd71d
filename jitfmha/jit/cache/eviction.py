"""What is in the cache, and how it leaves: discarded by one rename, deleted when nobody uses it.

The least recently used entries go when the cache is above its limit.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CacheError
from ..spec import ARTIFACT_SUFFIXES
from .directory import CacheDirectory, readable_directories
from .entry import EntryMeta, InvalidEntry, open_entry, published_in
from .flock import Flock, try_lock
from .key import EntryKey
from .owned_directory import sweep

_ENVIRONMENT = "JITFMHA_CACHE_LIMIT"
DEFAULT_LIMIT_BYTES = 1 << 30
# Without locks nobody knows whether a discarded library is still mapped somewhere.
_DISCARDED_WITHOUT_LOCKS_SECONDS = 24 * 3600.0
# So few digits that every size is a finite number.
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class CacheEntry:
    """One entry of the cache, as it is on the disk.

    Attributes:
        key: the hash in its path, of all that went into it.
        size: in bytes, all files together.
        created: seconds since the epoch; 0 if the entry does not say (any more).
        build_seconds: what building it took; None if the entry does not say.
        last_used: seconds since the epoch, to the hour.
        valid: whether it would be loaded.
    """

    name: str
    key: str
    size: int
    created: float
    build_seconds: float | None
    last_used: float
    valid: bool
    path: Path


def cache_entries() -> list[CacheEntry]:
    """All entries, by name, damaged ones too; ``CacheError`` where the cache is not safe."""
    found = []
    for directory in readable_directories():
        for path, key in published_in(directory):
            try:
                last_used = os.lstat(path).st_mtime
            except FileNotFoundError:
                continue
            meta = _meta(path, key)
            found.append(
                CacheEntry(
                    name=key.name,
                    key=f"{key.content}-{key.compiler}",
                    size=entry_size(path),
                    created=meta.created if meta else 0.0,
                    build_seconds=meta.build_seconds if meta else None,
                    last_used=last_used,
                    valid=meta is not None,
                    path=path,
                )
            )
    return sorted(found, key=lambda entry: (entry.name, entry.key))


def cache_clear() -> int:
    """Remove all entries and logs; returns how many entries there were.

    What a running process has loaded stays intact for that process and is deleted later.

    Raises:
        CacheError: the cache is not safe.
        OSError: an entry cannot be removed.
    """
    count = 0
    for directory in readable_directories():
        for path, _ in published_in(directory):
            discard(path, directory.trash)
            count += 1
        empty_trash(directory.trash)
        sweep(directory.building)
        for log in _listed(directory.logs):
            delete(log)
    return count


def cache_limit() -> int:
    """The limit in bytes: `JITFMHA_CACHE_LIMIT` (`2000000`, `500M`, `2G`), else 1 GiB.

    0 means what it says, not that there is no limit: each build leaves nothing but itself and what
    is in use.

    Raises:
        CacheError: the variable is set to something that is not a size.
    """
    text = os.environ.get(_ENVIRONMENT, "").strip()
    if not text:
        return DEFAULT_LIMIT_BYTES
    match = _SIZE.fullmatch(text)
    if match is None:
        raise CacheError(
            f"{_ENVIRONMENT}={text!r} is not a size; give bytes, or a number with K, M, G or T "
            "(such as 500M)"
        )
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def enforce_limit(directory: CacheDirectory, keep: Path) -> None:
    """Remove what was not used for longest until the cache is below its limit. Does not raise.

    Entries that a process has loaded stay, and so does `keep`. Where locks are not supported
    nobody knows what is in use, and everything stays.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        turn = os.open(directory.locks / "eviction.lock", flags, 0o600)
    except OSError:
        return
    try:
        # Two at a time would both count what the other is about to remove, and remove too much.
        if try_lock(turn, fcntl.LOCK_EX) is Flock.TAKEN:
            _evict(directory, keep, cache_limit())
    except OSError:
        pass  # The next build tries again.
    finally:
        os.close(turn)


def discard(path: Path, trash: Path) -> None:
    """Take an entry out of service by one rename, without disturbing who has it open."""
    with suppress(FileNotFoundError):  # Somebody else was faster.
        os.rename(path, trash / f"{path.name}.{os.urandom(8).hex()}")


def make_way(path: Path, trash: Path) -> None:
    """Do what `discard` does, also for a directory that this process has no right to."""
    try:
        discard(path, trash)
    except PermissionError:
        # To move a directory to another one takes the right to write to it, to rename it does not.
        # With such a name nobody takes it for an entry.
        os.rename(path, path.with_name(f"{path.name}.{os.urandom(8).hex()}"))


def empty_trash(trash: Path) -> None:
    """Delete the discarded entries that no process uses. Does not raise."""
    for path in _listed(trash):
        try:
            age = abs(time.time() - os.lstat(path).st_ctime)
            with removal_lock(path) as lock:
                is_old = age > _DISCARDED_WITHOUT_LOCKS_SECONDS
                if lock is Flock.TAKEN or (lock is Flock.UNSUPPORTED and is_old):
                    delete(path)
        except OSError:
            continue


@contextmanager
def removal_lock(path: Path) -> Iterator[Flock]:
    """Try to lock what was built alone: `Flock.TAKEN` means that no process uses it."""
    artifact = _artifact_in(path)
    if artifact is None:
        yield Flock.TAKEN
        return
    try:
        descriptor = os.open(artifact, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        descriptor = None
    if descriptor is None:
        yield Flock.UNSUPPORTED  # Nobody knows, as where there are no locks.
        return
    try:
        yield try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a directory, a file or a link (never what it leads to). Does not raise for trees."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def entry_size(path: Path) -> int:
    """The bytes in the files of an entry, in its folders too; 0 for what is gone meanwhile."""
    try:
        with os.scandir(path) as listing:
            return sum(
                entry_size(Path(item.path))
                if item.is_dir(follow_symlinks=False)
                else item.stat(follow_symlinks=False).st_size
                for item in listing
            )
    except OSError:
        return 0


def _evict(directory: CacheDirectory, keep: Path, limit: int) -> None:
    candidates = []
    for path, _ in published_in(directory):
        with suppress(FileNotFoundError):  # Another process was faster.
            if not path.is_symlink():
                candidates.append((os.lstat(path).st_mtime, entry_size(path), path))
    excess = sum(size for _, size, _ in candidates) - limit
    for _, size, path in sorted(candidates):
        if excess <= 0:
            break
        if path != keep and _was_removed(path, directory.trash):
            excess -= size
    empty_trash(directory.trash)


def _was_removed(path: Path, trash: Path) -> bool:
    try:
        with removal_lock(path) as lock:
            if lock is not Flock.TAKEN:
                return False
            # Moved while it is locked: a reader finds it whole, locked, or not at all.
            discard(path, trash)
    except OSError:
        return False
    return True


def _meta(path: Path, key: EntryKey) -> EntryMeta | None:
    try:
        entry = open_entry(path, key)
    except (InvalidEntry, OSError):
        return None
    if entry is None:
        return None
    entry.close()
    return entry.meta


def _artifact_in(path: Path) -> Path | None:
    """What was built, in the directory of an entry, which may have been renamed."""
    if path.is_symlink() or not path.is_dir():
        return None
    for item in sorted(path.iterdir()):
        if item.suffix in ARTIFACT_SUFFIXES and item.is_file() and not item.is_symlink():
            return item
    return None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
