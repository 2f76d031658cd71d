"""What turns sources into something to load: a compiler that was found, and how it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..spec import BuildSpec


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
