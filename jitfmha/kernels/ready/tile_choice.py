"""The policy's choice of a tile, remembered for calls of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from ...amd.manifest import KernelRow
from ...planning.target import AmdTarget
from ...problem.problem import Problem
from ..estimate import forward_estimate
from .key_split import ONE_SPLIT, Splits
from .policy import STEP_K, STEP_Q, Candidate, Load, quickest, ready_seconds, steps

_MOST_CHOSEN = 4096


class Tile(NamedTuple):
    """The chosen kernel, and the splits of its keys.

    Attributes:
        row: of the manifest.
        splits: for sequences of the length that the choice was made for.
        splits_of: gm1, where keys may be split at all: for the longest sequence of a call.
    """

    row: KernelRow
    splits: Splits
    splits_of: Callable[[int], Splits] | None


class TileChoice:
    """Chooses among the kernels that differ in their tiles only, for calls of one kind.

    What was chosen is remembered for as many steps of queries and keys.

    Attributes:
        rows: the kernels.
    """

    def __init__(
        self, rows: Sequence[KernelRow], problem: Problem, target: AmdTarget, num_splits: int = 0
    ) -> None:
        """Choose among ``rows``; keys go into ``num_splits`` parts, or with 0 as many as pay."""
        self.rows = tuple(rows)
        self._num_splits = num_splits
        self._is_group = problem.mode == "gm1"
        self._load = Load(
            arch=target.arch,
            compute_units=target.compute_units,
            sequences=problem.batch * problem.heads_q,
            packs=problem.packs,
            is_masked=not problem.mask.is_none,
            is_top_left=problem.mask.top_left,
        )
        self._lengths_of_step = STEP_Q * self._load.packs, STEP_K * self._load.packs
        by_size = sorted(rows, key=lambda row: -row.ts_qo)
        self._candidates = [Candidate.of(row, self._load) for row in by_size]
        self._estimates = {
            row: forward_estimate(
                problem, target, "aiter" if row.abi == "aiter" else "ready", row, slices=1
            )
            for row in by_size
        }
        self._chosen: dict[tuple[int, int], Tile] = {}

    def tile_for(self, seqlen_q: int, seqlen_k: int) -> Tile:
        """The kernel that takes least time; of equal ones that with the largest tile.

        The lengths are those of every sequence, or in gm1 the packed rows of all.
        """
        step_q, step_k = self._lengths_of_step
        # One for all lengths that have as many steps.
        key = (seqlen_q - 1) // step_q, (seqlen_k - 1) // step_k
        tile = self._chosen.get(key)
        if tile is None:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            tile = self._chosen[key] = self._choose(seqlen_q, seqlen_k)
        return tile

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float:
        """What the chosen kernel is estimated to take, with the lengths of :meth:`tile_for`."""
        row = self.tile_for(seqlen_q, seqlen_k).row
        packs = self._load.packs
        candidate = next(x for x in self._candidates if x.row is row)
        of_sequence = -(-seqlen_q // packs), -(-seqlen_k // packs)
        return ready_seconds(self._estimates[row], candidate, *of_sequence, self._num_splits)

    def _choose(self, seqlen_q: int, seqlen_k: int) -> Tile:
        candidates, load = self._candidates, self._load
        seqlen_q = steps(seqlen_q, STEP_Q, load.packs) * STEP_Q
        seqlen_k = steps(seqlen_k, STEP_K, load.packs) * STEP_K
        chosen = candidates[quickest(candidates, load, seqlen_q, seqlen_k)]
        splits = self._splits(chosen, seqlen_q, seqlen_k)
        # In gm1 more rows make more tiles: where one tile for each sequence is enough, all are.
        may_split = self._is_group and self._splits(chosen, 1, seqlen_k).num_splits > 1
        if not may_split:
            return Tile(chosen.row, splits, None)
        # Asked in every call, mostly for the length of the call before.
        splits_of = lru_cache(maxsize=64)(partial(self._splits, chosen, seqlen_k=seqlen_k))
        return Tile(chosen.row, splits, splits_of)

    def _splits(self, candidate: Candidate, seqlen_q: int, seqlen_k: int) -> Splits:
        if self._num_splits == 0:
            return candidate.splits(seqlen_q, seqlen_k)
        if self._num_splits == 1:
            return ONE_SPLIT
        floats = candidate.key_split.workspace_floats(seqlen_q, self._num_splits)
        return Splits(self._num_splits, floats)
