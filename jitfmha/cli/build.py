"""``python -m jitfmha build``: fill the cache ahead, in a container image or before many ranks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .exit_codes import OK, UsageError
from .output import ProgressBar, add_json_flag, print_json, table

if TYPE_CHECKING:
    from ..ahead.warm_up import WarmedLauncher


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "build",
        help="build launchers ahead of the first call",
        description=(
            "Build the launcher of every combination of the flags into the cache, so that no call "
            "has to. A launcher that is in the cache already is not built again."
        ),
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="a named set of combinations: inference, training, flash-attn, aiter or pytorch; the "
        "flags below take the place of what it has of the same",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        metavar="DTYPE",
        help="as bf16 (default: those of fp32, bf16 and fp16 that the device serves)",
    )
    parser.add_argument(
        "--hdim",
        nargs="+",
        metavar="HDIM",
        help="head dimensions, as 128, or as 192x128 where v has another one (default: those of "
        "64 and 128 that the device serves)",
    )
    parser.add_argument(
        "--mask", nargs="+", metavar="MASK", help="as in fmha_fwd (default: none causal)"
    )
    parser.add_argument(
        "--mode", nargs="+", choices=["gm0", "gm1"], help="batch, packed (default: both)"
    )
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=["forward", "backward"],
        help="training needs both (default: forward)",
    )
    parser.add_argument(
        "--features",
        nargs="+",
        metavar="FEATURES",
        help="what calls have beside that, as plain, alibi or bias+dropout (default: plain)",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="where the calls will run, as cpu or cuda; or a GPU that is not here, as gfx950 or "
        "MI308X (default: cpu)",
    )
    parser.add_argument(
        "--isa",
        help="the instruction set of the CPU that the calls will run on, such as amx, avx512_bf16, "
        "avx512 or avx2 (default: what this one takes)",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build, and say what each launcher took."""
    from ..ahead.warm_up import warmup

    with ProgressBar() as bar:
        done = 0

        def report(launcher: WarmedLauncher, left: int) -> None:
            nonlocal done
            done += 1
            bar.line(f"{launcher.name}: {_seconds(launcher)}")
            bar.reach(done, done + left)

        try:
            launchers = warmup(
                profile=args.profile,
                dtypes=args.dtype,
                hdims=None if args.hdim is None else [hdim_pair(text) for text in args.hdim],
                masks=None if args.mask is None else [_mask(text) for text in args.mask],
                modes=args.mode,
                directions=args.direction,
                features=args.features,
                device=args.device,
                isa=args.isa,
                on_ready=report,
            )
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
    if args.json:
        print_json([{"name": x.name, "build_seconds": x.seconds} for x in launchers])
    else:
        print(table(("launcher", "build"), [(x.name, _seconds(x)) for x in launchers]))
    return OK


def _mask(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def hdim_pair(text: str) -> tuple[int, int]:
    """The head dimensions that a text such as 128 or 192x128 names."""
    hdim_q, separator, hdim_v = text.partition("x")
    try:
        return int(hdim_q), int(hdim_v if separator else hdim_q)
    except ValueError:
        raise UsageError(f"--hdim {text} is not a number, nor two with an x between") from None


def _seconds(launcher: WarmedLauncher) -> str:
    return "in the cache already" if launcher.seconds is None else f"{launcher.seconds:.2f} s"
