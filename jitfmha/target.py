"""What a call runs on: the CPU with its instruction set, or one AMD Instinct chip."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import torch

from .emulated_here import may_be_emulated

if TYPE_CHECKING:
    from .emulator import Emulation

CpuIsa = Literal["avx512_bf16", "avx512", "avx2", "neon", "generic"]
Arch = Literal["gfx942", "gfx950"]
Chip = Literal["MI300", "MI308", "MI350"]

SUPPORTED_CHIPS: dict[Arch, str] = {
    "gfx942": "MI300A, MI300X, MI325X and MI308X",
    "gfx950": "MI350X and MI355X",
}
# Every MI308X has one of these; a unit count would not do, because a partitioned GPU has fewer.
_MI308_PCI_CHIP_IDS = frozenset({0x74A2, 0x74A8, 0x74B6, 0x74BC})


@dataclass(frozen=True)
class CpuTarget:
    """A CPU, as far as kernels are compiled for it."""

    isa: CpuIsa

    def __str__(self) -> str:
        return f"cpu ({self.isa})"


@dataclass(frozen=True)
class AmdTarget:
    """An AMD Instinct GPU, real or emulated.

    Attributes:
        chip: whose kernels it runs: MI300 stands for MI300A, MI300X and MI325X, MI350 for MI350X
            and MI355X.
        device_index: as the HIP runtime counts, which is also how torch counts.
        compute_units: that this device has; a partition has fewer than the chip.
        emulation: how the emulator runs it; None for a real GPU.
    """

    arch: Arch
    chip: Chip
    device_index: int
    compute_units: int
    emulation: Emulation | None = None

    def __str__(self) -> str:
        where = "emulated" if self.emulation else f"device {self.device_index}"
        return f"{self.arch} {self.chip} ({where}, {self.compute_units} compute units)"


Target = CpuTarget | AmdTarget


def target_of(device: torch.device) -> Target:
    """The target that tensors on ``device`` run on; a GPU is asked once in a process.

    Inside of ``jitfmha.emulate``, or with JITFMHA_EMULATE in the environment, CPU tensors run on
    an emulated GPU. Raises ``ValueError`` for a device that is neither the CPU nor a supported AMD
    Instinct GPU.
    """
    if device.type == "cpu":
        if not may_be_emulated():
            return cpu_target()
        # Imported here because few processes need it, and because it is built for the CPU's target.
        from .emulator import emulation

        current = emulation()
        return cpu_target() if current is None else _emulated_target(current)
    if device.type != "cuda":
        raise ValueError(
            f"device {device} is not supported; use cpu tensors or an AMD Instinct GPU: "
            f"{_supported()}"
        )
    if torch.version.hip is None:
        found = (
            f"torch {torch.__version__} has no GPU support"
            if torch.version.cuda is None
            else f"device {device} is an NVIDIA GPU, which is not supported"
        )
        raise ValueError(f"{found}; use cpu tensors or an AMD Instinct GPU: {_supported()}")
    return _gpu_target(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=1)
def cpu_target() -> CpuTarget:
    """This machine's CPU, whatever is emulated on it."""
    return CpuTarget(_cpu_isa())


@lru_cache(maxsize=64)
def _gpu_target(index: int) -> AmdTarget:
    from .amd import runtime

    properties = torch.cuda.get_device_properties(index)
    arch = _arch(properties.gcnArchName, f"device cuda:{index}")
    pci_chip_id = runtime.pci_chip_id(runtime.loaded_runtime(), index)
    return AmdTarget(arch, _chip(arch, pci_chip_id), index, properties.multi_processor_count)


@lru_cache(maxsize=64)
def _emulated_target(emulation: Emulation) -> AmdTarget:
    """What the emulator's device is, without building the emulator to ask it."""
    arch = _arch(emulation.arch.partition("-")[0], f"emulated device {emulation.arch}")
    chip: Chip = "MI350" if arch == "gfx950" else "MI308" if "mi308" in emulation.arch else "MI300"
    return AmdTarget(arch, chip, emulation.device, _EMULATED_COMPUTE_UNITS[chip], emulation)


_EMULATED_COMPUTE_UNITS: dict[Chip, int] = {"MI300": 304, "MI308": 80, "MI350": 256}


def _arch(gcn_arch_name: str, what: str) -> Arch:
    """The architecture in a name such as ``gfx942:sramecc+:xnack-``."""
    name = gcn_arch_name.partition(":")[0]
    for arch in get_args(Arch):
        if name == arch:
            return arch  # type: ignore[no-any-return]
    raise ValueError(f"{what} is a {name}; supported are {_supported()}")


def _chip(arch: Arch, pci_chip_id: int) -> Chip:
    if arch == "gfx950":
        return "MI350"
    return "MI308" if pci_chip_id in _MI308_PCI_CHIP_IDS else "MI300"


def _supported() -> str:
    return "; ".join(f"{arch} ({chips})" for arch, chips in SUPPORTED_CHIPS.items())


def _cpu_isa() -> CpuIsa:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon"
    # torch asks cpuinfo, which also knows whether the operating system saves the registers.
    if torch.cpu._is_avx512_supported():
        return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else "generic"
