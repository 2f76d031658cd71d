"""One AMD GPU code object: what its file says about itself, and whether that is what we need.

A code object is an ELF file. Its header names the architecture, its symbol table the kernels
(``NAME.kd`` is the descriptor of kernel NAME), and a note holds metadata in MessagePack.
Source: LLVM's "User Guide for AMDGPU Backend", sections ELF Code Object and Code Object Metadata.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ..jit.elf import Elf, printable
from ..jit.regular_file import read_regular_file
from .chips import Arch, architecture

_MACHINE_AMDGPU = 224
_NOTE_METADATA = 32
# Names have some hundred letters at most, where templates are spelled out in them.
_SHOWN_NAMES, _SHOWN_LETTERS = 20, 1000


class CodeObjectError(ValueError):
    """A code object that must not be loaded; the text says what was expected and what found."""


@dataclass(frozen=True)
class CodeObject:
    """A code object that was checked; ``kernarg_bytes`` is what its kernel's metadata declare."""

    path: Path
    image: bytes
    symbol: str
    kernarg_bytes: int


def read_code_object(
    path: Path,
    *,
    arch: Arch,
    kernels: Mapping[str, int],
    kernarg_bytes: int,
    sha256: str | None,
) -> CodeObject:
    """Read a file and check it before anything is loaded from it.

    Args:
        arch: gfx942 or gfx950.
        kernels: that must be inside, the one that it is named after first: by symbol the threads of
            a workgroup, as it will be launched.
        kernarg_bytes: that the launcher passes. A kernel may declare fewer: it reads a part.
        sha256: of the whole file, what its hexadecimal digits begin with; None where the manifest
            has none.

    Raises:
        CodeObjectError: the file cannot be read, or is not what was expected.
    """
    try:
        image = read_regular_file(path)
    except OSError as error:
        raise CodeObjectError(f"{path} cannot be read: {error.strerror or error}") from error
    if sha256 is not None:
        found = hashlib.sha256(image).hexdigest()
        if not found.startswith(sha256):
            raise CodeObjectError(
                f"{path} is damaged or was replaced: its SHA-256 is {found}, "
                f"the manifest expects {sha256}"
            )
    try:
        elf = Elf(image)
        declared = [
            (symbol, _check(path, elf, arch, symbol, threads, kernarg_bytes))
            for symbol, threads in kernels.items()
        ]
    except CodeObjectError:
        raise
    except (struct.error, LookupError, ValueError, OverflowError, RecursionError) as error:
        raise CodeObjectError(f"{path} is damaged: {error or type(error).__name__}") from error
    return CodeObject(path, image, *declared[0])


def list_of_names(names: Collection[str]) -> str:
    """The first of these names of a file, for a message, and how many more there are."""
    first = [printable(name[:_SHOWN_LETTERS]) for name in islice(names, _SHOWN_NAMES)]
    more = len(names) - len(first)
    return ", ".join((*first, f"{more} more") if more else first) or "none at all"


def _check(path: Path, elf: Elf, arch: Arch, symbol: str, threads: int, kernarg_bytes: int) -> int:
    if elf.machine != _MACHINE_AMDGPU:
        raise CodeObjectError(
            f"{path} is for ELF machine {elf.machine}, expected {_MACHINE_AMDGPU} (AMD GPU)"
        )
    mach, expected = elf.flags & 0xFF, architecture(arch).elf_machine
    if mach != expected:
        names = {architecture(name).elf_machine: name for name in get_args(Arch)}
        raise CodeObjectError(
            f"{path} is for {names.get(mach, 'another architecture')} (EF_AMDGPU_MACH {mach:#x}), "
            f"expected {arch} ({expected:#x})"
        )
    kernels = kernel_descriptors(elf)
    if symbol not in kernels:
        raise CodeObjectError(f"{path} has no kernel {symbol}; it has {list_of_names(kernels)}")
    metadata = kernel_metadata(elf, symbol)
    if metadata is None:
        raise CodeObjectError(f"{path} has no metadata about kernel {symbol}")
    declared = _integer(metadata, ".kernarg_segment_size")
    # Compilers write the size into the descriptor too; assembly often leaves a 0 there.
    described = kernels[symbol].kernarg_bytes
    for size in (declared, described or declared):
        if not 0 < size <= kernarg_bytes:
            raise CodeObjectError(
                f"{path}: kernel {symbol} declares {size} bytes of arguments, "
                f"expected at most {kernarg_bytes}"
            )
    most = _integer(metadata, ".max_flat_workgroup_size")
    if most < threads:
        raise CodeObjectError(
            f"{path}: kernel {symbol} takes workgroups of at most {most} threads, "
            f"expected {threads}"
        )
    required = metadata.get(".reqd_workgroup_size")
    if required is not None and required != [threads, 1, 1]:
        raise CodeObjectError(
            f"{path}: kernel {symbol} requires workgroups of {required!r:.100}, "
            f"expected {[threads, 1, 1]}"
        )
    lanes = _integer(metadata, ".wavefront_size")
    if lanes != 64:
        raise CodeObjectError(f"{path}: kernel {symbol} has waves of {lanes} lanes, expected 64")
    return declared


