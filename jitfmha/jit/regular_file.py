"""Reads files whose names come from elsewhere: they may lead anywhere, or to a pipe or a device.

What is written to one is complete, or not there.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

MOST_BYTES = 64 << 20
"""Code objects, manifests and listings are far smaller."""


def path_inside(folder: Path, name: str) -> Path:
    """The path of a file that a text in ``folder`` names.

    Raises ``ValueError``, with the name, where it leads out of the folder: as an absolute name, by
    "..", or through a link.
    """
    path = folder / name
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise ValueError(f"{name!r:.100} is not in the folder {folder}")
    real = os.path.realpath(path)
    if not real.startswith(os.path.join(os.path.realpath(folder), "")):
        raise ValueError(f"{name!r:.100} leads to {real!r:.200}, which is not in {folder}")
    return path


def read_regular_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file, links followed; nothing else is opened. Raises ``OSError``
    where it cannot be read, is no regular file, or has more than ``most_bytes``.
    """
    _refuse_irregular(path, os.stat(path))
    # What takes the file's place meanwhile is not waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _refuse_irregular(path, status)
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
        return file.read(status.st_size)


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def write_whole(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write or replace a file; one that is there stays as it is until the new one is complete.

    ``mode`` holds whatever the umask is. Without it the path is a user's: links are followed, and a
    pipe or a device, such as ``/dev/stdout``, is written to. Raises ``OSError`` where it cannot be
    written.
    """
    if mode is None:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            part.chmod(mode)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
