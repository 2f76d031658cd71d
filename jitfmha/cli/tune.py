"""``python -m jitfmha tune``: measure what serves calls best on this machine, and keep it."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from ..ahead.combination import Combination
from ..ahead.tune import TunedCall, calls_of_profile, tunable_target, tune
from ..bench.shapes import Shape, shapes_of
from ..jit.regular_file import read_regular_file, write_whole
from ..planning.measured import Variant
from ..planning.measured_file import forget, from_bytes, keep, kept, left_out, to_bytes
from ..planning.target import CpuTarget
from ..problem.mask import parse_mask
from .exit_codes import FAILED, OK, UsageError
from .output import ProgressBar, print_json, progress, show

_SHAPES = ("seqlens", "causal", "decode")


def run(args: argparse.Namespace) -> int:
    """Measure, or move what was measured into a file, out of one, or away."""
    if args.export is not None:
        rows = kept()
        write_whole(args.export, to_bytes(rows))
        return _say(args, f"wrote {len(rows)} measured times to {args.export}", exported=len(rows))
    if args.import_ is not None:
        return _import(args)
    if args.forget:
        count = forget()
        return _say(args, f"forgot {count} measured times", forgotten=count)
    return _tune(args)


def _say(args: argparse.Namespace, text: str, **values: object) -> int:
    if args.json:
        print_json(values)
    else:
        show(text)
    return OK


def _import(args: argparse.Namespace) -> int:
    try:
        rows, wrong = from_bytes(read_regular_file(args.import_))
    except (OSError, ValueError) as error:
        raise UsageError(f"--import {args.import_}: {error}") from None
    if wrong:
        progress(left_out(wrong, len(rows) + len(wrong)))
    path = keep(rows)
    text = f"{len(rows)} measured times are in {path}; each counts on the machine that it is of"
    return _say(args, text, imported=len(rows), left_out=len(wrong), path=str(path))


def _tune(args: argparse.Namespace) -> int:
    if not 0 <= args.seconds <= 3600:
        raise UsageError(f"--seconds must be from 0 to 3600, got {args.seconds}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target, _ = tunable_target(device)
        calls = _calls(args, device)
    except (TypeError, ValueError, OSError) as error:
        raise UsageError(str(error)) from None
    tuned: list[TunedCall] = []
    with ProgressBar(len(calls)) as bar:
        bar.line(f"timing {len(calls)} calls on {target}")
        load, processors = os.getloadavg()[0], os.cpu_count() or 1
        if isinstance(target, CpuTarget) and load > processors:
            bar.line(
                f"{load:.1f} processes want to run on {processors} processors: what is measured "
                "now will not hold for a machine at rest"
            )
        for number, done in enumerate(tune(calls, device, seconds=args.seconds), 1):
            bar.line(f"[{number}/{len(calls)}] {done if isinstance(done, str) else _line(done)}")
            bar.reach(number)
            if isinstance(done, TunedCall):
                tuned.append(done)
    if args.json:
        print_json([values_of(x) for x in tuned])
    return OK if any(x.measured for x in tuned) else FAILED


def _calls(args: argparse.Namespace, device: str) -> list[Combination]:
    profile = [] if args.profile is None else calls_of_profile(args.profile, device)
    texts = args.shapes or (() if profile else _SHAPES)
    return [*map(combination_of, (shape for text in texts for shape in shapes_of(text))), *profile]


def combination_of(shape: Shape) -> Combination:
    """What a shape asks for."""
    return Combination(
        dtype=shape.dtype,
        kv_dtype=shape.dtype,
        hdim_q=shape.hdim,
        hdim_v=shape.hdim_v,
        mask=parse_mask(shape.mask),
        direction=shape.direction,  # type: ignore[arg-type]
        batch=shape.batch,
        heads_q=shape.heads,
        heads_k=shape.kv_heads,
        seqlen_q=shape.seqlen,
        seqlen_k=shape.seqlen_k,
    )


def _line(x: TunedCall) -> str:
    call = f"{x.kind}, {x.lengths[0]} x {x.lengths[1]}"
    failed = "".join(f"; {text}" for text in x.failed)
    if not x.measured:
        return f"{call}: nothing ran{failed}"
    best, seconds = next(iter(x.measured.items()))
    gain = "" if x.gain is None else f", {x.gain:.2f}x as fast as before"
    return f"{call}: {len(x.measured)} timed, {_named(best)} {seconds * 1e6:.4g} us{gain}{failed}"


def _named(variant: Variant) -> str:
    splits = f", num_splits={variant.num_splits}" if variant.num_splits else ""
    threads = f", {variant.threads} threads" if variant.threads else ""
    return f"{variant.kernel}{splits}{threads}"


def values_of(x: TunedCall) -> dict[str, Any]:
    """What was measured, as JSON has it."""
    return {
        "call": x.kind,
        "seqlen_q": x.lengths[0],
        "seqlen_k": x.lengths[1],
        "before": x.before._asdict(),
        "measured": [
            {
                **variant._asdict(),
                "microseconds": seconds * 1e6,
                "estimated_microseconds": _microseconds(x.estimates[variant]),
            }
            for variant, seconds in x.measured.items()
        ],
        "failed": list(x.failed),
    }


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6
