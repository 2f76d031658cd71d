"""How keys are split among workgroups where query tiles alone would leave compute units idle.

Times are those of the emulator's cost model, in seconds; ``python -m jitfmha profile`` shows them.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from ...amd.chips import Arch
from ...amd.manifest import KernelRow

# Fewer key tiles for a split would cost more in reading and writing results than they save.
_LEAST_KEY_TILES = 4
# As many as the kernel `combine` reaches (kMostSplits in hsa/src/split_results.h).
MOST_SPLITS = 1024
# Multiplications and additions of a compute unit with eight waves, by the model, in a launch that
# leaves units idle, whose clock is high. The workgroups that share a unit share them.
_PRODUCTS_PER_SECOND: dict[Arch, float] = {"gfx942": 1.5e12, "gfx950": 3.1e12}
# The same of fp8 inputs, by the time of a launch over that of one with bf16 inputs: 0.54 and 0.60.
_FP8_PRODUCTS_PER_SECOND: dict[Arch, float] = {"gfx942": 2.8e12, "gfx950": 5.2e12}
# How many times as long a tile takes where splits keep the units busy, which slows the clock.
_BUSY_SLOWDOWN: dict[Arch, float] = {"gfx942": 1.4, "gfx950": 1.2}
# `combine` with two splits that leave little, and what each split more adds: it reads eight of them
# at once. Besides, every byte that splits leave takes its time to be written and read.
_COMBINE_SECONDS, _COMBINE_SECONDS_OF_SPLIT = 3e-6, 0.25e-6
_SECONDS_OF_BYTE: dict[Arch, float] = {"gfx942": 0.44e-12, "gfx950": 0.31e-12}
# From the end of a kernel to the beginning of the next one on its stream, which the model knows
# nothing of: the caches of all XCDs are written back, the next packet is read, and workgroups and
# instructions come in anew. Nobody has published it for these chips. For older ones 3.5 us a launch
# were seen where many follow one another (AMD's community forum, "HSA: Kernel dispatch latencies").
LAUNCH_GAP_SECONDS = 4e-6


class Splits(NamedTuple):
    """Into how many splits the keys go, and the float32 values that these leave."""

    num_splits: int
    workspace_floats: int


ONE_SPLIT = Splits(1, 0)


@dataclass(frozen=True)
class KeySplit:
    """The split of the keys of one kernel's calls.

    Attributes:
        sequences: batch times query heads.
        ts_qo: rows of q in a tile.
        slots: workgroups that the GPU runs at a time.
        hdim_v: columns of the output.
        tile_seconds: that a workgroup takes for a tile of keys where units are idle.
        busy_slowdown: how many times as long it takes where splits keep them busy.
        byte_seconds: that it takes to write and read a byte of what splits leave.
    """

    sequences: int
    ts_qo: int
    slots: int
    hdim_v: int
    tile_seconds: float
    busy_slowdown: float
    byte_seconds: float

    @classmethod
    def of(cls, row: KernelRow, sequences: int, compute_units: int, arch: Arch) -> KeySplit:
        """Take what decides from a kernel's row and a GPU's chip."""
        products = row.ts_qo * row.ts_kv * (row.hdim_q + row.hdim_v)
        is_fp8 = row.dtype == "fp8bf16"
        speed = _FP8_PRODUCTS_PER_SECOND[arch] if is_fp8 else _PRODUCTS_PER_SECOND[arch]
        tile_seconds = products * row.workgroups_of_unit / speed
        slots = compute_units * row.workgroups_of_unit
        slowdown = _BUSY_SLOWDOWN[arch]
        of_byte = _SECONDS_OF_BYTE[arch]
        return cls(sequences, row.ts_qo, slots, row.hdim_v, tile_seconds, slowdown, of_byte)

    def num_splits(self, seqlen_q: int, key_tiles: int) -> int:
        """Choose for sequences of up to ``seqlen_q`` queries; 1: keys are not split.

        ``key_tiles`` are those of the longest sequence, or in gm1 of one of average length.
        """
        workgroups = self.sequences * -(-seqlen_q // self.ts_qo)
        if workgroups == 0:
            return 1
        most = min(self.slots // workgroups, key_tiles // _LEAST_KEY_TILES, MOST_SPLITS)
        if most < 2:
            return 1
        # Each split more makes splits shorter, but takes longer to be combined.
        seconds = key_tiles * self.tile_seconds
        busy_seconds = seconds * self.busy_slowdown
        results_seconds = 4 * self.workspace_floats(seqlen_q, 1) * self.byte_seconds
        more_seconds = _COMBINE_SECONDS_OF_SPLIT + results_seconds
        # The best number is this one, or the next.
        num_splits = min(most, max(2, isqrt(int(busy_seconds / more_seconds))))
        next_seconds = busy_seconds / (num_splits * (num_splits + 1))  # that the next one saves
        if num_splits < most and next_seconds > more_seconds:
            num_splits += 1
        split_seconds = busy_seconds / num_splits + more_seconds * (num_splits - 2)
        once_seconds = LAUNCH_GAP_SECONDS + _COMBINE_SECONDS + 2 * results_seconds
        return num_splits if split_seconds + once_seconds < seconds else 1

    def splits(self, seqlen_q: int, key_tiles: int) -> Splits:
        """Return :meth:`num_splits` with the workspace that the parts need."""
        num_splits = self.num_splits(seqlen_q, key_tiles)
        if num_splits == 1:
            return ONE_SPLIT
        return Splits(num_splits, self.workspace_floats(seqlen_q, num_splits))

    def workspace_floats(self, seqlen_q: int, num_splits: int) -> int:
        """The size of what splits leave: for each query the output, its maximum and its sum.

        Two lanes have a query's columns, 16 of every 32: its maximum and sum are there twice.
        """
        return self.floats_of_rows(-(-seqlen_q // self.ts_qo) * self.ts_qo, num_splits)

    def floats_of_rows(self, rows: int, num_splits: int) -> int:
        """The same of so many rows of each sequence, without those that fill a tile."""
        return self.sequences * rows * num_splits * (-(-self.hdim_v // 32) * 32 + 4)
