"""Runs a program that uses the HIP runtime on the emulator, with the cost model as its clock."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .library import load
from .profile import LaunchProfile, profile_from

_CLOCK = "JITFMHA_EMULATOR_CLOCK"  # csrc_templates/emulator/execution/clock.cpp
_LIBRARY_PATH = "LD_LIBRARY_PATH"


def run_program(command: Sequence[str]) -> int:
    """Run a program whose HIP runtime is the emulator; returns its exit code.

    It finds the emulator as ``libamdhip64.so`` on ``LD_LIBRARY_PATH``. Its HIP events have the
    times of launches by the cost model, and a launch that has none is an error there.

    Raises ``OSError`` where it cannot be started.
    """
    library = Path(load("profile")._name)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libamdhip64.so", "libamdhip64.so.6", "libamdhip64.so.7"):
            Path(folder, name).symlink_to(library)
        path = os.pathsep.join(filter(None, (folder, os.environ.get(_LIBRARY_PATH))))
        asked, asks = os.pipe()
        hears, told = os.pipe()
        environment = {**os.environ, _LIBRARY_PATH: path, _CLOCK: f"{asks},{hears}"}
        with open(asked, "rb") as profiles, open(told, "w", encoding="ascii") as answers:
            try:
                process = subprocess.Popen(command, env=environment, pass_fds=(asks, hears))
            finally:
                os.close(asks)
                os.close(hears)
            for line in profiles:
                answers.write(f"{_seconds(profile_from(line))}\n")
                answers.flush()
            return process.wait()


def _seconds(profile: LaunchProfile) -> str:
    """Of the launch, or why it has none."""
    estimate = profile.estimate()
    if estimate is not None:
        return repr(estimate.seconds)
    return profile.why_not or "a workgroup waits for one that has no room on the chip"
