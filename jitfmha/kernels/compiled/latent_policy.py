"""What decides about calls of latents: the rows of a workgroup, and the splits of their keys.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...amd.chips import Arch
from ...amd.kernel_arguments import FEW_SPLITS
from ..ready.combine_estimate import combine_fours_seconds
from ..ready.key_split import ONE_SPLIT, KeySplit, Splits
from .decode_policy import (
    BLOCK_ROWS,
    COMBINED_COLUMNS,
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
# The splits that a workgroup combines at once (kMostAtOnce in csrc_templates/amd/combine_fours.h,
# of each wave), and the workgroups of a unit that have registers for them.
_LATENTS_AT_ONCE, _COMBINING_WORKGROUPS = 32, 4
_FEW_SPLITS, _COLUMNS_OF_FEW = FEW_SPLITS, 128  # of a workgroup


@dataclass(frozen=True)
class StreamedLatents:
    """The splits of calls of latents, of one kernel, which HBM is busy with before all units are.

    Attributes:
        units: compute units.
        tile_bytes: of a tile of keys.
        tile_seconds: that a workgroup takes for it.
        streamed: bytes a second that HBM gives the GPU.
        on_the_way: seconds from asking for results until they are there.
    """

    key_split: KeySplit
    units: int
    tile_bytes: int
    tile_seconds: float
    streamed: float
    on_the_way: float

    @classmethod
    def of(
        cls,
        key_split: KeySplit,
        keys: StreamedKeys,
        arch: Arch,
        ts_kv: int,
        units: int,
        streamed: float,
    ) -> StreamedLatents:
        """Take what decides from a kernel's split, and what its calls read."""
        blocks = key_split.ts_qo // BLOCK_ROWS
        tile_seconds = _TILE_SECONDS_OF_FOUR[arch]
        if blocks == 1:
            tile_seconds = _TILE_SECONDS_OF_ONE[arch]
        if blocks == 2:
            tile_seconds = _TILE_SECONDS_OF_TWO[arch]
        tile_bytes = ts_kv * keys.hdim_q * keys.number_bytes
        on_the_way = SECONDS_ON_THE_WAY[arch]
        return cls(key_split, units, tile_bytes, tile_seconds, streamed, on_the_way)

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
        """What it takes to combine the splits of sequences of so many rows."""
        slots = self.units * _COMBINING_WORKGROUPS
        columns = _COLUMNS_OF_FEW if num_splits <= _FEW_SPLITS else COMBINED_COLUMNS
        return combine_fours_seconds(
            self.key_split, rows, num_splits, columns, _LATENTS_AT_ONCE, slots, self.on_the_way
        )


def latent_blocks(rows: int) -> int:
    """How many blocks of 16 rows a workgroup has."""
    blocks = 1
    for _ in range(MOST_LATENT_BLOCKS):
        if blocks < MOST_LATENT_BLOCKS and rows > blocks * BLOCK_ROWS:
            blocks *= 2
    return blocks
