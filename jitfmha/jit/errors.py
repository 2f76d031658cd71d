"""What can go wrong between sources and what is built from them."""

from __future__ import annotations


class CacheError(RuntimeError):
    """The build cache must not or cannot be used; the message says why and what to do."""


class BuildError(RuntimeError):
    """Something could not be built or loaded; the message carries the compiler's first error."""


class CompilerNotFound(BuildError):
    """There is no compiler, and no finished build that could stand in for one."""


class CompileFailure(Exception):
    """The compiler or linker reported errors; `output` is all that they said."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output
