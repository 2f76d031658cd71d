"""One builder at a time for each entry, and news for those who wait.

Turns save work; they do not keep the cache correct, publishing by rename does. So where somebody
does not get on, the build goes ahead without. Where the file system has no locks, whoever has come
first builds, which is looked up rather than locked: two may build where they come at one moment.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..status import PATIENCE_SECONDS, say
from .directory import CacheDirectory
from .flock import is_unsupported
from .key import EntryKey
from .owned_directory import OwnedDirectory, earlier_owner, owner_of

_POLL_SECONDS = 0.05
# A holder that is alive but stopped (a suspended job, a frozen node) must not stop everybody else.
_GIVE_UP_SECONDS = 900.0
# The builder leaves its name right after it has taken the lock. Where many start at once on a few
# processors, that can be seconds later.
_NAMELESS_SECONDS = 10.0

_Published = TypeVar("_Published")


@contextmanager
def building_lock(
    directory: CacheDirectory, key: EntryKey, published: Callable[[], _Published | None]
) -> Iterator[_Published | None]:
    """Wait until this process may build `key`, or until somebody else has.

    Args:
        directory: the cache to build into.
        key: the entry to take turns for.
        published: looks for the finished build; asked at least once after the turn has come.

    Yields:
        What `published` found, or None if it is this process's turn to build.

    Raises:
        OSError: the lock file cannot be created.
    """
    path = directory.locks / f"{key.directory_name}.lock"
    turn: _LockedTurn | _FirstComeTurn
    turn = _LockedTurn(path) if _has_locks(path) else _FirstComeTurn(directory, key)
    waiting = _Waiting(directory, key)
    try:
        while True:
            try:
                if turn.has_come():
                    break
            except (OSError, NotImplementedError) as error:
                if isinstance(turn, _FirstComeTurn) or not is_unsupported(error):
                    raise
                turn = _FirstComeTurn(directory, key)
                continue
            found = published()
            if found is not None:
                yield found
                return
            if waiting.has_lost_patience():
                break
            time.sleep(_POLL_SECONDS)
        yield published()
    finally:
        turn.end()


class _LockedTurn:
    """A lock, which the kernel takes back when its holder dies."""

    def __init__(self, path: Path) -> None:
        from filelock import FileLock

        self._lock = FileLock(path, timeout=0, mode=0o600)

    def has_come(self) -> bool:
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        return True

    def end(self) -> None:
        if self._lock.is_locked:
            self._lock.release()


class _FirstComeTurn:
    """A directory that says who waits, or builds. All times in it come from the one file system."""

    def __init__(self, directory: CacheDirectory, key: EntryKey) -> None:
        self._prefix = key.directory_name
        self._place = OwnedDirectory(directory.building, self._prefix)

    def has_come(self) -> bool:
        return earlier_owner(self._place, self._prefix) is None

    def end(self) -> None:
        self._place.remove()


class _Waiting:
    """Tells once, after a second, what is waited for, and for whom as soon as that is known."""

    def __init__(self, directory: CacheDirectory, key: EntryKey) -> None:
        self._directory = directory
        self._key = key
        self._started = time.monotonic()
        self._told = False

    def has_lost_patience(self) -> bool:
        waited = time.monotonic() - self._started
        if waited > PATIENCE_SECONDS and not self._told:
            builder = owner_of(self._directory.building, self._key.directory_name)
            if builder is not None or waited > _NAMELESS_SECONDS:
                self._told = True
                whom = str(builder) if builder else "another process"
                say(f"waiting for {self._key.name}, which {whom} is building ...")
        if waited > _GIVE_UP_SECONDS:
            say(f"{self._key.name} is still not there; building it without waiting any longer")
            return True
        return False


def _has_locks(path: Path) -> bool:
    """Whether the file system at `path` has real locks, and this process may take this one.

    Asked beforehand because filelock may otherwise fall back to a lock *file*, which a killed
    process leaves behind for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except PermissionError:
        return False  # Of root, say, who built this entry in this user's cache.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not is_unsupported(error)
    finally:
        os.close(descriptor)
    return True
