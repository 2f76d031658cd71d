"""``python -m jitfmha build``: fill the cache ahead, in a container image or before many ranks."""

from __future__ import annotations

import argparse
from typing import Any

from .. import jit
from ..ahead.warm_up import WarmedLauncher, specs_ahead, warmup
from .exit_codes import OK, UsageError
from .output import ProgressBar, print_json, show, table


def run(args: argparse.Namespace) -> int:
    """Build, and say what each launcher took; or say what would be built."""
    asked = {
        "profile": args.profile,
        "kernel_set": args.set,
        "dtypes": args.dtype,
        "hdims": args.hdim,
        "masks": args.mask,
        "modes": args.mode,
        "directions": args.direction,
        "features": args.features,
        "out_dtypes": args.out_dtype,
        "device": args.device,
        "isa": args.isa,
    }
    try:
        launchers = _planned(asked) if args.dry_run else _built(asked, args.jobs)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    in_words = _plan_in_words if args.dry_run else _build_in_words
    if args.json:
        print_json(launchers)
    else:
        show(table(("launcher", "build"), [(x["name"], in_words(x)) for x in launchers]))
    return OK


def _built(asked: dict[str, Any], jobs: int | None) -> list[dict[str, Any]]:
    with ProgressBar(unit="launchers") as bar:
        done = 0

        def report(launcher: WarmedLauncher, left: int) -> None:
            nonlocal done
            done += not launcher.was_cached
            bar.reach(done, done + left)

        launchers = warmup(**asked, jobs=jobs, on_ready=report)
    return [{"name": x.name, "build_seconds": x.seconds} for x in launchers]


def _planned(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What would be built, and what it took where an entry of the same name is in the cache."""
    took = {x.name: x.build_seconds for x in jit.cache_entries()}
    launchers = []
    for name, specs in specs_ahead(**asked).items():
        missing = [spec for spec in specs if not jit.is_built(spec)]
        known = [x for x in (took.get(spec.name) for spec in missing) if x is not None]
        seconds = sum(known) if missing and len(known) == len(missing) else None
        launchers.append({"name": name, "cached": not missing, "took_seconds": seconds})
    return launchers


_CACHED = "in the cache already"


def _build_in_words(launcher: dict[str, Any]) -> str:
    seconds = launcher["build_seconds"]
    return _CACHED if seconds is None else f"{seconds:.2f} s"


def _plan_in_words(launcher: dict[str, Any]) -> str:
    if launcher["cached"]:
        return _CACHED
    took = launcher["took_seconds"]
    return "to be built" + ("" if took is None else f"; another build of it took {took:.1f} s")
