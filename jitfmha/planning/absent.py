"""AMD Instinct GPUs that are not here: for planning and building, by the name of a chip."""

from __future__ import annotations

from typing import NoReturn

from ..amd.chips import Chip, chip, chips, is_arch, supported_chips
from ..amd.node import VIRTUAL_NODE
from ..amd.tree import trees_of
from .target import AmdTarget


class AbsentRuntime:
    """What stands for the HIP runtime of a GPU that is not here: nothing can be launched."""

    has_host_memory = False
    launching = None
    driver = None

    @property
    def library_path(self) -> str:
        _refuse()

    def describe_device(self, device_index: int) -> str:
        return "not here"

    def current_stream(self, device_index: int) -> NoReturn:
        _refuse()

    def scale_of_one(self, device_index: int) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    from ..amd.runtime import HipError  # of use where something goes wrong only

    raise HipError(-1, "the GPU was only named, to plan and build for it; nothing runs on it here")


def absent_target(name: str) -> AmdTarget | None:
    """The whole chip that ``name`` means; None where it means none.

    It may be an architecture, as "gfx942", which means the chip that :func:`jitfmha.emulate` takes
    for it; what else that function takes, as "gfx942-mi308"; or a chip, as "MI308X" or "mi308".

    Raises:
        ValueError: it begins the names of several chips, as "MI300", or nearly names an
            architecture, as "gfx90a".
    """
    found = _chip_called(name)
    if found is None:
        return None
    return AmdTarget(found, 0, found.compute_units, AbsentRuntime(), trees_of(found))


def _chip_called(name: str) -> Chip | None:
    if name in VIRTUAL_NODE:
        return chip(VIRTUAL_NODE[name])
    if name.startswith("gfx") and not is_arch(name):
        raise ValueError(f"device {name!r} is not supported; supported are {supported_chips()}")
    wanted = name.upper()
    meant = [each for each in chips() if wanted[:2] == "MI" and each.name.startswith(wanted)]
    exact = [each for each in meant if each.name == wanted]
    if len(exact or meant) > 1:
        choices = ", ".join(each.name for each in meant)
        raise ValueError(f"device {name!r} may be several chips; choose one of {choices}")
    return next(iter(exact or meant), None)
