"""What decides about calls of latents: the rows of a workgroup, and the splits of their keys.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...amd.chips import Arch
from ..ready.key_split import LAUNCH_GAP_SECONDS, ONE_SPLIT, KeySplit, Splits
from .decode_policy import (
    BLOCK_ROWS,
    SECONDS_ON_THE_WAY,
    SPLIT_STEPS,
    WORTH_SPLITTING,
    StreamedKeys,
)

MOST_LATENT_BLOCKS = 4
# What a workgroup takes for a tile of keys that it need not wait for, by its blocks of rows: by the
# cost model at the peak clock, of any data type.
_TILE_SECONDS_OF_ONE: dict[Arch, float] = {"gfx942": 0.98e-6, "gfx950": 0.67e-6}
_TILE_SECONDS_OF_TWO: dict[Arch, float] = {"gfx942": 1.11e-6, "gfx950": 0.85e-6}
_TILE_SECONDS_OF_FOUR: dict[Arch, float] = {"gfx942": 1.58e-6, "gfx950": 1.01e-6}
# As many times as many workgroups as would do read different keys, since some of them wait.
_SPARE = 1.2
# Of keys, before the first product (kAhead in csrc_templates/amd/latent_fwd.hip.in, and that one).
_TILES_BEGUN = 3
# How `combine` loads splits (csrc_templates/amd/combine_fours.h): of few a wave loads so many at
# once, and of more all waves together.
_FEW_SPLITS, _FEW_AT_ONCE, _MANY_AT_ONCE = 16, 4, 32


@dataclass(frozen=True)
class StreamedLatents:
    """The splits of calls of latents, of one kernel, which HBM is busy with before all units are.

    Attributes:
        tile_bytes: of a tile of keys.
        tile_seconds: that a workgroup takes for it.
        streamed: bytes a second that HBM gives the GPU.
        on_the_way: seconds from asking for results until they are there.
    """

    key_split: KeySplit
    tile_bytes: int
    tile_seconds: float
    streamed: float
    on_the_way: float

    @classmethod
    def of(
        cls, key_split: KeySplit, keys: StreamedKeys, arch: Arch, ts_kv: int, streamed: float
    ) -> StreamedLatents:
        """Take what decides from a kernel's split, and what its calls read."""
        blocks = key_split.ts_qo // BLOCK_ROWS
        tile_seconds = _TILE_SECONDS_OF_FOUR[arch]
        if blocks == 1:
            tile_seconds = _TILE_SECONDS_OF_ONE[arch]
        if blocks == 2:
            tile_seconds = _TILE_SECONDS_OF_TWO[arch]
        tile_bytes = ts_kv * keys.hdim_q * keys.number_bytes
        return cls(key_split, tile_bytes, tile_seconds, streamed, SECONDS_ON_THE_WAY[arch])

    def splits(self, rows: int, tiles: int) -> Splits:
        """Choose the number with which the last workgroup ends first, and its part is combined."""
        most = self.most_splits(rows)
        if most < 2 or tiles < 2:
            return ONE_SPLIT
        num_splits = 1
        least = self.seconds(rows, tiles, 1)
        for i in range(SPLIT_STEPS):
            count = max((i + 1) * most // SPLIT_STEPS, 1)
            # No more than leave the longest one as many tiles.
            count = -(-tiles // -(-tiles // count))
            seconds = self.seconds(rows, tiles, count)
            if seconds < WORTH_SPLITTING * least:
                num_splits = count
                least = seconds
        if num_splits == 1:
            return ONE_SPLIT
        # The workspace is that of any length: a step of decode allocates what others do.
        return Splits(num_splits, self.key_split.workspace_floats(rows, most))

    def most_splits(self, rows: int) -> int:
        """No more than keep HBM busy: others would leave more to be combined for nothing."""
        split = self.key_split
        workgroups = split.sequences * self.row_tiles(rows)
        if workgroups == 0:
            return 1
        streams = _SPARE * self.streamed * self.tile_seconds / self.tile_bytes / split.sequences
        return min(ceil(streams), split.slots // workgroups)

    def row_tiles(self, rows: int) -> int:
        """Tiles of a sequence's rows, which read the same keys."""
        return -(-rows // self.key_split.ts_qo)

    def seconds(self, rows: int, tiles: int, num_splits: int) -> float:
        """What a call takes whose keys are split so."""
        split = self.key_split
        streams = split.sequences * num_splits
        # The clock falls as more units are busy.
        busy = min(streams * self.row_tiles(rows) / split.slots, 1.0)
        slowdown = 1 + (split.busy_slowdown - 1) * busy
        # Nothing hides what workgroups ask for at first.
        begun = streams * _TILES_BEGUN * self.tile_bytes / self.streamed
        computed = -(-tiles // num_splits) * self.tile_seconds * slowdown
        read = split.sequences * tiles * self.tile_bytes / self.streamed
        return max(read, begun + computed) + self.combine_seconds(rows, num_splits)

    def combine_seconds(self, rows: int, num_splits: int) -> float:
        """What it takes to combine the splits of sequences of so many rows.

        The kernel before writes what is read here, in half of a byte's seconds each. Arguments come
        before, and the output is stored behind it, which take as long as a round of loads.
        """
        if num_splits == 1:
            return 0.0
        written = 2 * self.key_split.floats_of_rows(rows, num_splits) * self.key_split.byte_seconds
        at_once = _FEW_AT_ONCE if num_splits <= _FEW_SPLITS else _MANY_AT_ONCE
        read = max(written, -(-num_splits // at_once) * self.on_the_way)
        return LAUNCH_GAP_SECONDS + written + 2 * self.on_the_way + read


def latent_blocks(rows: int) -> int:
    """How many blocks of 16 rows a workgroup has."""
    blocks = 1
    for _ in range(MOST_LATENT_BLOCKS):
        if blocks < MOST_LATENT_BLOCKS and rows > blocks * BLOCK_ROWS:
            blocks *= 2
    return blocks
