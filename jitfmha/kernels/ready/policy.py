"""Which kernel serves a call best on a chip, and into how many splits its keys go.

A workgroup takes a tile of queries. A large one reads keys and values less often; small ones waste
less where sequences end or a causal mask cuts, and fill the last round of a launch better. How that
adds up depends on the chip's number of units, so that an MI308 chooses other tiles than an MI300.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows: numbers, plain structs, and functions of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ...amd.chips import Arch
from ...amd.manifest import KernelDtype, KernelRow
from ..launch_estimate import ForwardEstimate
from .combine_estimate import combine_seconds
from .key_split import ONE_SPLIT, KeySplit, Splits

_LARGE_TILE = 256
# With so many queries tiles are many, and large ones are best.
_LONG_SEQUENCE = 4096
# Of a wave of a backward kernel.
_WAVE_KEYS = 32
# Lengths count in these steps, so that a loop whose lengths grow seldom has to choose anew. They
# divide all tiles.
STEP_Q = 128
STEP_K = 32


class SmallTiles(NamedTuple):
    """What tiles of 128 queries take over one of 256 with as many keys, by the cost model.

    Attributes:
        pair: two side by side on a unit.
        alone: one that has a unit for itself.
    """

    pair: float
    alone: float


_SMALL_TILES: dict[Arch, SmallTiles] = {
    "gfx942": SmallTiles(pair=1.11, alone=0.83),
    "gfx950": SmallTiles(pair=1.25, alone=0.97),
}


class Wanted(NamedTuple):
    """What a call asks a row of a manifest for; numbers are those of the manifest."""

    dtype: KernelDtype
    hdim_q: int
    hdim_v: int
    mask: int
    mode: int
    bf16_cvt: int


def mask_column(is_masked: bool, is_top_left: bool, seqlen_q: int, seqlen_k: int) -> int:
    """The manifest's number for a mask: where both corners are one, bottom-right serves both."""
    if not is_masked:
        return 0
    return 1 if is_top_left and seqlen_q != seqlen_k else 2


def row_serves(row: KernelRow, wanted: Wanted, has_roundings: bool) -> bool:
    """Whether a row is for the call; of those that are, the tile decides.

    Args:
        has_roundings: whether there is a kernel for each way from float32 to bf16.
    """
    return (
        row.dtype == wanted.dtype
        and row.hdim_q == wanted.hdim_q
        and row.hdim_v == wanted.hdim_v
        and row.mask == wanted.mask
        and row.mode == wanted.mode
        and (row.bf16_cvt == wanted.bf16_cvt or not has_roundings)
    )


class Load(NamedTuple):
    """What calls of one kind load a GPU with, but for their lengths.

    Attributes:
        compute_units: of the GPU.
        sequences: batch times query heads.
        packs: sequences that lie in a pack, 1 at least; 1 for calls without packs. The lengths of
            packed sequences are on the GPU: they count as equally long.
    """

    arch: Arch
    compute_units: int
    sequences: int
    packs: int
    is_masked: bool
    is_top_left: bool


