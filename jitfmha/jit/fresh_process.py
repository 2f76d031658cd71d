"""A piece of Python in a process of its own, for what a process pays once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
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


def run_fresh(
    code: str,
    *arguments: str,
    failure: str,
    timeout: float,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``code``, which can import what this process can, with ``environment`` on top of ours.

    Raises ``RuntimeError``, ``failure`` with the process's stderr, when it fails.
    """
    process = subprocess.run(
        fresh_python(code, *arguments),
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{failure}:\n{process.stderr.strip()}")
    return process
