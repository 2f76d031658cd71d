"""``python -m jitfmha run-kernel``: any code object's kernel on the emulator and its sanitizer."""

from __future__ import annotations

import argparse
import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .exit_codes import FAILED, OK, UsageError
from .output import add_json_flag, fields, print_json, progress, table

if TYPE_CHECKING:
    from torch import Tensor

    from ..emulator.findings import Finding
    from ..emulator.launch_description import LaunchDescription
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
        epilog="docs/emulator.md describes the JSON file, on an example.",
    )
    parser.add_argument("code_object", type=Path, metavar="FILE.co", help="an AMDGPU ELF file")
    parser.add_argument(
        "--args", type=Path, required=True, metavar="ARGS.json", help="the launch, as data"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write each output's raw bytes to DIR/NAME.bin"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also print what the launch costs, by the cost model"
    )
    parser.add_argument(
        "--random-order",
        type=int,
        metavar="SEED",
        help="waves run in random order, which shakes out races (default: in a fixed order)",
    )
    parser.add_argument(
        "--instruction-budget",
        type=int,
        metavar="N",
        help="stop a wave that has executed N instructions (default: only Ctrl-C stops it)",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the kernel that the files describe, and print what came of it."""
    from ..emulator.launch_description import LaunchDescription, LaunchDescriptionError

    if args.random_order is not None and not 0 <= args.random_order < 2**64:
        raise UsageError(f"--random-order {args.random_order}: not from 0 to 2**64 - 1")
    budget = args.instruction_budget
    if budget is not None and not 1 <= budget < 2**64:
        raise UsageError(f"--instruction-budget {budget}: not from 1 to 2**64 - 1")
    try:
        image = args.code_object.read_bytes()
        launch = LaunchDescription.read(args.args)
        launch = dataclasses.replace(launch, kernel=_kernel(image, args, launch.kernel))
        tensors = {name: each.make() for name, each in launch.tensors.items()}
        profiled = {name: each.make() for name, each in launch.tensors.items()}
    except OSError as error:
        raise UsageError(str(error)) from error
    except LaunchDescriptionError as error:
        raise UsageError(f"{args.args}: {error}") from error

    findings, failure = _run_checked(image, launch, tensors, args.random_order, budget)
    profile = _profile(image, launch, profiled) if args.profile and failure is None else None
    outputs = {name: tensors[name] for name, each in launch.tensors.items() if each.is_output}
    files = _write(args.out, outputs)
    if args.json:
        print_json(
            {
                "kernel": launch.kernel,
                "arch": launch.arch,
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


def _kernel(image: bytes, args: argparse.Namespace, wanted: str | None) -> str:
    """The symbol that is launched."""
    from ..amd.code_object import list_of_names
    from ..jit.elf import Elf

    try:
        symbols = [symbol.name for symbol in Elf(image).dynamic_symbols()]
    except (ValueError, IndexError, struct.error) as error:
        raise UsageError(f"{args.code_object} is not a code object: {error}") from error
    names = [name.removesuffix(".kd") for name in symbols if name.endswith(".kd")]
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None or wanted not in names:
        asked = "names no kernel" if wanted is None else f"names kernel {wanted!r}"
        raise UsageError(f"{args.args} {asked}; {args.code_object} has {list_of_names(names)}")
    return wanted


def _run_checked(
    image: bytes,
    launch: LaunchDescription,
    tensors: Mapping[str, Tensor],
    seed: int | None,
    instruction_budget: int | None,
) -> tuple[list[Finding], str | None]:
    """The sanitizer's findings, and why the kernel did not reach its end, if it did not."""
    from ..emulator import DEVICES, Emulator, EmulatorError, take_findings

    emulator = Emulator("check")
    assert launch.kernel is not None
    failure = None
    with emulator.keep_options():
        emulator.set_options(
            random_order=seed is not None,
            seed=seed or 0,
            instruction_budget=instruction_budget or 0,
            print_findings=False,  # they are part of what is printed at the end
        )
        module = emulator.load_module(image, DEVICES[launch.arch])
        emulator.set_allowed_memory(_ranges(tensors))
        take_findings(emulator.library)
        try:
            function = emulator.function(module, launch.kernel)
            kernarg = launch.kernarg(tensors)
            emulator.launch(
                function, launch.grid, launch.block, kernarg, dynamic_lds=launch.dynamic_lds
            )
        except EmulatorError as error:
            failure = str(error)
        finally:
            emulator.set_allowed_memory(None)
            emulator.unload_module(module)
    return take_findings(emulator.library), failure


def _profile(
    image: bytes, launch: LaunchDescription, tensors: Mapping[str, Tensor]
) -> LaunchProfile | None:
    """What the launch costs; None, with a line on stderr, where it faults without the sanitizer."""
    from ..emulator import DEVICES, Emulator, EmulatorError
    from ..emulator.profile import profile_launch

    emulator = Emulator("profile")
    assert launch.kernel is not None
    module = emulator.load_module(image, DEVICES[launch.arch])
    try:
        return profile_launch(
            emulator,
            emulator.function(module, launch.kernel),
            launch.grid,
            launch.block,
            launch.kernarg(tensors),
            dynamic_lds=launch.dynamic_lds,
            memory=_ranges(tensors),
        )
    except EmulatorError as error:
        progress(f"no profile: {error}")
        return None
    finally:
        emulator.unload_module(module)


def _ranges(tensors: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    return [(each.data_ptr(), each.nbytes) for each in tensors.values()]


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
    launch: LaunchDescription,
    findings: list[Finding],
    failure: str | None,
    outputs: Mapping[str, Tensor],
    files: Mapping[str, str],
    profile: LaunchProfile | None,
) -> None:
    from ..amd.demangling import demangled
    from ..jit.elf import printable

    grid, block = (" x ".join(map(str, extent)) for extent in (launch.grid, launch.block))
    print(
        fields(
            [
                ("kernel", printable(demangled(str(launch.kernel)))),
                ("arch", launch.arch),
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
