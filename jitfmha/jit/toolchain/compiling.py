"""What all toolchains have in common: paths, flags about sources, and failures."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from ..errors import CompileFailure

# What neither ninja nor a shell interprets, in any locale.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+=@,-]+")
_DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")


def is_plain_path(path: Path | str) -> bool:
    """Whether a build may take place at `path`, which a shell gets to see."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None


def source_flags(sources: Path, destination: Path) -> list[str]:
    """By which the compiler finds the headers, and a debugger later finds the sources."""
    # Not -I: a source or folder called "memory" must not come before <memory>.
    return [f"-iquote{sources}", *debugger_flags(sources, destination)]


def debugger_flags(sources: Path, destination: Path) -> list[str]:
    """By which a debugger later finds the sources."""
    if is_plain_path(destination) and "=" not in str(sources):
        return [f"-ffile-prefix-map={sources}={destination}"]
    return []


def compile_failure(output: str) -> CompileFailure | OSError:
    """What to raise for a failed compiler's output; a full disk is no fault of the sources."""
    for message in _DISK_FULL_MESSAGES:
        if message in output:
            return OSError(errno.ENOSPC, message)
    return CompileFailure(output)
