"""``python -m jitfmha profile``: what a kernel costs, without a GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .emulated import DescribedLaunch, add_launch, read_launch
from .exit_codes import OK, UsageError
from .output import add_json_flag, print_json

if TYPE_CHECKING:
    from ..emulator.profile import LaunchProfile


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "profile",
        help="run a kernel on the emulator and print what it costs",
        description=(
            "Run one kernel of a code object or of a HIP C++ source on the emulator, and print "
            "exact counts, registers, LDS, occupancy and a modelled time of the launch, with the "
            "model's assumptions."
        ),
    )
    add_launch(parser)
    parser.add_argument(
        "--workgroup",
        type=int,
        default=0,
        metavar="N",
        help="the workgroup to look at wave by wave, by linear number (default: 0)",
    )
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="run and time only N workgroups of a large launch, and predict the others",
    )
    parser.add_argument(
        "--assume-workgroups",
        type=int,
        default=0,
        metavar="N",
        help="estimate the time of a launch of N workgroups (default: as launched)",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the kernel that the files describe, and print its profile."""
    for flag, number, least in (
        ("--workgroup", args.workgroup, 0),
        ("--assume-workgroups", args.assume_workgroups, 0),
        ("--sample", args.sample, 1),
    ):
        if number is not None and not least <= number < 2**31:
            raise UsageError(f"{flag} {number}: not from {least} to 2**31 - 1")
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
        print(profile)
    return OK


def profile_of(launch: DescribedLaunch, **options: Any) -> LaunchProfile:
    """What the launch costs, by options of `profile_launch`.

    Raises:
        EmulatorError: the kernel did something wrong or unknown.
    """
    from ..emulator import DEVICES, Emulator
    from ..emulator.profile import profile_launch

    emulator = Emulator("profile")
    started, tensors = launch.make()
    device = DEVICES[launch.description.arch]
    with emulator.loaded(started.image, device, started.symbol) as function:
        return profile_launch(
            *(emulator, function, started.grid, started.block, started.kernarg),
            dynamic_lds=started.dynamic_lds,
            memory=[(each.data_ptr(), each.nbytes) for each in tensors.values()],
            **options,
        )
