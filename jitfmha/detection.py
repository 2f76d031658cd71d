"""Which target the tensors of a call run on: the CPU, an emulated GPU, or a real one."""

from __future__ import annotations

import os

import torch

from .target import TARGET_HERE, Target, cpu_target


def target_of(device: torch.device) -> Target:
    """The target that tensors on ``device`` run on; a GPU is asked once in a process.

    Inside of ``jitfmha.emulate``, or with JITFMHA_EMULATE in the environment, CPU tensors run on
    an emulated GPU. Raises ``ValueError`` for a device that is neither the CPU nor a supported AMD
    Instinct GPU.
    """
    if device.type == "cpu":
        target = TARGET_HERE.get()
        if target is not None:
            return target
        if os.environ.get("JITFMHA_EMULATE"):
            # Few processes need the emulator.
            from .emulator.session import target_of_environment

            return target_of_environment()
        return cpu_target()
    # Few machines have a GPU.
    from .amd.devices import target_of_gpu

    return target_of_gpu(device)
