"""Builds on first use and keeps what was built: render, build once, load.

`load` and `read` are the entrance (loader.py). A build is addressed by a hash of all that goes into
it, made by a toolchain (toolchain/) in a private directory, published by one rename and checked
whenever it is read, in a cache that nobody else can write to and that stays below a limit (cache/).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import BuildError, CacheError, CompilerNotFound
from .render import TemplateError, render
from .spec import BuildSpec

if TYPE_CHECKING:
    from .cache.directory import cache_dir
    from .cache.eviction import CacheEntry, cache_clear, cache_entries
    from .loader import LoadEvent, build_log, is_built, load, read

__all__ = [
    "BuildError",
    "BuildSpec",
    "CacheEntry",
    "CacheError",
    "CompilerNotFound",
    "LoadEvent",
    "TemplateError",
    "build_log",
    "cache_clear",
    "cache_dir",
    "cache_entries",
    "is_built",
    "load",
    "read",
    "render",
]

# Imported when first asked for: a program that imports the package may never call it.
_HOMES = {
    "cache.directory": ("cache_dir",),
    "cache.eviction": ("CacheEntry", "cache_clear", "cache_entries"),
    "loader": ("LoadEvent", "build_log", "is_built", "load", "read"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            home = import_module(f".{module}", __name__)
            globals().update({each: getattr(home, each) for each in names})
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
