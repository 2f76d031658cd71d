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
    """How an attempt to lock ended."""

    TAKEN = "taken"
    CONTENDED = "contended"
    UNSUPPORTED = "unsupported"


def try_shared(descriptor: int) -> Flock:
    """Take the lock beside other readers, without waiting."""
    return _attempt(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def try_exclusive(descriptor: int) -> Flock:
    """Take the lock alone, without waiting. NFS wants the file open for writing."""
    return _attempt(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def wait_exclusive(descriptor: int) -> Flock:
    """Take the lock alone, waiting for those who hold it."""
    return _attempt(descriptor, fcntl.LOCK_EX)


def is_unsupported(error: BaseException) -> bool:
    """Whether `error` says that the file system has no locks."""
    if isinstance(error, NotImplementedError):
        return True
    return isinstance(error, OSError) and error.errno in _UNSUPPORTED


def _attempt(descriptor: int, operation: int) -> Flock:
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _CONTENDED:
            return Flock.CONTENDED
        if error.errno in _UNSUPPORTED:
            return Flock.UNSUPPORTED
        raise
    return Flock.TAKEN
