"""Builds on first use and keeps what was built: render, build once, load.

`load` and `read` are the entrance (loader.py). A build is addressed by a hash of all that goes into
it, made by a toolchain (toolchain/) in a private directory, published by one rename and checked
whenever it is read, in a cache that nobody else can write to and that stays below a limit (cache/).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import BuildError as BuildError
from .errors import CacheError as CacheError
from .errors import CompilerNotFound as CompilerNotFound
from .render import TemplateError as TemplateError
from .render import render as render
from .spec import BuildSpec as BuildSpec

if TYPE_CHECKING:
    from .build_processes import build_all as build_all
    from .cache.directory import cache_dir as cache_dir
    from .cache.eviction import CacheEntry as CacheEntry
    from .cache.eviction import cache_clear as cache_clear
    from .cache.eviction import cache_entries as cache_entries
    from .loader import LoadEvent as LoadEvent
    from .loader import build_log as build_log
    from .loader import is_built as is_built
    from .loader import load as load
    from .loader import read as read

# Imported when first asked for: a program that imports the package may never call it.
_HOMES = {
    "build_processes": ("build_all",),
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
