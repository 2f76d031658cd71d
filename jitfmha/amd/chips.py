"""Every fact about the supported chips, read from ``chips.json``, which also names the sources.

The file is read on first use, so that importing this module costs next to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeGuard, get_args

Arch = Literal["gfx942", "gfx950"]
KernelFolder = Literal["MI300", "MI308"]
"""Where a tree of code objects keeps those of a chip, if its architecture has several folders."""

_FILE = Path(__file__).with_name("chips.json")

SIMDS = 4
"""Of a compute unit, on every chip."""


class Architecture(NamedTuple):
    """What all chips of one architecture have in common.

    Attributes:
        name: as ``gcnArchName`` begins.
        elf_machine: EF_AMDGPU_MACH, the low byte of a code object's ELF flags.
        dtypes: what the matrix units take, of the data types that this package knows.
        fp8_dtype: the one of them that has 8 bits.
        has_bf16_roundings: whether float32 becomes bf16 in the way that a kernel was built for.
        product_depth: values that a product of 32 x 32 elements sums over, of 16 bits each.
        lds_bytes: LDS of a compute unit.
        lds_granularity: bytes of LDS that a workgroup gets a multiple of.
        simd_vgprs: vector registers of a lane that the waves of a SIMD share.
        xcd_engines: shader engines of an XCD, each of which has some of its compute units.
        lds_read_banks, lds_write_banks: banks of 4 bytes that reads of 16 bytes, and writes of 8,
            find.
        unlisted_chip: the name of the chip that a device is taken for if its PCI id is in no list.
    """

    name: Arch
    elf_machine: int
    dtypes: tuple[str, ...]
    fp8_dtype: str
    has_bf16_roundings: bool
    product_depth: int
    lds_bytes: int
    lds_granularity: int
    simd_vgprs: int
    xcd_engines: int
    lds_read_banks: int
    lds_write_banks: int
    unlisted_chip: str

    def has_roundings(self, dtype: str) -> bool:
        """Whether there are kernels of a data type for each way from float32 to bf16.

        fp16 kernels have no bf16 inside, and fp8 ones no choice.
        """
        return self.has_bf16_roundings and dtype == "bf16"

    @property
    def kernel_folders(self) -> tuple[KernelFolder, ...]:
        """The folders of code objects that a tree has for this architecture, if several."""
        folders = (each.kernel_folder for each in chips() if each.architecture == self)
        return tuple(dict.fromkeys(folder for folder in folders if folder is not None))


class Chip(NamedTuple):
    """One product. A partition of it has fewer compute units and XCDs than are named here.

    Attributes:
        name: without "AMD Instinct".
        pci_ids: the PCI device ids by which it is known.
        xcds: chiplets with compute units, each with an L2 cache of its own.
        xcds_assumed: whether no document tells their number.
        peak_clock_mhz, memory_gib: None where it is not published.
        streaming_gb_s: 10^9 bytes a second that a kernel which only reads gets out of HBM, which is
            less than the peak; None where it is not published.
        kernel_folder: None where the architecture has one folder for all chips.
    """

    name: str
    architecture: Architecture
    pci_ids: tuple[int, ...]
    compute_units: int
    xcds: int
    xcds_assumed: bool
    peak_clock_mhz: int | None
    memory_gib: int | None
    streaming_gb_s: int | None
    kernel_folder: KernelFolder | None

    def __str__(self) -> str:
        return self.name


class _Facts(NamedTuple):
    architectures: Mapping[str, Architecture]
    chips: Mapping[str, Chip]


def is_arch(name: str) -> TypeGuard[Arch]:
    """True for the name of a supported architecture."""
    return name in get_args(Arch)


def architecture(name: Arch) -> Architecture:
    """The architecture called ``name``."""
    return _facts().architectures[name]


def chip(name: str) -> Chip:
    """The chip called ``name``, as "MI300X". Raises ``ValueError`` for one that is not known."""
    known = _facts().chips
    if name not in known:
        raise ValueError(f"chip {name!r} is not known; {', '.join(known)} are")
    return known[name]


def chips() -> tuple[Chip, ...]:
    """Return every supported chip, in the order of ``chips.json``."""
    return tuple(_facts().chips.values())


def chip_of_device(arch: Arch, pci_id: int | None) -> Chip:
    """The chip of a device; one whose PCI id is not known runs as a chip of its architecture.

    A unit count would not tell, because a partitioned GPU has fewer units than its chip.
    """
    for each in chips():
        if each.architecture.name == arch and pci_id in each.pci_ids:
            return each
    return chip(architecture(arch).unlisted_chip)


def supported_chips() -> str:
    """All chips by architecture, as messages name them."""
    return "; ".join(
        f"{arch} ({_listed([each.name for each in chips() if each.architecture.name == arch])})"
        for arch in get_args(Arch)
    )


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


@cache
def _facts() -> _Facts:
    file = json.loads(_FILE.read_text(encoding="utf-8"))
    architectures = {
        name: Architecture(name=name, **{**values, "dtypes": tuple(values["dtypes"])})
        for name, values in file["architectures"].items()
    }
    known = {
        name: Chip(
            name=name,
            **{
                **values,
                "architecture": architectures[values["architecture"]],
                "pci_ids": tuple(int(pci_id, 16) for pci_id in values["pci_ids"]),
            },
        )
        for name, values in file["chips"].items()
    }
    return _Facts(MappingProxyType(architectures), MappingProxyType(known))


def chips_of_folders(arch: Arch) -> tuple[Chip, ...]:
    """One chip for each folder that an architecture's code objects may be in."""
    folders = architecture(arch).kernel_folders
    if not folders:
        return (chip(architecture(arch).unlisted_chip),)
    mine = [each for each in chips() if each.architecture.name == arch]
    return tuple(next(each for each in mine if each.kernel_folder == name) for name in folders)
