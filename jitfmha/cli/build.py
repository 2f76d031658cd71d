"""``python -m jitfmha build``: fill the cache ahead, in a container image or before many ranks."""

from __future__ import annotations

import argparse

from ..ahead.warm_up import WarmedLauncher, warmup
from .exit_codes import OK, UsageError
from .output import ProgressBar, print_json, table


def run(args: argparse.Namespace) -> int:
    """Build, and say what each launcher took."""
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
                hdims=args.hdim,
                masks=args.mask,
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


def _seconds(launcher: WarmedLauncher) -> str:
    return "in the cache already" if launcher.seconds is None else f"{launcher.seconds:.2f} s"
