"""The AMD Instinct GPUs of this machine, as torch and the HIP runtime tell of them."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from ..amd.chips import Arch, Chip, architecture, chip_of_device, chips, is_arch, supported_chips
from ..amd.runtime import HipRuntime, loaded_runtime
from ..amd.tree import trees_of
from .target import AmdTarget


def target_of_gpu(device: torch.device) -> AmdTarget:
    """The target that tensors on ``device`` run on; a GPU is asked once in a process.

    Raises ``ValueError`` for a device that is no supported AMD Instinct GPU.
    """
    if device.type != "cuda":
        raise ValueError(
            f"device {device} is not supported; use cpu tensors or an AMD Instinct GPU: "
            f"{supported_chips()}"
        )
    if torch.version.hip is None:
        found = (
            f"device {device} needs GPU support, which torch {torch.__version__} has not"
            if torch.version.cuda is None
            else f"device {device} is an NVIDIA GPU, which is not supported"
        )
        raise ValueError(f"{found}; use cpu tensors or an AMD Instinct GPU: {supported_chips()}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _gpu_targets:
        _gpu_targets[index] = _gpu_target(index)
    return _gpu_targets[index]


# GPUs do not change while a process runs.
_gpu_targets: dict[int, AmdTarget] = {}


def _gpu_target(index: int) -> AmdTarget:
    """What torch and the HIP runtime tell of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    # As in "gfx942:sramecc+:xnack-".
    arch = properties.gcnArchName.partition(":")[0]
    if not is_arch(arch):
        raise ValueError(f"device cuda:{index} is a {arch}; supported are {supported_chips()}")
    runtime = loaded_runtime()
    chip = _chip(runtime, arch, index, properties.name)
    return AmdTarget(chip, index, properties.multi_processor_count, runtime, trees_of(chip))


def _chip(runtime: HipRuntime, arch: Arch, index: int, name: str) -> Chip:
    """The chip that a GPU is; its PCI id is asked for only where kernels depend on it."""
    if not architecture(arch).kernel_folders:
        named = (x for x in chips() if x.architecture.name == arch and x.name in name)
        return next(named, chip_of_device(arch, None))
    pci_id = runtime.pci_chip_id(index)
    chip = chip_of_device(arch, pci_id)
    if pci_id is None:
        _warn_of_assumed_chip(arch, chip)
    return chip


@cache
def _warn_of_assumed_chip(arch: Arch, chip: Chip) -> None:
    """Warn, once in a process, that the chip is a guess."""
    warnings.warn(
        f"jitfmha: neither the HIP runtime nor the system tells the PCI id of a {arch}; it runs "
        f"the kernels for the {chip}",
        RuntimeWarning,
        stacklevel=2,
    )
