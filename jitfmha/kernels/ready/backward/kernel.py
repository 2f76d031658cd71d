"""The loaded kernels of a code object for backward passes, for calls of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....amd.manifest import KernelRow
from ....planning.plan import Launch
from ....planning.target import AmdTarget
from ....problem.problem import PlainSizes, Problem
from ...compiled.backward_launch import BackwardKernel, BoundBackward
from ...rules import reasons_of
from ..policy import integers_for_turns
from .choice import chosen_row
from .limits import RULES

if TYPE_CHECKING:
    from ....amd.code_object import CodeObject
    from ....amd.manifest import ReadyBackwardRow
    from ....amd.tree import Tree


# What the kernels before and after that of the gradients have nothing to do with.
_NOT_SUMMED = frozenset({"q", "k", "v", "dq", "dk", "dv"})
_NOT_ROUNDED = frozenset({"q", "k", "v", "out", "lse", "dout", "dlse", "dk", "dv"})


class ReadyBackwardKernel:
    """Loaded kernels, for calls that differ in lengths and strides only."""

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        tree: Tree,
        row: ReadyBackwardRow,
        code_object: CodeObject,
    ) -> None:
        """Build and load the launcher and the kernels, as far as that has not been done.

        Raises:
            HipError: the HIP runtime cannot be used, or refuses the code object.
            jitfmha.BuildError: the launcher does not compile.
        """
        self._problem = problem
        self._target = target
        self._tree = tree
        self._row = row
        self._bound = BoundBackward(
            *(problem, target, "ready", kernels_of(row), code_object),
            adds_dq_up=True,
            turns_of=(lambda problem: turns_of(row, problem)) if row.is_deterministic else None,
        )

    def launch_for(self, sizes: PlainSizes) -> Launch | None:
        """The launch, unless another kernel is the one for these lengths and strides."""
        problem = self._problem.with_sizes(sizes)
        if any(reasons_of(RULES, problem, self._target.arch)):
            return None
        if chosen_row(self._tree, problem, self._target) != self._row:
            return None
        return self._bound.launch_for(sizes)


def kernels_of(row: ReadyBackwardRow) -> tuple[BackwardKernel, ...]:
    """The kernels of a code object, in the order of their launches."""
    row_sums = _launched_row(row, row.row_sums_symbol, row.edge_threads)
    gradients = _launched_row(row, row.symbol, row.threads)
    round_dq = _launched_row(row, row.round_dq_symbol, row.edge_threads)
    return (
        BackwardKernel(row_sums, "q", row.queries, _NOT_SUMMED),
        BackwardKernel(gradients, "k", row.keys),
        BackwardKernel(round_dq, "q", row.queries, _NOT_ROUNDED),
    )


def turns_of(row: ReadyBackwardRow, problem: Problem) -> int:
    """How many integers deterministic kernels count in."""
    is_packed = problem.mode == "gm1"
    return integers_for_turns(row.keys, problem.batch, problem.heads_k, problem.seqlen_k, is_packed)


def _launched_row(row: ReadyBackwardRow, symbol: str, threads: int) -> KernelRow:
    """One of the kernels as a row of a manifest, as the launcher knows kernels."""
    return KernelRow(
        dtype="bf16" if row.dtype == "bf16" else "fp16",
        hdim_q=row.hdim_q,
        hdim_v=row.hdim_v,
        mask=2 if row.is_masked else 0,
        mode=row.mode,
        bf16_cvt=row.bf16_cvt,
        ts_qo=row.queries,
        ts_kv=row.keys,
        symbol=symbol,
        file=row.file,
        abi="jitfmha",
        threads=threads,
        grid="heads_batches_tiles_splits" if row.mode else "xcd_heads_tiles_splits",
    )
