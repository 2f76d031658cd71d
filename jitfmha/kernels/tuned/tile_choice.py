"""Which of several tile sizes serves a call best on a chip, and into how many splits its keys go.

A workgroup takes a tile of queries. A large one reads keys and values less often; small ones waste
less where sequences end or a causal mask cuts, and fill the last round of a launch better. How that
adds up depends on the chip's number of units, so that an MI308 chooses other tiles than an MI300.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from .key_split import ONE_SPLIT, GroupSplits, KeySplit, Splits

if TYPE_CHECKING:
    from ...amd.manifest import KernelRow
    from ...chips import Arch
    from ...problem import Problem
    from ...target import AmdTarget

_LARGE_TILE = 256
# With so many queries tiles are many, and large ones are best.
_LONG_SEQUENCE = 4096
# Lengths count in these steps, so that a loop whose lengths grow seldom has to choose anew. They
# divide all tiles.
_STEP_Q, _STEP_K = 128, 32
_MOST_CHOSEN = 4096


@dataclass(frozen=True)
class _SmallTiles:
    """What tiles of 128 queries take over one of 256 with as many keys, by the cost model."""

    pair: float  # two side by side on a unit
    alone: float


_SMALL_TILES: dict[Arch, _SmallTiles] = {
    "gfx942": _SmallTiles(pair=1.11, alone=0.83),
    "gfx950": _SmallTiles(pair=1.25, alone=0.97),
}


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
    """

    def __init__(self, rows: Sequence[KernelRow], problem: Problem, target: AmdTarget) -> None:
        sequences = problem.batch * problem.heads_q
        self._rows = [
            (
                row,
                KeySplit.of(row, sequences, target.compute_units, target.arch)
                if row.combine_symbol
                else None,
            )
            for row in sorted(rows, key=lambda row: -row.ts_qo)
        ]
        self._sequences = sequences
        # The lengths of gm1's sequences are on the GPU: they count as equally long.
        self._is_group = problem.mode == "gm1"
        sequences_of_pack = max(problem.batch, 1) if self._is_group else 1
        self._step_q = _STEP_Q * sequences_of_pack
        self._step_k = _STEP_K * sequences_of_pack
        self._mask = problem.mask
        self._compute_units = target.compute_units
        self._small = _SMALL_TILES[target.arch]
        self._chosen: dict[tuple[int, int], Tile] = {}

    def tile_for(self, seqlen_q: int, seqlen_k: int) -> Tile:
        """The kernel that takes least time; of equal ones that with the largest tile.

        The lengths are those of every sequence, or in gm1 the packed rows of all.
        """
        steps = -(-seqlen_q // self._step_q), -(-seqlen_k // self._step_k)
        tile = self._chosen.get(steps)
        if tile is None:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            tile = self._chosen[steps] = self._choose(steps[0] * _STEP_Q, steps[1] * _STEP_K)
        return tile

    def _choose(self, seqlen_q: int, seqlen_k: int) -> Tile:
        tiles = [self._tile(row, split, seqlen_q, seqlen_k) for row, split in self._rows]
        if len(tiles) == 1 or seqlen_q >= _LONG_SEQUENCE:
            return tiles[0]
        splits = [split for _, split in self._rows]
        times = [
            self._relative_time(tile, split, seqlen_q, seqlen_k)
            for tile, split in zip(tiles, splits, strict=True)
        ]
        return tiles[times.index(min(times))]

    def _tile(self, row: KernelRow, split: KeySplit | None, seqlen_q: int, seqlen_k: int) -> Tile:
        if split is None:
            return Tile(row, ONE_SPLIT, None)
        key_tiles = -(-seqlen_k // row.ts_kv)
        splits = split.splits(seqlen_q, key_tiles)
        # In gm1 more rows make more tiles: where one tile for each sequence is enough, all are.
        may_split = self._is_group and split.num_splits(1, key_tiles) > 1
        if not may_split:
            return Tile(row, splits, None)
        # Asked in every call, mostly for the length of the call before.
        return Tile(row, splits, lru_cache(maxsize=64)(GroupSplits(split, key_tiles)))

    def _relative_time(
        self, tile: Tile, split: KeySplit | None, seqlen_q: int, seqlen_k: int
    ) -> float:
        """How long a launch takes, in keys that a unit goes through for one large tile."""
        row, (num_splits, _), _ = tile
        keys = [key / num_splits for key in self._keys_of_tiles(row.ts_qo, seqlen_q, seqlen_k)]
        if not keys or split is None:
            return 0.0
        of_each_tile = self._sequences * num_splits
        if self._mask.is_none:
            time = ceil(of_each_tile * len(keys) / split.slots) * keys[0]
        else:
            # The longest go first, so that all units end at about the same time.
            time = max(max(keys), of_each_tile * sum(keys) / split.slots)
        if row.ts_qo >= _LARGE_TILE:
            return time
        are_alone = of_each_tile * len(keys) <= self._compute_units
        return time * (self._small.alone if are_alone else self._small.pair)

    def _keys_of_tiles(self, ts_qo: int, seqlen_q: int, seqlen_k: int) -> list[float]:
        """The keys that each tile of one sequence and head goes through."""
        tiles = -(-seqlen_q // ts_qo)
        if self._mask.is_none:
            return [float(seqlen_k)] * tiles
        beyond = 0 if self._mask.top_left else seqlen_k - seqlen_q
        ends = (min((tile + 1) * ts_qo, seqlen_q) + beyond for tile in range(tiles))
        return [float(min(max(end, 0), seqlen_k)) for end in ends]
