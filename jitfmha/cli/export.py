"""``python -m jitfmha export``: a C++ library with the AMD kernels, for programs without torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .build import hdim_pair
from .exit_codes import OK, UsageError
from .output import add_json_flag, print_json, progress


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "export",
        help="write a C++ library with the AMD kernels, which needs no torch",
        description=(
            "Write the sources of a C++17 library with the kernels embedded, a header, CMake and "
            "pkg-config files. Kernels are those that come ready; beside these, backward ones are "
            "compiled now. The folder is complete, or it is not there."
        ),
    )
    parser.add_argument(
        "--arch",
        action="append",
        required=True,
        choices=["gfx942", "gfx950"],
        help="may be given twice",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="absent, empty, or an earlier export",
    )
    parser.add_argument(
        "--direction", nargs="+", choices=["forward", "backward"], help="(default: both)"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["bf16", "fp16", "fp8"],
        help="(default: all); backward has no fp8",
    )
    parser.add_argument(
        "--hdim",
        nargs="+",
        metavar="HDIM",
        help="head dimensions, as 128, or as 192x128 where v has another one (default: all that "
        "come ready, and of compiled kernels 64 and 128)",
    )
    parser.add_argument("--mask", nargs="+", choices=["none", "causal"], help="(default: both)")
    parser.add_argument(
        "--mode", nargs="+", choices=["gm0", "gm1"], help="batch, packed (default: both)"
    )
    parser.add_argument(
        "--bf16-cvt",
        nargs="+",
        choices=["rtne", "rtna", "rtz"],
        help="how gfx942 rounds to bf16 (default: all three, and of compiled kernels rtne)",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the library, and say what it holds."""
    from ..export import Selection, export  # with torch behind it

    given = {
        "directions": args.direction,
        "dtypes": args.dtype,
        "hdims": None if args.hdim is None else [hdim_pair(text) for text in args.hdim],
        "masks": args.mask,
        "modes": args.mode,
        "bf16_cvts": args.bf16_cvt,
    }
    chosen: dict[str, Any] = {name: tuple(x) for name, x in given.items() if x is not None}
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
