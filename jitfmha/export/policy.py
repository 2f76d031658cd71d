"""What decides about kernels and splits in C++."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import get_args

from ..amd import clock_speed
from ..amd.chips import Arch
from ..amd.manifest import GridAxes, KernelDtype, KernelRow
from ..kernels import launch_estimate, pass_estimate
from ..kernels.compiled import (
    decode_policy,
    latent_policy,
    list_policy,
    split_policy,
    turns_policy,
)
from ..kernels.ready import combine_estimate, key_split, policy
from ..planning import level
from ..problem import unevenness
from .translation import Translation, Vocabulary

_ROW = {
    "dtype": "KernelDtype",
    **dict.fromkeys(("hdim_q", "hdim_v", "mask", "mode", "bf16_cvt", "ts_qo", "ts_kv"), "int"),
    "workgroups_of_unit": "int",
    "can_split_keys": "bool",
    "grid": "GridAxes",
}
"""What the policy knows of a kernel."""


@cache
def policy_in_cpp() -> Translation:
    """Translate the modules that decide to C++."""
    enums = {
        "Arch": get_args(Arch),
        "KernelDtype": get_args(KernelDtype),
        "GridAxes": get_args(GridAxes),
    }
    vocabulary = Vocabulary(enums=enums, structs={"KernelRow": _ROW})
    of_compiled = decode_policy, latent_policy, split_policy, list_policy, turns_policy
    of_launches = clock_speed, launch_estimate
    of_ready = key_split, combine_estimate, pass_estimate, policy
    modules = *of_launches, *of_ready, *of_compiled, level, unevenness
    return Translation(modules, vocabulary)


def row_in_cpp(row: KernelRow) -> str:
    """A row of a manifest, as the policy knows it."""
    return policy_in_cpp().value("KernelRow", row)


def cycles_in_cpp(cycles: Sequence[launch_estimate.KernelCycles]) -> str:
    """What was measured of a kernel, as the policy knows it."""
    return policy_in_cpp().value("Sequence[KernelCycles]", cycles)


def clock_in_cpp(clock: clock_speed.ClockSpeed) -> str:
    """What limits the clock of a chip, as the policy knows it."""
    return policy_in_cpp().value("ClockSpeed", clock)


def part_in_cpp(part: pass_estimate.PartCycles) -> str:
    """What was measured of a kernel of a backward pass, as the policy knows it."""
    return policy_in_cpp().value("PartCycles", part)
