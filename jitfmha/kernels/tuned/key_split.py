"""How keys are split among workgroups where query tiles alone would leave compute units idle."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...amd.manifest import KernelRow

# Fewer key tiles for a split would cost more in reading and writing results than they save.
_LEAST_KEY_TILES = 4
# A compute unit has 8 waves of these kernels at a time: two workgroups of four, or one of eight.
_THREADS_OF_UNIT = 512


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
    """

    sequences: int
    ts_qo: int
    slots: int
    hdim_v: int

    @classmethod
    def of(cls, row: KernelRow, sequences: int, compute_units: int) -> KeySplit:
        """For a kernel on a GPU."""
        slots = compute_units * (_THREADS_OF_UNIT // row.threads)
        return cls(sequences, row.ts_qo, slots, row.hdim_v)

    def num_splits(self, seqlen_q: int, key_tiles: int) -> int:
        """For sequences of up to ``seqlen_q`` queries; 1: keys are not split.

        ``key_tiles`` are those of the longest sequence, or in gm1 of one of average length.
        """
        workgroups = self.sequences * -(-seqlen_q // self.ts_qo)
        if workgroups == 0:
            return 1
        # Each split more makes splits shorter but takes `combine` longer, which merges them one
        # after another: by the cost model about as long as half a tile of keys.
        quickest = isqrt(2 * key_tiles)
        most = min(quickest, key_tiles // _LEAST_KEY_TILES)
        return max(1, min(self.slots // workgroups, most))

    def splits(self, seqlen_q: int, key_tiles: int) -> Splits:
        """:meth:`num_splits` and what they leave."""
        num_splits = self.num_splits(seqlen_q, key_tiles)
        if num_splits == 1:
            return ONE_SPLIT
        return Splits(num_splits, self.workspace_floats(seqlen_q, num_splits))

    def workspace_floats(self, seqlen_q: int, num_splits: int) -> int:
        """The size of what splits leave: for each query the output, its maximum and its sum.

        A wave of 64 lanes has 32 queries: the last two are there twice.
        """
        waves = self.ts_qo // 32
        tiles = self.sequences * -(-seqlen_q // self.ts_qo)
        return tiles * num_splits * waves * 64 * (self.hdim_v // 2 + 2)


@dataclass(frozen=True)
class GroupSplits:
    """The splits of gm1 calls, which follow from the longest sequence of each."""

    split: KeySplit
    key_tiles: int

    def __call__(self, max_seqlen_q: int) -> Splits:
        """For sequences of up to ``max_seqlen_q`` queries."""
        return self.split.splits(max_seqlen_q, self.key_tiles)
