"""What a call runs on: the CPU with its instruction set, or one AMD Instinct chip."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

CpuIsa = Literal["avx512_bf16", "avx512", "avx2", "neon", "generic"]

SUPPORTED_CHIPS = {
    "gfx942": "MI300A, MI300X, MI325X and MI308X",
    "gfx950": "MI350X and MI355X",
}


@dataclass(frozen=True)
class CpuTarget:
    """A CPU, as far as kernels are compiled for it."""

    isa: CpuIsa

    def __str__(self) -> str:
        return f"cpu ({self.isa})"


@dataclass(frozen=True)
class AmdTarget:
    """An AMD Instinct GPU."""

    arch: str
    device_index: int

    def __str__(self) -> str:
        return f"{self.arch} (device {self.device_index})"


Target = CpuTarget | AmdTarget


@lru_cache(maxsize=64)
def target_of(device: torch.device) -> Target:
    """The target that tensors on ``device`` run on.

    Raises ``ValueError`` for a device that is neither the CPU nor a supported AMD Instinct GPU.
    """
    if device.type == "cpu":
        return CpuTarget(_cpu_isa())
    supported = "; ".join(f"{arch} ({chips})" for arch, chips in SUPPORTED_CHIPS.items())
    if device.type != "cuda":
        raise ValueError(
            f"device {device} is not supported; use cpu tensors or an AMD Instinct GPU: {supported}"
        )
    if torch.version.hip is None:
        found = (
            f"torch {torch.__version__} has no GPU support"
            if torch.version.cuda is None
            else f"device {device} is an NVIDIA GPU, which is not supported"
        )
        raise ValueError(f"{found}; use cpu tensors or an AMD Instinct GPU: {supported}")
    index = torch.cuda.current_device() if device.index is None else device.index
    gcn_arch_name: str = torch.cuda.get_device_properties(index).gcnArchName
    arch = gcn_arch_name.partition(":")[0]
    if arch not in SUPPORTED_CHIPS:
        raise ValueError(f"device {device} is a {arch}; supported are {supported}")
    return AmdTarget(arch, index)


def _cpu_isa() -> CpuIsa:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon"
    # torch asks cpuinfo, which also knows whether the operating system saves the registers.
    if torch.cpu._is_avx512_supported():
        return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else "generic"