class KernelDescriptor(NamedTuple):
    """What a kernel's descriptor tells.

    ``kernarg_bytes`` is 0 where it is not told; ``vgprs`` are the vector registers that a wave
    takes, those for accumulation included.
    """

    lds_bytes: int
    kernarg_bytes: int
    vgprs: int


def kernel_descriptors(elf: Elf) -> dict[str, KernelDescriptor]:
    """The descriptors of the kernels, by symbol."""
    kernels = {}
    for symbol in elf.dynamic_symbols():
        if symbol.name.endswith(".kd") and symbol.section < len(elf.sections):
            home = elf.sections[symbol.section]
            at = home.offset + symbol.address - home.address
            lds_bytes, kernarg_bytes = struct.unpack_from("<I4xI", elf.image, at)
            (rsrc1,) = struct.unpack_from("<I", elf.image, at + 48)
            # GRANULATED_WORKITEM_VGPR_COUNT: how often 8 more than the first 8.
            vgprs = (rsrc1 & 0x3F) * 8 + 8
            descriptor = KernelDescriptor(lds_bytes, kernarg_bytes, vgprs)
            kernels[symbol.name.removesuffix(".kd")] = descriptor
    return kernels


def kernel_metadata(elf: Elf, symbol: str) -> dict[str, Any] | None:
    """The metadata of one kernel, if there are any."""
    for note in elf.notes(_NOTE_METADATA):
        document, _ = _unpack(note, 0)
        kernels = document.get("amdhsa.kernels") if isinstance(document, dict) else None
        for kernel in kernels if isinstance(kernels, list) else ():
            if isinstance(kernel, dict) and kernel.get(".symbol") == f"{symbol}.kd":
                return kernel
    return None


def _integer(metadata: dict[str, Any], name: str) -> int:
    value = metadata.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"its metadata say {value!r:.100} for {name}")
    return value


# MessagePack: the first byte of a value -> (struct format of its number or length, its kind).
_NUMBERS = {
    0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q",
    0xCA: "f", 0xCB: "d",
}  # fmt: skip
_LENGTHS = {
    0xD9: ("B", "text"), 0xDA: ("H", "text"), 0xDB: ("I", "text"),
    0xC4: ("B", "bytes"), 0xC5: ("H", "bytes"), 0xC6: ("I", "bytes"),
    0xDC: ("H", "array"), 0xDD: ("I", "array"), 0xDE: ("H", "map"), 0xDF: ("I", "map"),
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """A MessagePack value and where the next one begins."""
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _NUMBERS:
        (number,) = struct.unpack_from(f">{_NUMBERS[first]}", data, at)
        return number, at + struct.calcsize(_NUMBERS[first])
    if first in _LENGTHS:
        form, kind = _LENGTHS[first]
        (length,) = struct.unpack_from(f">{form}", data, at)
        at += struct.calcsize(form)
    elif first < 0xC0:
        kind = "map" if first < 0x90 else "array" if first < 0xA0 else "text"
        length = first & (0x1F if kind == "text" else 0x0F)
    else:
        raise ValueError(f"its metadata hold a value that starts with {first:#x}")
    if kind in ("text", "bytes"):
        piece = data[at : at + length]
        return (piece.decode() if kind == "text" else piece), at + length
    if kind == "array":
        items = []
        for _ in range(length):
            item, at = _unpack(data, at)
            items.append(item)
        return items, at
    pairs = {}
    for _ in range(length):
        key, at = _unpack(data, at)
        if isinstance(key, (list, dict)):
            raise ValueError("its metadata have a list as a key")
        pairs[key], at = _unpack(data, at)
    return pairs, at
