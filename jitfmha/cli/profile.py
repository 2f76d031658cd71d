"""``python -m jitfmha profile``: what a kernel costs, without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .exit_codes import OK, UsageError
from .output import add_json_flag, print_json, progress

# Where `--kernarg` puts its fields: "name" -> bytes of an integer.
_INTEGERS = {"i32": 4, "i64": 8}
_ALIGNMENT = 256


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
        epilog=(
            "Arguments of --args, separated by commas, are laid out with their natural alignment: "
            "buf:BYTES (the address of a buffer with random float32 values in [0, 1)), zero:BYTES "
            "(of a buffer of zeros), i32:N, i64:N, f32:X. --kernarg-hex gives the packed bytes "
            "instead; there, {0}, {1} and so on stand for the addresses of --buffer, in order, "
            "8 bytes each."
        ),
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--code-object", type=Path, metavar="FILE", help="an AMDGPU ELF file")
    source.add_argument(
        "--hip", type=Path, metavar="FILE", help="HIP C++ without headers, compiled first"
    )
    parser.add_argument("--kernel", required=True, metavar="NAME", help="its symbol")
    parser.add_argument(
        "--arch",
        required=True,
        help="gfx942 (MI300X), gfx942-mi308 (MI308X) or gfx950 (MI355X)",
    )
    parser.add_argument("--grid", default="1", metavar="X[,Y[,Z]]", help="workgroups (default: 1)")
    parser.add_argument(
        "--block", default="64", metavar="X[,Y[,Z]]", help="threads of each (default: 64)"
    )
    arguments = parser.add_mutually_exclusive_group()
    arguments.add_argument("--args", metavar="ARG,...", help="the kernel's arguments; see below")
    arguments.add_argument("--kernarg-hex", metavar="HEX", help="the same as packed bytes")
    parser.add_argument(
        "--buffer",
        action="append",
        default=[],
        metavar="BYTES",
        help="a buffer as buf:BYTES makes one, for --kernarg-hex; repeatable",
    )
    parser.add_argument("--lds", type=int, default=0, metavar="BYTES", help="dynamic LDS")
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
    """Run the kernel that the flags describe, and print its profile."""
    from ..emulator import DEVICES, Emulator
    from ..emulator.profile import profile_launch
    from ..jit.toolchain.device_compiler import compile_hip

    if args.arch not in DEVICES:
        raise UsageError(f"--arch {args.arch}: choose one of {', '.join(DEVICES)}")
    if args.workgroup < 0 or args.assume_workgroups < 0 or args.lds < 0:
        raise UsageError("--workgroup, --assume-workgroups and --lds are at least 0")
    if args.sample is not None and args.sample < 1:
        raise UsageError(f"--sample {args.sample}: at least one workgroup has to run")
    grid, block = _extent("--grid", args.grid), _extent("--block", args.block)
    if args.buffer and args.kernarg_hex is None:
        raise UsageError("--buffer needs --kernarg-hex; --args has buf:BYTES")
    memory = _Memory()
    if args.kernarg_hex is not None:
        kernarg = _from_hex(args.kernarg_hex, args.buffer, memory)
    else:
        kernarg = _from_fields(args.args, memory)
    try:
        if args.hip is not None:
            progress(f"compiling {args.hip} for {args.arch[:6]}")
            code_object = compile_hip(args.hip.read_text(encoding="utf-8"), args.arch[:6])
        else:
            code_object = args.code_object.read_bytes()
    except OSError as error:
        raise UsageError(str(error)) from error

    emulator = Emulator("profile")
    module = emulator.load_module(code_object, DEVICES[args.arch])
    try:
        profile = profile_launch(
            emulator,
            emulator.function(module, args.kernel),
            grid,
            block,
            kernarg,
            dynamic_lds=args.lds,
            memory=memory.ranges(),
            looked_at=args.workgroup,
            assumed_workgroups=args.assume_workgroups,
            **({} if args.sample is None else {"sample": args.sample, "run_sample_only": True}),
        )
    finally:
        emulator.unload_module(module)
    if args.json:
        print_json(profile.to_dict())
    else:
        print(profile)
    return OK


class _Memory:
    """Buffers that the kernel may touch, aligned as hipMalloc aligns."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Any, int, int]] = []

    def add(self, size: int, *, zeros: bool = False) -> int:
        """The address of a new buffer; the same values each time."""
        import torch

        count = (size + _ALIGNMENT) // 4 + 1
        generator = torch.Generator().manual_seed(len(self._buffers))
        buffer = torch.zeros(count) if zeros else torch.rand(count, generator=generator)
        address = -(-buffer.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._buffers.append((buffer, address, size))
        return address

    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of each."""
        return [(address, size) for _, address, size in self._buffers]


def _extent(flag: str, text: str) -> tuple[int, int, int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise UsageError(f"{flag} {text} is not one to three positive integers like 64,8,2")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _from_fields(text: str | None, memory: _Memory) -> bytes:
    import struct

    packed = b""
    for field in (text or "").split(",") if text else []:
        kind, _, value = field.partition(":")
        try:
            if kind in ("buf", "zero"):
                size = int(value)
                if size < 1:
                    raise UsageError(f"--args {field}: a buffer has at least one byte")
                data = memory.add(size, zeros=kind == "zero").to_bytes(8, "little")
            elif kind in _INTEGERS:
                data = int(value, 0).to_bytes(_INTEGERS[kind], "little", signed=int(value, 0) < 0)
            elif kind == "f32":
                data = struct.pack("<f", float(value))
            else:
                raise UsageError(f"--args {field}: not one of buf, zero, i32, i64, f32")
        except (ValueError, OverflowError) as error:
            raise UsageError(f"--args {field}: {error}") from error
        packed += bytes(-len(packed) % len(data)) + data
    return packed


def _from_hex(text: str, buffers: list[str], memory: _Memory) -> bytes:
    try:
        sizes = [int(size) for size in buffers]
    except ValueError:
        sizes = [0]
    if sizes and min(sizes) < 1:
        raise UsageError(f"--buffer {' '.join(buffers)}: a buffer has at least one byte")
    addresses = [memory.add(size).to_bytes(8, "little").hex() for size in sizes]
    try:
        return bytes.fromhex(text.format(*addresses))
    except (ValueError, IndexError, KeyError) as error:
        raise UsageError(f"--kernarg-hex: {error}") from error
