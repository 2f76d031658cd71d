"""What can go wrong between sources and what is built from them."""

from __future__ import annotations


class CacheError(RuntimeError):
    """The build cache must not or cannot be used; the message says why and what to do."""


class BuildError(RuntimeError):
    """Something could not be built or loaded; the message carries the compiler's first error."""


class CompilerNotFound(BuildError):
    """There is no compiler, and no finished build that could stand in for one."""
