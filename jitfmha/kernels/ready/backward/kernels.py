"""The kernels of a code object for backward passes, as the launcher knows them."""

from __future__ import annotations

from ....amd.manifest import KernelRow, ReadyBackwardRow
from ....problem.problem import Problem
from ...compiled.backward_launch import BackwardKernel
from ..policy import integers_for_turns

# What the kernels before and after that of the gradients have nothing to do with.
_NOT_SUMMED = frozenset({"q", "k", "v", "dq", "dk", "dv"})
_NOT_ROUNDED = frozenset({"q", "k", "v", "out", "lse", "dout", "dlse", "dk", "dv"})


def kernels_of(row: ReadyBackwardRow) -> tuple[BackwardKernel, ...]:
    """The kernels of a code object, in the order of their launches."""
    row_sums = _launched_row(row, row.row_sums_symbol, row.edge_threads)
    gradients = _launched_row(row, row.symbol, row.threads)
    round_dq = _launched_row(row, row.round_dq_symbol, row.edge_threads)
    return (
        BackwardKernel(row_sums, "q", row.queries, leaves_alone=_NOT_SUMMED),
        BackwardKernel(gradients, "k", row.keys),
        BackwardKernel(round_dq, "q", row.queries, leaves_alone=_NOT_ROUNDED),
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
