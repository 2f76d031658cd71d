"""What is known to be wrong with published backward kernels, and which calls meet it.

The kernels are those of github.com/ROCm/aiter at e4048607a535. A fault is known by the kernel's
name, so that a tree in which it is repaired is served no worse than before: nobody can tell.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...planning.plan import Reason
from ...problem.problem import Problem

if TYPE_CHECKING:
    from ...amd.chips import Arch
    from ...amd.manifest import AiterBackwardRow

_TILE_KEYS = 256  # of the kernels for hdim 128 that were made for gfx950
_ZEROS_BEHIND_KEYS = re.compile(r"fmha_bwd_hd128_(bf16|fp16)_causal_br_a32_psskddv")
_UNORDERED_LDS = re.compile(r"fmha_bwd_hd128_(bf16|fp16)_causal(_br)?_a(16|32)_psskddv")
_UNAWAITED_LDS = re.compile(r"fmha_bwd_hd(64|128|192)_dq_convert_\w+")
_READS_BEHIND_ROWS = re.compile(r"fmha_bwd_hd128_\w+_swa_a32_\w*psskddv")


def reason_of_fault(row: AiterBackwardRow, problem: Problem, arch: Arch) -> Reason | None:
    """The fault of a kernel that this call can meet; None where there is none."""
    fault = _fault_on_gfx950(row, problem) if arch == "gfx950" else _fault_on_gfx942(row)
    return None if fault is None else Reason("{name} is passed over: " + fault, name=row.name)


def _fault_on_gfx950(row: AiterBackwardRow, problem: Problem) -> str | None:
    seqlen_k = problem.seqlen_k
    if problem.mode == "gm1" or seqlen_k <= _TILE_KEYS:
        return None
    if _ZEROS_BEHIND_KEYS.fullmatch(row.name) and seqlen_k % _TILE_KEYS:
        return (
            "with more than 256 keys that are no multiple of 256 it writes zeros behind the last "
            "row of dk and dv."
        )
    if _UNORDERED_LDS.fullmatch(row.name):
        return (
            "with more than 256 keys it clears LDS while other waves may still read it, so that dk "
            "may be wrong."
        )
    return None


def _fault_on_gfx942(row: AiterBackwardRow) -> str | None:
    if _UNAWAITED_LDS.fullmatch(row.name):
        return (
            "it stores what it reads from LDS without waiting for it. torch converts dq in its "
            "place."
        )
    return None


def reads_behind_rows(row: AiterBackwardRow, arch: Arch) -> bool:
    """Whether a kernel reads the lse and D of up to 15 rows that are not there."""
    return arch == "gfx942" and _READS_BEHIND_ROWS.fullmatch(row.name) is not None
