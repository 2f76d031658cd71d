"""Which calls persistent workgroups serve, and what their lists of work have room for and count.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...amd.kernel_arguments import ROW_BLOCK, SHARE_BEGIN
from ..launch_estimate import CYCLES_OF_LISTED, WAVE_ROWS, KernelCycles
from ..ready.key_split import LAUNCH_GAP_SECONDS, MOST_SPLITS, Splits

# As many as the kernel that lists the work has room for in LDS: kMostSequences and kMostBlocks.
_MOST_LISTED_SEQUENCES, _MOST_LISTED_BLOCKS = 1024, 8192
# So many times the mean length in halves, as `halves_of_mean` has it, the longest one has.
_UNEVEN = 4
# Costs are counted in so many cycles: coarsely, since all of them have 32 bits.
_UNIT = 64
# What it takes to list the work, by the cost model 2.3 to 4.2 us. On any chip.
LISTING_SECONDS = LAUNCH_GAP_SECONDS + 3.5e-6
_SHARE_BYTES, _BLOCK_BYTES = SHARE_BEGIN.size, ROW_BLOCK.size


class ListedCall(NamedTuple):
    """What decides whether the work of a call is listed.

    Attributes:
        seqlen_q: of a sequence, or of all packed ones.
        queries, keys: how many times the mean length the longest sequence has, in halves; -1:
            nobody tells.
        tile_q: rows of a tile.
    """

    is_group: bool
    is_paged: bool
    is_masked: bool
    batch: int
    seqlen_q: int
    gqa: int
    queries: int
    keys: int
    tile_q: int

    def may_be_listed(self) -> bool:
        """Whether persistent workgroups serve such calls, and may be quicker.

        Where sequences may be uneven, or tiles of rows see more or less of the keys.
        """
        is_uneven = self.is_group and self.batch > 1 and self._may_be_uneven()
        may_gain = is_uneven or (self.is_masked and not self.is_paged)
        has_room = self.batch <= _MOST_LISTED_SEQUENCES
        return (
            may_gain
            and has_room
            and self.most_blocks(self.seqlen_q * self.gqa) <= _MOST_LISTED_BLOCKS
        )

    def _may_be_uneven(self) -> bool:
        """Whether sequences may differ much, by what the call tells of the longest ones."""
        if self.is_paged:  # whose keys nobody counts, and where nobody estimates
            return self.queries >= _UNEVEN
        is_decoding = self.queries < 0 and self.seqlen_q == self.batch
        has_uneven_queries = not is_decoding and (self.queries < 0 or self.queries >= _UNEVEN)
        return has_uneven_queries or self.keys < 0 or self.keys >= _UNEVEN

    def most_blocks(self, rows: int) -> int:
        """How many blocks a head has at most, of so many rows of a sequence, or of all packed."""
        of_rows = -(-rows // self.tile_q)
        return of_rows + self.batch if self.is_group else of_rows * self.batch

    def workspace(self, rows: int, workgroups: int, hdim_v: int) -> Splits:
        """The workspace of so many rows: the list, and parts of blocks behind it."""
        list_bytes = _SHARE_BYTES * (workgroups + 1) + _BLOCK_BYTES * self.most_blocks(rows)
        return Splits(1, list_bytes // 4 + floats_of_parts(workgroups, self.tile_q, hdim_v))


def listed_workgroups(workgroups_of_unit: int, compute_units: int) -> int:
    """As many as run at a time, and no more parts of a block than can be combined."""
    return min(workgroups_of_unit * compute_units, MOST_SPLITS)


def floats_of_parts(workgroups: int, tile_q: int, hdim_v: int) -> int:
    """How many float32 values workgroups leave of blocks that they share."""
    return 2 * workgroups * tile_q * (-(-hdim_v // 32) * 32 + 4)


class ListCosts(NamedTuple):
    """Of a block, of a key tile, and of each wave of these, as ``WORK_COSTS`` has them."""

    block: int
    wave: int
    key_tile: int
    wave_of_tile: int


def list_costs(
    cycles: Sequence[KernelCycles], workgroups_of_unit: int, tile_q: int, tile_k: int
) -> ListCosts:
    """What the work of kernels costs whose workgroups were measured to take so many ``cycles``."""
    few = cycles[0]
    every = cycles[len(cycles) - 1]
    shared = min(workgroups_of_unit, every.most_shared())
    once = few.once[shared - 1]
    # Kernels divide by what a tile takes, and add up numbers without a sign.
    of_wave = max((every.once[shared - 1] - once) / (tile_q // WAVE_ROWS - 1), 0.0)
    of_tile = few.of_row[shared - 1] * tile_k
    more_of_tile = every.of_row[shared - 1] * tile_k - of_tile
    wave_of_tile = max(more_of_tile / (tile_q // WAVE_ROWS - 1), 0.0)
    return ListCosts(
        max(round((once - of_wave + CYCLES_OF_LISTED) / _UNIT), 0),
        round(of_wave / _UNIT),
        max(round((of_tile - wave_of_tile) / _UNIT), 1),
        round(wave_of_tile / _UNIT),
    )
