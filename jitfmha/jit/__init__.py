"""Builds on first use and keeps what was built: render, build once, load.

`load` and `read` are the entrance (load.py). A build is addressed by a hash of all that goes into
it, made by a toolchain (toolchain/) in a private directory, published by one rename and checked
whenever it is read, in a cache that nobody else can write to and that stays below a limit (cache/).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .cache.directory import cache_dir
from .errors import BuildError, CacheError, CompilerNotFound
from .load import LoadEvent, artifact_path, build_log, is_built, load, read
from .render import TemplateError, render
from .spec import BuildSpec

if TYPE_CHECKING:
    from .cache.inventory import CacheEntry, cache_clear, cache_entries

__all__ = [
    "BuildError",
    "BuildSpec",
    "CacheEntry",
    "CacheError",
    "CompilerNotFound",
    "LoadEvent",
    "TemplateError",
    "artifact_path",
    "build_log",
    "cache_clear",
    "cache_dir",
    "cache_entries",
    "is_built",
    "load",
    "read",
    "render",
]

# Imported when first asked for: no call needs them.
_INVENTORY = ("CacheEntry", "cache_clear", "cache_entries")


def __getattr__(name: str) -> object:
    if name not in _INVENTORY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(".cache.inventory", __name__), name)
    return value
