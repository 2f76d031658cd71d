"""``python -m jitfmha run-kernel``: any code object's kernel on the emulator and its sanitizer."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..amd.demangling import demangled
from ..emulator import EmulatorError
from ..emulator.findings import Finding
from ..emulator.profile import LaunchProfile
from ..jit.elf import printable
from ..replay.machines import RerunError
from .emulated import DescribedLaunch, emulated_machine, profile_of, read_launch
from .exit_codes import FAILED, OK
from .output import fields, print_json, progress, show, table

_FIRST_VALUES = 6


def run(args: argparse.Namespace) -> int:
    """Run the kernel that the files describe, and print what came of it."""
    launch = read_launch(args)
    started, tensors = launch.make()
    machine = emulated_machine(args, launch.description.arch, sanitizes=True)
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
        shown = {n: _description(each) | {"file": files.get(n)} for n, each in outputs.items()}
        document = {
            "kernel": launch.symbol,
            "arch": launch.description.arch,
            "failure": failure,
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "outputs": shown,
            "profile": profile.to_dict() if profile else None,
        }
        print_json(document)
    else:
        _print(launch, findings, failure, outputs, files, profile)
    return FAILED if findings or failure is not None else OK


def _profile(launch: DescribedLaunch) -> LaunchProfile | None:
    """What the launch costs; None, with a line on stderr, where it faults without the sanitizer."""
    try:
        return profile_of(launch)
    except EmulatorError as error:
        progress(f"no profile: {error}")
        return None


def _write(folder: Path | None, outputs: Mapping[str, Tensor]) -> dict[str, str]:
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
    of_launch = launch.description
    grid, block = (" x ".join(map(str, each)) for each in (of_launch.grid, of_launch.block))
    about_launch = [
        ("kernel", printable(demangled(launch.symbol))),
        ("arch", of_launch.arch),
        ("launch", f"{grid} workgroups of {block} threads"),
        ("failure", failure or "none"),
        ("findings", "\n".join(map(str, findings)) or "none"),
    ]
    show(fields(about_launch))
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
        show(f"\n{table(headers, rows)}")
    if profile is not None:
        show(f"\n{profile}")
