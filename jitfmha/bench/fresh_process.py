"""A piece of Python in a process of its own, for what a process pays once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def run_fresh(
    code: str,
    *arguments: str,
    failure: str,
    timeout: float,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with this package in reach, and ``environment`` on top of ours.

    Raises ``RuntimeError``, ``failure`` with the process's stderr, when it fails.
    """
    search_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(search_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{failure}:\n{process.stderr.strip()}")
    return process
