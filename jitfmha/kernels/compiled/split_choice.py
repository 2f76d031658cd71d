"""Into how many splits the keys of a compiled kernel's calls go."""

from __future__ import annotations

from functools import lru_cache

from ...amd.manifest import KernelRow
from ...planning.target import AmdTarget
from ...problem.problem import Problem
from ..ready.combine_estimate import combine_seconds
from ..ready.key_split import ONE_SPLIT, KeySplit, Splits


class SplitChoice:
    """The splits of calls that differ in lengths only: as many as are asked for, else as pay."""

    def __init__(
        self, problem: Problem, target: AmdTarget, row: KernelRow, slices: int, columns: int
    ) -> None:
        """Prepare for a kernel whose output is made in ``slices`` of ``columns`` each."""
        self._asked_for = problem.num_splits
        self._leaves_parts = problem.has_split_results
        self._mask = problem.mask
        self._sink_size = problem.modifiers.sink_size
        self._rows_of_query = problem.gqa if row.stacks_heads else 1
        self._queries_of_tile = -(-row.ts_qo // self._rows_of_query)
        self._ts_kv = row.ts_kv
        sequences = problem.batch * problem.heads_q // self._rows_of_query * slices
        of_slice = row._replace(hdim_v=columns)
        self._split = KeySplit.of(of_slice, sequences, target.compute_units, target.arch)
        # Asked in every call of gm1, mostly for the lengths of the call before.
        self.splits = lru_cache(maxsize=64)(self._splits)

    def combine_seconds(self, seqlen_q: int, num_splits: int) -> float:
        """What it takes to combine them, for sequences of up to ``seqlen_q`` queries."""
        return combine_seconds(self._split, seqlen_q * self._rows_of_query, num_splits)

    def _splits(self, seqlen_q: int, seqlen_k: int) -> Splits:
        """Choose for sequences of up to ``seqlen_q`` queries and about ``seqlen_k`` keys."""
        rows = seqlen_q * self._rows_of_query
        if self._asked_for == 1 and not self._leaves_parts:
            return ONE_SPLIT
        if self._asked_for:
            return Splits(self._asked_for, self._split.workspace_floats(rows, self._asked_for))
        keys = self._visible_keys(seqlen_q, seqlen_k)
        return self._split.splits(rows, -(-keys // self._ts_kv))

    def _visible_keys(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many keys the queries of a tile see at most."""
        left, right = self._mask.left, self._mask.right
        if left is None or right is None:
            return seqlen_k
        seen = self._sink_size + left + right + min(seqlen_q, self._queries_of_tile)
        return min(seqlen_k, seen)
