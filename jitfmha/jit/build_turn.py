"""One builder at a time for each entry, and news for those who wait.

The lock saves work; it does not keep the cache correct, publishing by rename does. So where locks
are not to be had, or their holder does not get on, the build goes ahead without.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from .cache_directory import CacheDirectory
from .flock import is_unsupported
from .key import EntryKey
from .owned_directory import owner_of
from .status import PATIENCE_SECONDS, say

_POLL_SECONDS = 0.05
# A holder that is alive but stopped (a suspended job, a frozen node) must not stop everybody else.
_GIVE_UP_SECONDS = 900.0
# The builder leaves its name right after it has taken the lock. Where many start at once on a few
# processors, that can be seconds later.
_NAMELESS_SECONDS = 10.0

_Published = TypeVar("_Published")


@contextmanager
def turn_to_build(
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
    from filelock import FileLock, Timeout

    path = directory.locks / f"{key.directory_name}.lock"
    lock = FileLock(path, timeout=0, mode=0o600) if _has_locks(path) else None
    waiting = _Waiting(directory, key)
    try:
        while lock is not None:
            try:
                lock.acquire(timeout=0)
                break
            except Timeout:
                found = published()
                if found is not None:
                    yield found
                    return
            except (OSError, NotImplementedError) as error:
                if not is_unsupported(error):
                    raise
                lock = None
            if waiting.has_lost_patience():
                break
            time.sleep(_POLL_SECONDS)
        yield published()
    finally:
        if lock is not None and lock.is_locked:
            lock.release()


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
    """Whether the file system at `path` has real locks.

    Asked beforehand because filelock may otherwise fall back to a lock *file*, which a killed
    process leaves behind for ever.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not is_unsupported(error)
    finally:
        os.close(descriptor)
    return True
