"""A piece of Python in a process of its own, for what a process pays once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# How torch begins to say that NumPy is not there, which nothing here needs.
NUMPY_IS_MISSING = "Failed to initialize NumPy"

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def search_path(*first: Path) -> list[str]:
    """The folders this process imports from, with others before them, as a ``sys.path``.

    Without the one that means the working directory, wherever that is: it may be anybody's.
    """
    folders = [*map(str, first), *filter(os.path.isabs, sys.path)]
    return folders if _PACKAGE_PARENT in folders else [*folders, _PACKAGE_PARENT]


def fresh_python(code: str, *arguments: str, first: tuple[Path, ...] = ()) -> list[str]:
    """The command of a new interpreter that runs ``code`` and imports from ``search_path`` alone.

    Isolated (``-I``), because an interpreter that gets its code from the command line looks for
    modules in its working directory before anywhere else.
    """
    start = f"import sys; sys.path[:] = {search_path(*first)!r}\n"
    return [sys.executable, "-I", "-c", start + code, *arguments]
