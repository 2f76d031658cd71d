"""What turns sources into something to load: a compiler that was found, and how it is called."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Protocol

from ..spec import BuildSpec

# What neither ninja nor a shell interprets, in any locale.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+=@,-]+")
_DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")


class Toolchain(Protocol):
    """A compiler for one kind of `BuildSpec`, as it is on this machine. `str` of it names it."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Everything by which two of them can differ in what they make of the same sources.

        A part of the key of whatever is built.
        """

    def compile(self, spec: BuildSpec, workspace: Path, destination: Path) -> bytes:
        """Compile and link; returns the content of the file `spec.artifact_name`.

        Args:
            spec: what to compile.
            workspace: a directory for this build alone, with a path that a shell leaves alone. The
                sources lie in `sources` below it already. What runs has it as current directory,
                or one below, so that whoever sweeps it up can end that too.
            destination: where sources and artifact will be found later, for a debugger.

        Raises:
            CompileFailure: errors in the sources or flags.
            BuildError: the build cannot be run at all.
            OSError: the disk is full, or the workspace is gone.
        """


class CompileFailure(Exception):
    """The compiler or linker reported errors; `output` is all that they said."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


def is_plain_path(path: Path | str) -> bool:
    """Whether a build may take place at `path`, which a shell gets to see."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None


def source_flags(sources: Path, destination: Path) -> list[str]:
    """By which the compiler finds the headers, and a debugger later finds the sources."""
    # Not -I: a source or folder called "memory" must not come before <memory>.
    flags = [f"-iquote{sources}"]
    if is_plain_path(destination) and "=" not in str(sources):
        flags.append(f"-ffile-prefix-map={sources}={destination}")
    return flags


def compile_failure(output: str) -> CompileFailure | OSError:
    """What to raise for a failed compiler's output; a full disk is no fault of the sources."""
    for message in _DISK_FULL_MESSAGES:
        if message in output:
            return OSError(errno.ENOSPC, message)
    return CompileFailure(output)
