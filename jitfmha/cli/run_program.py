"""``python -m jitfmha run-program``: a program that uses the HIP runtime, on the emulator."""

from __future__ import annotations

import argparse

from ..emulator.program import run_program


def run(args: argparse.Namespace) -> int:
    """Run the program; the exit code is its own, or 128 and the signal that ended it."""
    code = run_program([args.program, *args.arguments])
    return code if code >= 0 else 128 - code
