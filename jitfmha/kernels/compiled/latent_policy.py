"""What decides about calls of latents: the rows of a workgroup, and the splits of their keys.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...amd.chips import Arch
from ..ready.key_split import LAUNCH_GAP_SECONDS, ONE_SPLIT, KeySplit, Splits
from .decode_policy import BLOCK_ROWS, SECONDS_ON_THE_WAY

MOST_LATENT_BLOCKS = 4
# What a workgroup takes for a tile of keys that it need not wait for, by its blocks of rows: by the
# cost model at the peak clock, of any data type.
_TILE_SECONDS_OF_ONE: dict[Arch, float] = {"gfx942": 0.98e-6, "gfx950": 0.67e-6}
_TILE_SECONDS_OF_TWO: dict[Arch, float] = {"gfx942": 1.11e-6, "gfx950": 0.85e-6}
_TILE_SECONDS_OF_FOUR: dict[Arch, float] = {"gfx942": 1.58e-6, "gfx950": 1.01e-6}
# As many times as many workgroups as would do read different keys, since some of them wait.
_SPARE = 1.2
# How `combine` loads splits (csrc_templates/amd/combine_fours.h): of few a wave loads so many at
# once, and of more all waves together.
_FEW_SPLITS, _FEW_AT_ONCE, _MANY_AT_ONCE = 16, 4, 32


@dataclass(frozen=True)
class StreamedLatents:
    """What decides about the splits of latents, of one kernel.

    Attributes:
        on_the_way: seconds from asking for results until they are there.
    """

    key_split: KeySplit
    on_the_way: float

    @classmethod
    def of(cls, key_split: KeySplit, arch: Arch) -> StreamedLatents:
        """Take what decides from a kernel's split."""
        return cls(key_split, SECONDS_ON_THE_WAY[arch])

    def combine_seconds(self, rows: int, num_splits: int) -> float:
        """What it takes to combine the splits of sequences of so many rows.

        The kernel before writes what is read here. Arguments come before that, and the output is
        stored behind it, which take as long as a round of loads.
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


def most_streams(
    sequences: int, arch: Arch, blocks: int, tile_bytes: int, bytes_per_second: float
) -> int:
    """How many workgroups of a sequence HBM is busy with, or all of them together."""
    tile_seconds = _TILE_SECONDS_OF_FOUR[arch]
    if blocks == 1:
        tile_seconds = _TILE_SECONDS_OF_ONE[arch]
    if blocks == 2:
        tile_seconds = _TILE_SECONDS_OF_TWO[arch]
    streams = _SPARE * bytes_per_second * tile_seconds / tile_bytes / max(sequences, 1)
    whole = int(streams)
    return whole + 1 if streams > whole else whole


def limited_splits(split: KeySplit, splits: Splits, rows: int, streams: int) -> Splits:
    """No more of them than HBM is busy with: those would leave more to be combined for nothing."""
    if splits.num_splits == 1:
        return splits
    most = min(streams, split.slots // (split.sequences * -(-rows // split.ts_qo)))
    if most == 1:
        return ONE_SPLIT
    # The workspace is that of any length: a step of decode allocates what others do.
    return Splits(min(splits.num_splits, most), split.workspace_floats(rows, most))
