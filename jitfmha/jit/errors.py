"""What can go wrong between sources and what is built from them."""

from __future__ import annotations

from pathlib import Path


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


class StoreFailure(Exception):
    """The place to build in has failed half way; nothing of what was begun is visible.

    Attributes:
        place: the directory.
        is_temporary: whether it stood in for another one already.
        error: what the operating system said.
    """

    def __init__(self, place: Path, is_temporary: bool, error: OSError) -> None:
        super().__init__(f"{str(place)!r} cannot be used ({error})")
        self.place = place
        self.is_temporary = is_temporary
        self.error = error
