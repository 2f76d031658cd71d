"""A piece of Python, run to its end in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from jitfmha.jit.fresh_process import fresh_python


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
