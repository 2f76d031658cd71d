"""A piece of Python in a process of its own, for what a process pays once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def search_path(*first: Path) -> str:
    """A ``PYTHONPATH`` for what this process can import, with other folders before its own."""
    return os.pathsep.join([*map(str, first), *filter(None, sys.path)])


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
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, **(environment or {}), "PYTHONPATH": search_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{failure}:\n{process.stderr.strip()}")
    return process
