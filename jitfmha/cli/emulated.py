"""What the commands have in common that run a code object's kernel on the emulator."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..amd.chips import chip
from ..amd.code_object import kernel_descriptors, list_of_names
from ..amd.node import VIRTUAL_NODE
from ..amd.recording_runtime import Started
from ..emulator.profile import LaunchProfile, profile_launch
from ..emulator.runtime import Emulator
from ..emulator.session import DEVICES, Emulation
from ..jit.elf import Elf
from ..jit.toolchain.device_compiler import compile_hip_file
from ..replay.machines import EmulatedMachine
from .exit_codes import UsageError
from .launch_description import LaunchDescription, LaunchDescriptionError
from .output import progress


def emulated_machine(args: argparse.Namespace, arch: str, *, sanitizes: bool) -> EmulatedMachine:
    """The emulator as the flags want it. Commands print its findings themselves."""
    return EmulatedMachine(
        Emulation(
            *(arch, "check" if sanitizes else "plain"),
            random_order=args.random_order,
            threads=args.threads,
            instruction_budget=args.instruction_budget,
            prints_findings=False,
        )
    )


class DescribedLaunch(NamedTuple):
    """What the files say: the launch, the symbol of its kernel, and the code object."""

    description: LaunchDescription
    symbol: str
    image: bytes

    def make(self) -> tuple[Started, dict[str, Tensor]]:
        """The launch, with fresh tensors by name. Raises ``UsageError`` for a file of theirs."""
        try:
            tensors = {name: each.make() for name, each in self.description.tensors.items()}
        except LaunchDescriptionError as error:
            raise UsageError(str(error)) from error
        return self.description.started(self.symbol, self.image, tensors), tensors


def read_launch(args: argparse.Namespace) -> DescribedLaunch:
    """What the flags say, with the code object. Raises ``UsageError`` where that is not right."""
    description: LaunchDescription = args.args
    try:
        image = _image(args.code_object, description.arch)
    except OSError as error:
        raise UsageError(str(error)) from error
    kernel = description.kernel
    asked = f"{description.file} names {'no kernel' if kernel is None else f'kernel {kernel!r}'}"
    return DescribedLaunch(description, kernel_of(image, args.code_object, kernel, asked), image)


def kernel_of(image: bytes, file: Path, wanted: str | None, asked: str) -> str:
    """The symbol of the kernel that is wanted; None: of the only one. Raises ``UsageError`` where
    there is none; it says what was ``asked``, and what the file has.
    """
    try:
        names = list(kernel_descriptors(Elf(image)))
    except (ValueError, LookupError, struct.error) as error:
        raise UsageError(f"{file} is not a code object: {error}") from error
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None or wanted not in names:
        raise UsageError(f"{asked}; {file} has {list_of_names(names)}")
    return wanted


def profile_of(launch: DescribedLaunch, **options: Any) -> LaunchProfile:
    """What the launch costs, by options of `profile_launch`, which says what is raised."""
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


def _image(path: Path, emulated: str) -> bytes:
    if path.suffix != ".hip":
        return path.read_bytes()
    arch = chip(VIRTUAL_NODE[emulated]).architecture.name
    progress(f"compiling {path} for {arch}")
    return compile_hip_file(path, arch)
