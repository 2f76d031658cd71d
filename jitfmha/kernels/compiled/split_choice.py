"""Into how many splits the keys of a compiled kernel's calls go."""

from __future__ import annotations

from functools import lru_cache

from ...amd.manifest import KernelRow
from ...planning.target import AmdTarget
from ...problem.problem import Problem
from ..estimate import machine_of
from ..ready.combine_estimate import combine_seconds
from ..ready.key_split import ONE_SPLIT, KeySplit, Splits
from .decode import streamed_keys
from .decode_policy import StreamedSplits
from .tile_table import WAVE


class SplitChoice:
    """The splits of calls that differ in lengths only: as many as are asked for, else as pay."""

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        row: KernelRow,
        slices: int,
        columns: int,
        *,
        streams: bool = False,
    ) -> None:
        """Prepare for a kernel whose output is made in ``slices`` of ``columns`` each.

        Of a kernel that ``streams``, memory bounds the calls, and else what its units compute.
        """
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
        self._streamed: StreamedSplits | None = None
        if streams:
            keys, waves = streamed_keys(problem), row.threads // WAVE
            speed = machine_of(target).bytes_per_second
            of_kernel = self._split, keys, self._rows_of_query, target.arch, row.ts_kv, waves
            self._streamed = StreamedSplits.of(*of_kernel, speed)
            # Lengths of a decode loop have as many tiles for a while.
            self._streamed_splits = lru_cache(maxsize=64)(self._streamed.splits)
        # Asked in every call of gm1, mostly for the lengths of the call before.
        self.splits = lru_cache(maxsize=64)(self._splits)

    def combine_seconds(self, seqlen_q: int, num_splits: int) -> float:
        """What it takes to combine them, for sequences of up to ``seqlen_q`` queries."""
        if self._streamed is not None:
            return self._streamed.combine_seconds(seqlen_q, num_splits)
        return combine_seconds(self._split, seqlen_q * self._rows_of_query, num_splits)

    def _splits(self, seqlen_q: int, seqlen_k: int) -> Splits:
        """Choose for sequences of up to ``seqlen_q`` queries and about ``seqlen_k`` keys.

        More splits than there are tiles of keys would only leave empty results to be combined, but
        a caller who wants each split's results gets as many as were asked for.
        """
        rows = seqlen_q * self._rows_of_query
        tiles = -(-self._visible_keys(seqlen_q, seqlen_k) // self._ts_kv)
        if self._asked_for:
            most = self._asked_for if self._leaves_parts else max(tiles, 1)
            num_splits = min(self._asked_for, most)
            if num_splits == 1 and not self._leaves_parts:
                return ONE_SPLIT
            return Splits(num_splits, self._split.workspace_floats(rows, num_splits))
        if self._streamed is None:
            return self._split.splits(rows, tiles)
        return self._streamed_splits(seqlen_q, tiles)

    def _visible_keys(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many keys the queries of a tile see at most."""
        left, right = self._mask.left, self._mask.right
        if left is None or right is None:
            return seqlen_k
        seen = self._sink_size + left + right + min(seqlen_q, self._queries_of_tile)
        return min(seqlen_k, seen)
