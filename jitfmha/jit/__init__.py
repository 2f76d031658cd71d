"""Builds launchers on first use and keeps them: render, build once, load.

`load` is the entrance (loader.py). A build is addressed by a hash of all that goes into it
(key.py), made in a private directory (building.py, compile_commands.py), published by one rename
and checked whenever it is read (entry.py), in a cache that nobody else can write to
(cache_directory.py, trust.py) and that stays below a limit (eviction.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import BuildError, CacheError, CompilerNotFound
from .render import TemplateError, render
from .spec import BuildSpec

if TYPE_CHECKING:
    from .cache_directory import cache_dir
    from .inventory import CacheEntry, cache_clear, cache_entries
    from .loader import LoadEvent, artifact_path, build_log, is_built, load

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
    "render",
]

# Imported when first asked for: a program that imports the package may never call it.
_HOMES = {
    "CacheEntry": "inventory",
    "LoadEvent": "loader",
    "artifact_path": "loader",
    "build_log": "loader",
    "cache_clear": "inventory",
    "cache_dir": "cache_directory",
    "cache_entries": "inventory",
    "is_built": "loader",
    "load": "loader",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