def steps(length: int, step: int, packs: int) -> int:
    """A length, or in a pack that of all sequences, in whole steps of a sequence."""
    return -(-length // (step * packs))


def fills_gpu(lines: int, seqlen_k: int, keys: int, compute_units: int) -> bool:
    """Whether workgroups with ``keys`` keys each are one for every compute unit at least.

    Backward kernels with many keys take less for each, as long as there are that many workgroups.

    Args:
        lines: key heads of all sequences; of packed ones, which lie in one line, key heads.
        seqlen_k: of packed sequences all keys.
    """
    return lines * -(-seqlen_k // keys) >= compute_units


def integers_for_turns(keys: int, batch: int, heads_k: int, seqlen_k: int, is_packed: bool) -> int:
    """How many integers deterministic backward kernels count in: ``Turns`` in ``backward.h``.

    A line of workgroups counts those that have begun, and each wave what it has added. Of packed
    sequences, whose lengths are on the GPU, each may have a workgroup more than its keys fill.

    Args:
        keys: of a workgroup.
        seqlen_k: of packed sequences all keys.
    """
    workgroups = seqlen_k // keys + batch if is_packed else batch * -(-seqlen_k // keys)
    return heads_k * (batch + workgroups * (keys // _WAVE_KEYS))


@dataclass(frozen=True)
class Candidate:
    """A kernel that serves calls of one kind, and how it would split their keys."""

    row: KernelRow
    key_split: KeySplit

    @classmethod
    def of(cls, row: KernelRow, load: Load) -> Candidate:
        """Time a row's kernel for calls that load a GPU so."""
        key_split = KeySplit.of(row, load.sequences, load.compute_units, load.arch)
        return cls(row, key_split)

    def splits(self, seqlen_q: int, seqlen_k: int) -> Splits:
        """The splits of the keys of a call.

        ``seqlen_k`` is in whole steps. ``seqlen_q`` is, too, but for packed sequences: it is that
        of the longest one.
        """
        if not self.row.can_split_keys:
            return ONE_SPLIT
        return self.key_split.splits(seqlen_q, -(-seqlen_k // self.row.ts_kv))


def quickest(candidates: Sequence[Candidate], load: Load, seqlen_q: int, seqlen_k: int) -> int:
    """The index of the kernel that takes least time; of equal ones the first.

    ``candidates`` differ in their tiles only, and the largest is the first. The lengths are those
    of a sequence, in whole steps.
    """
    best = 0
    least = inf
    if seqlen_q < _LONG_SEQUENCE:
        for i in range(len(candidates)):
            time = _relative_time(candidates[i], load, seqlen_q, seqlen_k)
            if time < least:
                least = time
                best = i
    return best


def _relative_time(candidate: Candidate, load: Load, seqlen_q: int, seqlen_k: int) -> float:
    """How long a launch takes, in keys that a unit goes through for one large tile."""
    row = candidate.row
    tiles = -(-seqlen_q // row.ts_qo)
    if tiles == 0 or not row.can_split_keys:
        return 0.0
    num_splits = candidate.splits(seqlen_q, seqlen_k).num_splits
    slots = candidate.key_split.slots
    workgroups = load.sequences * num_splits * tiles
    # Without a mask all tiles go through all keys.
    time = -(-workgroups // slots) * seqlen_k / num_splits
    if load.is_masked:
        longest = 0
        keys = 0
        for tile in range(tiles):
            of_tile = _keys_of_tile(row, load, tile, seqlen_q, seqlen_k)
            longest = max(longest, of_tile)
            keys += of_tile
        # The longest go first, so that all units end at about the same time.
        time = max(longest / num_splits, load.sequences * keys / slots)
    if row.ts_qo >= _LARGE_TILE:
        return time
    small = _SMALL_TILES[load.arch]
    are_alone = workgroups <= load.compute_units
    return time * (small.alone if are_alone else small.pair)


def _keys_of_tile(row: KernelRow, load: Load, tile: int, seqlen_q: int, seqlen_k: int) -> int:
    """The keys that a tile of one sequence and head goes through under the mask."""
    beyond = 0 if load.is_top_left else seqlen_k - seqlen_q
    return min(max(min((tile + 1) * row.ts_qo, seqlen_q) + beyond, 0), seqlen_k)


def ready_seconds(
    estimate: ForwardEstimate, candidate: Candidate, seqlen_q: int, seqlen_k: int, given: int
) -> float:
    """What calls take whose sequences have so many queries and keys on average.

    Their keys go into ``given`` parts, or with 0 as many as pay for the longest sequences.
    """
    of_steps = -(-seqlen_k // STEP_K) * STEP_K
    seconds = 0.0
    for lengths in estimate.call.lengths:
        longest = round(lengths.queries[0] * seqlen_q)
        num_splits = given
        if given == 0:
            num_splits = candidate.splits(longest, of_steps).num_splits
        seconds += estimate.seconds_of(lengths, seqlen_q, seqlen_k, num_splits)
        seconds += combine_seconds(candidate.key_split, longest, num_splits)
    return seconds / len(estimate.call.lengths)
