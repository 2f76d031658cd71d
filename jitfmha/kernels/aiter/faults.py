"""What is known to be wrong with published backward kernels, and which calls meet it.

The kernels are those of github.com/ROCm/aiter at e4048607a535. A fault is known by the kernel's
name, so that a tree in which it is repaired is served no worse than before: nobody can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...amd.chips import Arch
from ...amd.manifest import AiterBackwardRow
from ...planning.plan import Reason
from ...problem.problem import Problem

_TILE_KEYS = 256  # of the kernels for hdim 128 that were made for gfx950


class Fault(NamedTuple):
    """What is wrong with kernels of these names, and which calls meet it.

    ``sentence`` goes on from what is passed over.
    """

    arch: Arch
    names: re.Pattern[str]
    is_met_by: Callable[[Problem], bool]
    sentence: str


def _has_several_tiles(problem: Problem) -> bool:
    return problem.mode == "gm0" and problem.seqlen_k > _TILE_KEYS


_FAULTS = (
    Fault(
        "gfx950",
        re.compile(r"fmha_bwd_hd128_(bf16|fp16)_causal_br_a32_psskddv"),
        lambda problem: _has_several_tiles(problem) and problem.seqlen_k % _TILE_KEYS != 0,
        "with more than 256 keys that are no multiple of 256 it writes zeros behind the last row "
        "of dk and dv.",
    ),
    Fault(
        "gfx950",
        re.compile(r"fmha_bwd_hd128_(bf16|fp16)_causal(_br)?_a(16|32)_psskddv"),
        _has_several_tiles,
        "with more than 256 keys it clears LDS while other waves may still read it, so that dk may "
        "be wrong.",
    ),
    Fault(
        "gfx942",
        re.compile(r"fmha_bwd_hd(64|128|192)_dq_convert_\w+"),
        lambda problem: True,
        "it stores what it reads from LDS without waiting for it. torch converts dq in its place.",
    ),
)
# Those that read the lse and D of up to 15 rows that are not there.
_READ_BEHIND_ROWS: Mapping[Arch, re.Pattern[str]] = {
    "gfx942": re.compile(r"fmha_bwd_hd128_\w+_swa_a32_\w*psskddv")
}


def reason_of_fault(row: AiterBackwardRow, problem: Problem, arch: Arch) -> Reason | None:
    """The fault of a kernel that this call can meet; None where there is none."""
    for fault in _FAULTS:
        if fault.arch == arch and fault.names.fullmatch(row.name) and fault.is_met_by(problem):
            return Reason("{name} is passed over: " + fault.sentence, name=row.name)
    return None


def reads_behind_rows(row: AiterBackwardRow, arch: Arch) -> bool:
    """Whether a kernel reads the lse and D of up to 15 rows that are not there."""
    names = _READ_BEHIND_ROWS.get(arch)
    return names is not None and names.fullmatch(row.name) is not None
