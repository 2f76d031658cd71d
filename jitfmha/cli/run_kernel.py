"""``python -m jitfmha run-kernel``: any code object's kernel on the emulator and its sanitizer."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .emulated import (
    DescribedLaunch,
    add_launch,
    add_order_and_budget,
    check_order_and_budget,
    read_launch,
)
from .exit_codes import FAILED, OK
from .output import add_json_flag, fields, print_json, progress, table
from .profile import profile_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..emulator.findings import Finding
    from ..emulator.profile import LaunchProfile

_FIRST_VALUES = 6


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "run-kernel",
        help="run a code object's kernel on the emulator and look for faults",
        description=(
            "Run one kernel of a code object on the emulator with its sanitizer, with arguments "
            "that a JSON file describes, and print what was found and what the kernel computed. "
            "The exit code is 1 where the kernel has a fault."
        ),
    )
    add_launch(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write each output's raw bytes to DIR/NAME.bin"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also print what the launch costs, by the cost model"
    )
    add_order_and_budget(parser)
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the kernel that the files describe, and print what came of it."""
    from ..emulator.session import Emulation
    from ..replay.machines import EmulatedMachine, RerunError

    check_order_and_budget(args)
    launch = read_launch(args)
    started, tensors = launch.make()
    machine = EmulatedMachine(
        Emulation(
            *(launch.description.arch, "check"),
            random_order=args.random_order,
            instruction_budget=args.instruction_budget,
            prints_findings=False,  # they are part of what is printed at the end
        )
    )
    failure = None
    try:
        machine.run(started, tensors.values())
    except RerunError as error:
        failure = str(error)
    findings = machine.findings()
    profile = _profile(launch) if args.profile and failure is None else None
    described = launch.description.tensors
    outputs = {name: tensors[name] for name, each in described.items() if each.is_output}
    files = _write(args.out, outputs)
    if args.json:
        print_json(
            {
                "kernel": launch.symbol,
                "arch": launch.description.arch,
                "failure": failure,
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "outputs": {
                    name: _description(each) | {"file": files.get(name)}
                    for name, each in outputs.items()
                },
                "profile": profile.to_dict() if profile else None,
            }
        )
    else:
        _print(launch, findings, failure, outputs, files, profile)
    return FAILED if findings or failure is not None else OK


def _profile(launch: DescribedLaunch) -> LaunchProfile | None:
    """What the launch costs; None, with a line on stderr, where it faults without the sanitizer."""
    from ..emulator import EmulatorError

    try:
        return profile_of(launch)
    except EmulatorError as error:
        progress(f"no profile: {error}")
        return None


def _write(folder: Path | None, outputs: Mapping[str, Tensor]) -> dict[str, str]:
    """The files by name of the output."""
    import torch

    if folder is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, tensor in outputs.items():
        path = folder / f"{name}.bin"
        path.write_bytes(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
        files[name] = str(path)
    return files


def _description(tensor: Tensor) -> dict[str, Any]:
    values = tensor.double() if tensor.dtype.is_floating_point else tensor
    finite = values[values.isfinite()]
    first = values.reshape(-1)[:_FIRST_VALUES].tolist()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        # JSON has no NaN and no infinities.
        "first": [each if math.isfinite(each) else str(each) for each in first],
        "smallest": finite.min().item() if finite.numel() else None,
        "largest": finite.max().item() if finite.numel() else None,
        "not_finite": values.numel() - finite.numel(),
    }


def _print(
    launch: DescribedLaunch,
    findings: tuple[Finding, ...],
    failure: str | None,
    outputs: Mapping[str, Tensor],
    files: Mapping[str, str],
    profile: LaunchProfile | None,
) -> None:
    from ..amd.demangling import demangled
    from ..jit.elf import printable

    of_launch = launch.description
    grid, block = (" x ".join(map(str, each)) for each in (of_launch.grid, of_launch.block))
    print(
        fields(
            [
                ("kernel", printable(demangled(launch.symbol))),
                ("arch", of_launch.arch),
                ("launch", f"{grid} workgroups of {block} threads"),
                ("failure", failure or "none"),
                ("findings", "\n".join(map(str, findings)) or "none"),
            ]
        )
    )
    rows = []
    for name, tensor in outputs.items():
        about = _description(tensor)
        first = ", ".join(each if isinstance(each, str) else f"{each:g}" for each in about["first"])
        limits = [about["smallest"], about["largest"]]
        shown = ["-" if each is None else f"{each:g}" for each in limits]
        shape = " x ".join(map(str, about["shape"]))
        file = files.get(name, "-")
        rows.append([name, about["dtype"], shape, first, *shown, str(about["not_finite"]), file])
    if rows:
        headers = ["output", "dtype", "shape", "first", "smallest", "largest", "not finite", "file"]
        print(f"\n{table(headers, rows)}")
    if profile is not None:
        print(f"\n{profile}")
