"""Advisory locks on open files, which the kernel releases when their process dies."""

from __future__ import annotations

import enum
import errno
import fcntl

_UNSUPPORTED = frozenset(
    {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
)
_CONTENDED = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})


class Flock(enum.Enum):
    """How an attempt to lock ended; `UNSUPPORTED` says that the file system has no locks."""

    TAKEN = "taken"
    CONTENDED = "contended"
    UNSUPPORTED = "unsupported"


def try_lock(descriptor: int, operation: int) -> Flock:
    """Lock without waiting, `fcntl.LOCK_SH` beside other readers or `fcntl.LOCK_EX` alone.

    NFS wants the file open for writing where the lock is exclusive.
    """
    return wait_for_lock(descriptor, operation | fcntl.LOCK_NB)


def wait_for_lock(descriptor: int, operation: int) -> Flock:
    """Take a lock as `try_lock` does, waiting for those who hold it."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _CONTENDED:
            return Flock.CONTENDED
        if error.errno in _UNSUPPORTED:
            return Flock.UNSUPPORTED
        raise
    return Flock.TAKEN
