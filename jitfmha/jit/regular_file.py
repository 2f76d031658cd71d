"""Reads files whose names come from elsewhere, where a pipe or a device may wait instead."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 20
"""Code objects, manifests and listings are far smaller."""


def read_regular_file(path: Path) -> bytes:
    """The content of a regular file, links followed; nothing else is opened.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``MOST_BYTES``.
    """
    _refuse_irregular(path, os.stat(path))
    # What takes the file's place meanwhile is not waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        _refuse_irregular(path, os.fstat(descriptor))
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes", str(path))
    return content


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
