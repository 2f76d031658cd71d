"""Which row of the manifest serves a backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....amd.chips import Arch
from ....planning.target import AmdTarget
from ....problem.problem import Problem
from ..policy import fills_gpu

if TYPE_CHECKING:
    from ....amd.manifest import ReadyBackwardRow
    from ....amd.tree import Tree


def chosen_row(tree: Tree, problem: Problem, target: AmdTarget) -> ReadyBackwardRow | None:
    """The row with the most keys of a workgroup of those that fill the GPU, or else the fewest."""
    chosen = None
    lines = problem.heads_k * (1 if problem.mode == "gm1" else problem.batch)
    for row in tree.ready_backward.rows:
        if _serves(row, problem, target.arch):
            chosen = row
            if fills_gpu(lines, problem.seqlen_k, row.keys, target.compute_units):
                break
    return chosen


def _serves(row: ReadyBackwardRow, problem: Problem, arch: Arch) -> bool:
    return (
        row.dtype == problem.dtype
        and (row.hdim_q, row.hdim_v) == (problem.hdim_q, problem.hdim_v)
        and row.is_masked == (not problem.mask.is_none)
        and row.mode == int(problem.mode == "gm1")
        and row.is_deterministic == problem.is_deterministic
        and row.rounds(problem.bf16_cvt, arch)
    )
