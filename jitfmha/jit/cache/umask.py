"""A umask that leaves this user the rights to what a build creates."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWNER_RIGHTS = 0o700

_guard = threading.Lock()
_builds = 0
_replaced: int | None = None


@contextmanager
def owner_umask() -> Iterator[None]:
    """Build with a umask that takes nothing from the owner.

    The umask belongs to the whole process, and so it is left alone unless it would keep the
    compiler from reading what it has just written (such as 0777).
    """
    global _builds, _replaced
    with _guard:
        _builds += 1
        current = _umask() if _builds == 1 else 0
        if current & _OWNER_RIGHTS:
            _replaced = os.umask(current & ~_OWNER_RIGHTS)
    try:
        yield
    finally:
        with _guard:
            _builds -= 1
            if _builds == 0:
                _restore()


def _restore() -> None:
    global _replaced
    if _replaced is not None:
        os.umask(_replaced)
        _replaced = None


def _umask() -> int:
    # Linux tells; elsewhere it has to be changed for a moment to be seen.
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        return int(next(line for line in status.splitlines() if line.startswith("Umask:"))[6:], 8)
    except (OSError, StopIteration, ValueError):
        current = os.umask(0o077)
        os.umask(current)
        return current


def _forget_builds_of_parent() -> None:
    """Begin anew in the child of a fork that took place while another thread was building."""
    global _guard, _builds
    _guard = threading.Lock()
    _builds = 0
    _restore()


os.register_at_fork(after_in_child=_forget_builds_of_parent)
