"""What the commands have in common that run a code object's kernel on the emulator."""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .exit_codes import UsageError
from .output import progress

if TYPE_CHECKING:
    from torch import Tensor

    from ..amd.recording_runtime import Started
    from ..emulator.launch_description import LaunchDescription


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the code object and the launch, which `read_launch` reads."""
    parser.add_argument(
        "code_object",
        type=Path,
        metavar="FILE",
        help="an AMDGPU ELF file, or HIP C++ without headers (FILE.hip), which is compiled first",
    )
    parser.add_argument(
        "--args",
        type=Path,
        required=True,
        metavar="ARGS.json",
        help="the launch, as data: docs/emulator.md describes it, on an example",
    )


def add_order_and_budget(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``check_order_and_budget`` checks."""
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


def check_order_and_budget(args: argparse.Namespace) -> None:
    """Raises ``UsageError`` for numbers that the emulator does not take."""
    for flag, number, least in (
        ("--random-order", args.random_order, 0),
        ("--instruction-budget", args.instruction_budget, 1),
    ):
        if number is not None and not least <= number < 2**64:
            raise UsageError(f"{flag} {number}: not from {least} to 2**64 - 1")


class DescribedLaunch(NamedTuple):
    """What the files say.

    Attributes:
        description: of the launch.
        symbol: of the kernel. image: its code object.
    """

    description: LaunchDescription
    symbol: str
    image: bytes

    def make(self) -> tuple[Started, dict[str, Tensor]]:
        """The launch, with fresh tensors by name. Raises ``UsageError`` for a file of theirs."""
        from ..emulator.launch_description import LaunchDescriptionError

        try:
            tensors = {name: each.make() for name, each in self.description.tensors.items()}
        except LaunchDescriptionError as error:
            raise UsageError(str(error)) from error
        return self.description.started(self.symbol, self.image, tensors), tensors


def read_launch(args: argparse.Namespace) -> DescribedLaunch:
    """Read both files. Raises ``UsageError`` where they are not what they should be."""
    from ..emulator.launch_description import LaunchDescription, LaunchDescriptionError

    try:
        description = LaunchDescription.read(args.args)
        image = _image(args.code_object, description.arch)
    except OSError as error:
        raise UsageError(str(error)) from error
    except LaunchDescriptionError as error:
        raise UsageError(f"{args.args}: {error}") from error
    return DescribedLaunch(description, _symbol(image, args, description.kernel), image)


def _image(path: Path, emulated: str) -> bytes:
    from ..amd.chips import chip
    from ..amd.node import VIRTUAL_NODE
    from ..jit.toolchain.device_compiler import compile_hip

    if path.suffix != ".hip":
        return path.read_bytes()
    arch = chip(VIRTUAL_NODE[emulated]).architecture.name
    progress(f"compiling {path} for {arch}")
    return compile_hip(path.read_text(encoding="utf-8"), arch)


def _symbol(image: bytes, args: argparse.Namespace, wanted: str | None) -> str:
    """Find the symbol that is launched: the only one, or the one that is asked for."""
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
