"""``python -m jitfmha export``: a C++ library with the AMD kernels, for programs without torch."""

from __future__ import annotations

import argparse
from typing import Any

from ..export import Selection, export
from .exit_codes import OK, UsageError
from .output import print_json, progress


def run(args: argparse.Namespace) -> int:
    """Write the library, and say what it holds."""
    flags = ("direction", "dtype", "hdim", "mask", "mode", "bf16_cvt")
    given = ((f"{flag}s", getattr(args, flag)) for flag in flags)
    chosen: dict[str, Any] = {name: tuple(x) for name, x in given if x is not None}
    selection = Selection(tuple(dict.fromkeys(args.arch)), **chosen)
    try:
        names = export(selection, args.output, lambda name: progress(f"compiled {name}"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json({"folder": str(args.output), "kernels": names})
    else:
        print(f"{args.output}: {len(names)} kernels for {' and '.join(selection.arches)}")
    return OK
