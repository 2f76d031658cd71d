"""``python -m jitfmha export``: a C++ library with the AMD kernels, for programs without torch."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import Any

from ..export import Selection, export, features_named, selection_of, selection_of_set
from .exit_codes import OK, UsageError
from .output import print_json, progress, show


def run(args: argparse.Namespace) -> int:
    """Write the library, and say what it holds."""
    try:
        selection = selected(args)
        names = export(
            selection,
            args.output,
            lambda name: progress(f"compiled {name}"),
            jobs=args.jobs,
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json({"folder": str(args.output), "kernels": names})
    else:
        show(f"{args.output}: {len(names)} kernels for {' and '.join(selection.arches)}")
    return OK


def selected(args: argparse.Namespace) -> Selection:
    """What the flags select. Raises ``ValueError`` for a feature that there is none of.

    And for a set of kernels what ``selection_of_set`` raises.
    """
    flags = ("direction", "dtype", "mask", "mode", "bf16_cvt", "out_dtype")
    given = ((f"{flag}s", getattr(args, flag)) for flag in flags)
    chosen: dict[str, Any] = {name: tuple(x) for name, x in given if x is not None}
    for name in ("kv_dtype", "bias_dtype"):
        if getattr(args, name) is not None:
            chosen[name] = getattr(args, name)
    for name in ("few_queries", "persistent", "far_rows"):
        if getattr(args, name):
            chosen[name] = True
    if args.hdim is not None:
        chosen["hdims"] = tuple(chain.from_iterable(args.hdim))
    if args.features is not None:
        chosen["features"] = tuple(map(features_named, chain.from_iterable(args.features)))
    selection = selection_of(tuple(dict.fromkeys(args.arch)), args.profile, chosen)
    return selection if args.set is None else selection_of_set(args.set, selection)
