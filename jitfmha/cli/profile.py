"""``python -m jitfmha profile``: what a kernel costs, without a GPU."""

from __future__ import annotations

import argparse

from .emulated import profile_of, read_launch
from .exit_codes import OK
from .output import print_json, show


def run(args: argparse.Namespace) -> int:
    """Run the kernel that the files describe, and print its profile."""
    sample = {} if args.sample is None else {"sample": args.sample, "run_sample_only": True}
    profile = profile_of(
        read_launch(args),
        looked_at=args.workgroup,
        assumed_workgroups=args.assume_workgroups,
        **sample,
    )
    if args.json:
        print_json(profile.to_dict())
    else:
        show(str(profile))
    return OK
