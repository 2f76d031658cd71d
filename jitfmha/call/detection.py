"""Which target the tensors of a call run on: the CPU, an emulated GPU, or a real one."""

from __future__ import annotations

import os

import torch

from ..planning.target import TARGET_HERE, Target, cpu_target


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
            from ..emulator.session import target_of_environment

            return target_of_environment()
        return cpu_target()
    # Few machines have a GPU.
    from ..planning.devices import target_of_gpu

    return target_of_gpu(device)


def planned_target(device: str | torch.device) -> Target:
    """What ``device`` names, for planning and building: it need not be here.

    Args:
        device: of torch, or the name of an architecture or a chip that may be somewhere else, as
            "gfx950" or "MI308X".

    Raises:
        TypeError: it is something else.
        ValueError: it names nothing, or a device that is not supported.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a str or a torch.device, got {device!r}")
    if isinstance(device, str) and device[:3].lower() in ("gfx", "mi3"):
        # Few calls are planned for another machine.
        from ..planning.absent import absent_target

        target = absent_target(device)
        if target is not None:
            return target
    try:
        return target_of(torch.device(device))
    except RuntimeError as error:
        from ..amd.chips import supported_chips  # of use where something goes wrong only

        raise ValueError(
            f"device={device!r} is neither a device of torch nor one of {supported_chips()}"
        ) from error
