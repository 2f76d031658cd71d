"""Which of several tile sizes serves a problem best on a chip.

A workgroup takes a tile of queries. A large one reads keys and values less often; small ones waste
less where sequences end or a causal mask cuts, and fill the last round of a launch better. How that
adds up depends on the chip's number of units, so that an MI308 chooses other tiles than an MI300.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from ...amd.launcher import key_split_of, threads_of
from ...amd.manifest import KernelRow, Tree
from ...problem import Problem
from ...target import AmdTarget, Arch

_LARGE_TILE = 256
# With so many queries tiles are many, and large ones are best.
_LONG_SEQUENCE = 4096


@dataclass(frozen=True)
class _SmallTiles:
    """What tiles of 128 queries take over one of 256 with as many keys, by the cost model."""

    pair: float  # two side by side on a unit
    alone: float


_SMALL_TILES: dict[Arch, _SmallTiles] = {
    "gfx942": _SmallTiles(pair=1.11, alone=0.83),
    "gfx950": _SmallTiles(pair=1.25, alone=0.97),
}


def best_tile(
    rows: Sequence[KernelRow], problem: Problem, target: AmdTarget, tree: Tree
) -> KernelRow:
    """The row with the least :func:`relative_time`; of equal ones that with the largest tile.

    The lengths of gm1's sequences are on the GPU: they count as equally long.
    """
    largest_first = sorted(rows, key=lambda row: -row.ts_qo)
    seqlen_q, _ = _lengths(problem)
    if len(rows) == 1 or seqlen_q >= _LONG_SEQUENCE:
        return largest_first[0]
    return min(largest_first, key=lambda row: relative_time(row, problem, target, tree))


def relative_time(row: KernelRow, problem: Problem, target: AmdTarget, tree: Tree) -> float:
    """How long a launch takes, in keys that a unit goes through for one large tile."""
    split = key_split_of(problem, target, row, threads_of(tree, row))
    seqlen_q, seqlen_k = _lengths(problem)
    parts = split.parts(seqlen_q)
    keys = [key / parts for key in _keys_of_tiles(row.ts_qo, problem, seqlen_q, seqlen_k)]
    if not keys:
        return 0.0
    of_each_tile = problem.batch * problem.heads_q * parts
    if problem.mask.is_none:
        time = ceil(of_each_tile * len(keys) / split.slots) * keys[0]
    else:
        # The longest go first, so that all units end at about the same time.
        time = max(max(keys), of_each_tile * sum(keys) / split.slots)
    if row.ts_qo >= _LARGE_TILE:
        return time
    small = _SMALL_TILES[target.arch]
    are_alone = of_each_tile * len(keys) <= target.compute_units
    return time * (small.alone if are_alone else small.pair)


def _lengths(problem: Problem) -> tuple[int, int]:
    if problem.mode == "gm0":
        return problem.seqlen_q, problem.seqlen_k
    sequences = max(problem.batch, 1)
    return -(-problem.seqlen_q // sequences), -(-problem.seqlen_k // sequences)


def _keys_of_tiles(ts_qo: int, problem: Problem, seqlen_q: int, seqlen_k: int) -> list[float]:
    """The keys that each tile of one sequence and head goes through."""
    tiles = -(-seqlen_q // ts_qo)
    if problem.mask.is_none:
        return [float(seqlen_k)] * tiles
    beyond = 0 if problem.mask.top_left else seqlen_k - seqlen_q
    ends = (min((tile + 1) * ts_qo, seqlen_q) + beyond for tile in range(tiles))
    return [float(min(max(end, 0), seqlen_k)) for end in ends]
