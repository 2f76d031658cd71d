"""What decides about calls of few rows: the rows of a workgroup, and the splits of their keys.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...amd.chips import Arch
from ..ready.combine_estimate import combine_many_seconds
from ..ready.key_split import MOST_SPLITS, ONE_SPLIT, KeySplit, Splits

BLOCK_ROWS = 16
DECODE_WAVES = 4
_MOST_QUERIES = 16
_MOST_ROWS = 128
# Of rows. A wave has all of them, and what it makes of them, in its registers.
MOST_BLOCKS, _MOST_WIDE_BLOCKS, WIDE_HDIM = 4, 2, 128
_UNDIVIDED_BLOCKS = 2  # with as many, keys take longer to come than to be attended to
# What a compute unit draws from HBM at most while others are idle, in bytes a second, by the cost
# model: mostly 57e9 to 108e9 on gfx942 and 74e9 to 143e9 on gfx950; what leaves some to spare is
# counted. Of wide rows that are in no pages it is 69e9 and 106e9 at least, and where so many units
# are enough no keys are split.
# Of 8-bit numbers, which become others, less: from 32e9 and 50e9 on. Of integers in wide pages from
# 40e9 on and 57e9, of fp8 beside fp16 28e9 and 46e9; of narrow integers 33e9 and 48e9, or in wide
# pages 28e9 and 40e9. Least where there is as much to do for few bytes, or each key is looked up:
# with two blocks of narrow rows from 18.5e9 on, and 27.7e9. Wide rows draw 1.32 times as much and
# more, and one block 1.33 times; fp8 beside fp16 0.86 times and more.
_MOST_OF_UNIT = 65e9
# With several blocks of rows, for which gfx942 computes longer than their keys take to come.
_MOST_OF_BLOCKS: dict[Arch, float] = {"gfx942": 40e9, "gfx950": 65e9}
_MOST_OF_WIDE_ROWS: dict[Arch, float] = {"gfx942": 65e9, "gfx950": 100e9}
_MOST_OF_8_BIT_UNIT: dict[Arch, float] = {"gfx942": 40e9, "gfx950": 60e9}
_MOST_OF_INTEGERS_IN_PAGES: dict[Arch, float] = {"gfx942": 40e9, "gfx950": 57e9}
_MOST_OF_NARROW_INTEGERS: dict[Arch, float] = {"gfx942": 33e9, "gfx950": 48e9}
_MOST_OF_SLOW_UNIT: dict[Arch, float] = {"gfx942": 18e9, "gfx950": 27e9}
_WIDE_OVER_SLOW, _ONE_BLOCK_OVER_SLOW, _FP8_BESIDE_FP16_OVER_SLOW = 1.3, 1.3, 0.85
# Of workgroups of eight waves, which do more for it.
_MOST_OF_EIGHT_WAVES: dict[Arch, float] = {"gfx942": 36e9, "gfx950": 56e9}
_NARROW_HDIM = 64
# Where eight waves gain by how wide rows are, too, of fp8 or int8 beside wider queries.
_GAINS_BY_WIDTH: dict[Arch, bool] = {"gfx942": False, "gfx950": True}
MOST_WAVES = 8
_LOADED_TOGETHER = 8  # numbers of a row
_LEAST_OF_UNITS = 0.4  # where fewer have a workgroup, its keys have to be split in any case
# Fewer key tiles for a split would leave each wave of a workgroup less than two.
_LEAST_STREAMED_TILES = 8
_MOST_ROUNDS = 3  # of workgroups that the GPU runs at a time
# More splits than are enough, among which some leave all waves as many tiles.
_MORE = 8
# Of what HBM takes for a tile that waves take, by the cost model, which some waves have and others
# not: mostly these bring their last tiles meanwhile. Of 8 to 32 of 128 and 256 tiles 0.08 to 0.12.
_OF_UNEVEN_TILES = 0.1
# The splits that waves of the decode kernels combine at once, of narrow rows (kMostAtOnce in
# csrc_templates/amd/decode_fwd.hip.in).
_COMBINED_AT_ONCE = 64
# As many leading bits of a number of key tiles decide about splits.
_LEADING = 1 << 4
_MOST_BITS = 31


def most_blocks(widest: int) -> int:
    """How many blocks of 16 rows a workgroup has at most."""
    return MOST_BLOCKS if widest <= WIDE_HDIM else _MOST_WIDE_BLOCKS


def decode_blocks(queries: int, rows_of_query: int, widest: int, have_units_idle: bool) -> int:
    """How many blocks of 16 rows a workgroup has; 0 where the rows are too many.

    Where units would be idle, two workgroups have half of more than 32 rows each: less to compute
    for each key, and the second one finds the keys of the first in the L2 cache that they share.
    """
    rows = queries * rows_of_query
    if queries > _MOST_QUERIES or rows > _MOST_ROWS:
        return 0
    most = most_blocks(widest)
    blocks = 1
    for _ in range(MOST_BLOCKS):
        if rows > blocks * BLOCK_ROWS and blocks < most:
            blocks *= 2
    is_one = rows <= blocks * BLOCK_ROWS
    return blocks // 2 if blocks > _UNDIVIDED_BLOCKS and is_one and have_units_idle else blocks


class StreamedKeys(NamedTuple):
    """What calls of few rows read.

    Attributes:
        number_bytes: of a key's, and a value's, number.
        are_fp8, are_integers: what these are, where they have 8 bits.
        is_fp16: whether queries are.
        page_rows: keys of a page; 0 where they are in none.
    """

    number_bytes: int
    are_fp8: bool
    are_integers: bool
    is_fp16: bool
    hdim_q: int
    hdim_v: int
    page_rows: int
    has_packed_pages: bool

    def waves(
        self, arch: Arch, is_fp8: bool, blocks: int, workgroups: int, compute_units: int
    ) -> int:
        """How many waves a workgroup with so many blocks of rows has.

        Of 8-bit numbers four waves mostly attend to less than HBM brings to a unit. Where there are
        about half as many workgroups as units, each has eight: that takes less than to split the
        keys. More rows, or wider ones, have no registers for that. ``is_fp8`` is of queries.
        """
        has_idle_units = workgroups <= compute_units
        are_many = workgroups >= _LEAST_OF_UNITS * compute_units
        if not (self.have_eight_waves(blocks) and has_idle_units and are_many):
            return DECODE_WAVES
        return MOST_WAVES if self.gain_by_eight_waves(arch, is_fp8) else DECODE_WAVES

    def have_eight_waves(self, blocks: int) -> bool:
        """Whether there are such kernels."""
        is_even_q = self.hdim_q // _LOADED_TOGETHER * _LOADED_TOGETHER == self.hdim_q
        is_even_v = self.hdim_v // _LOADED_TOGETHER * _LOADED_TOGETHER == self.hdim_v
        is_held = blocks == 1 and self.number_bytes == 1
        return is_held and max(self.hdim_q, self.hdim_v) <= WIDE_HDIM and is_even_q and is_even_v

    def gain_by_eight_waves(self, arch: Arch, is_fp8: bool) -> bool:
        """Whether eight waves take less than two splits: by the cost model, as keys lie.

        In no pages, in wide ones, or scattered, where they have a place each.
        """
        is_narrow = max(self.hdim_q, self.hdim_v) <= _NARROW_HDIM
        are_whole = self.page_rows // BLOCK_ROWS * BLOCK_ROWS == self.page_rows
        is_scattered = self.has_packed_pages or not are_whole
        if _GAINS_BY_WIDTH[arch] and not is_fp8:
            return is_narrow if self.page_rows == 0 else not (is_scattered and is_narrow)
        return is_scattered or (self.page_rows > 0 and is_narrow)

    def most_of_unit(self, arch: Arch, ts_kv: int, waves: int, blocks: int) -> float:
        """What a compute unit draws at most of them, where it has so many blocks of rows."""
        if self.number_bytes > 1:
            return _MOST_OF_UNIT if blocks == 1 else _MOST_OF_BLOCKS[arch]
        if waves > DECODE_WAVES:
            return _MOST_OF_EIGHT_WAVES[arch]
        # Those of fp8 become others in fewer instructions than integers, but for fp16.
        is_quick = self.are_fp8 and not self.is_fp16
        is_narrow = max(self.hdim_q, self.hdim_v) <= _NARROW_HDIM
        is_paged = self.page_rows > 0
        # A tile lies in one page or two, unless these are small.
        half_tile = ts_kv // 2
        looks_up_keys = self.page_rows // half_tile * half_tile != self.page_rows
        slow = _MOST_OF_SLOW_UNIT[arch]
        if blocks == 1:
            slow *= _ONE_BLOCK_OVER_SLOW
        if self.are_fp8 and self.is_fp16:
            slow *= _FP8_BESIDE_FP16_OVER_SLOW
        if self.has_packed_pages or looks_up_keys:
            return slow if is_narrow else slow * _WIDE_OVER_SLOW
        if is_narrow and self.are_integers and not is_paged:
            return _MOST_OF_NARROW_INTEGERS[arch]
        if is_narrow and (is_paged or not is_quick):
            return slow
        if is_paged and not is_quick:
            return _MOST_OF_INTEGERS_IN_PAGES[arch]
        return _MOST_OF_8_BIT_UNIT[arch]


@dataclass(frozen=True)
class StreamedSplits:
    """The splits of calls that memory bounds, of one kernel.

    Attributes:
        rows_of_query: query heads that are rows of the same tiles.
        waves: of a workgroup, which have its tiles of keys in turn.
        tile_bytes: of a tile of keys and its values.
        streamed: bytes a second that HBM gives the GPU.
        enough: workgroups without which HBM is idle.
        enough_unsplit: the same where keys are not split.
    """

    key_split: KeySplit
    rows_of_query: int
    waves: int
    tile_bytes: int
    streamed: float
    enough: float
    enough_unsplit: float

    @classmethod
    def of(
        cls,
        key_split: KeySplit,
        keys: StreamedKeys,
        rows_of_query: int,
        arch: Arch,
        ts_kv: int,
        waves: int,
        streamed: float,
    ) -> StreamedSplits:
        """Take what decides from a kernel's split, and what its calls read."""
        tile_bytes = ts_kv * (keys.hdim_q + keys.hdim_v) * keys.number_bytes
        most = keys.most_of_unit(arch, ts_kv, waves, key_split.ts_qo // BLOCK_ROWS)
        is_wide = min(keys.hdim_q, keys.hdim_v) >= WIDE_HDIM and keys.page_rows == 0
        most_unsplit = _MOST_OF_WIDE_ROWS[arch] if is_wide and keys.number_bytes > 1 else most
        enough_unsplit = streamed / most_unsplit
        return cls(
            key_split,
            rows_of_query,
            waves,
            tile_bytes,
            streamed,
            streamed / most,
            enough_unsplit,
        )

    def splits(self, seqlen_q: int, tiles: int) -> Splits:
        """Choose the number with which the last workgroup ends first, and its part is combined."""
        split = self.key_split
        workgroups = split.sequences * self.row_tiles(seqlen_q)
        counted = rounded_tiles(tiles)
        if workgroups == 0:
            return ONE_SPLIT
        enough = -(-int(self.enough * self.row_tiles(seqlen_q)) // workgroups)
        most_of_any = min(max(_MOST_ROUNDS * split.slots // workgroups, enough), MOST_SPLITS)
        most = min(counted // _LEAST_STREAMED_TILES, most_of_any)
        if most < 2:
            return ONE_SPLIT
        num_splits = 1
        least = self.seconds(seqlen_q, counted, 1)
        for i in range(1 + _MOST_ROUNDS + _MORE):
            count = _COMBINED_AT_ONCE
            if i > _MOST_ROUNDS:
                count = enough + i - _MOST_ROUNDS - 1
            elif i > 0:
                count = max(i * split.slots // workgroups, 1)
            count = min(count, most)
            seconds = self.seconds(seqlen_q, counted, count)
            if seconds < least:
                num_splits = count
                least = seconds
        if num_splits == 1:
            return ONE_SPLIT
        rows = seqlen_q * self.rows_of_query
        # The workspace is that of any length: a step of decode allocates what others do.
        return Splits(num_splits, split.workspace_floats(rows, most_of_any))

    def row_tiles(self, seqlen_q: int) -> int:
        """Tiles of a sequence's rows, which read the same: HBM gives one of them a share."""
        return -(-seqlen_q * self.rows_of_query // self.key_split.ts_qo)

    def seconds(self, seqlen_q: int, tiles: int, num_splits: int) -> float:
        """What a call takes whose keys are split so."""
        split = self.key_split
        row_tiles = self.row_tiles(seqlen_q)
        count = split.sequences * row_tiles * num_splits
        rounds = count // split.slots
        rest = count - rounds * split.slots
        least = (self.enough if num_splits > 1 else self.enough_unsplit) * row_tiles
        busy = rounds * split.slots + (max(rest, least) if rest > 0 else 0)
        seconds_of_tile = split.sequences * self.tile_bytes / self.streamed
        of_split = -(-tiles // num_splits)
        of_wave = -(-of_split // self.waves)
        uneven = of_wave * self.waves * num_splits - tiles
        streamed = seconds_of_tile * (tiles * busy / count + uneven * _OF_UNEVEN_TILES)
        return streamed + self.combine_seconds(seqlen_q, num_splits)

    def combine_seconds(self, seqlen_q: int, num_splits: int) -> float:
        """What it takes to combine them."""
        rows = seqlen_q * self.rows_of_query
        return combine_many_seconds(self.key_split, rows, num_splits, _COMBINED_AT_ONCE)


def rounded_tiles(tiles: int) -> int:
    """As many for a while, so that a decode loop finds its splits: rounded up in leading bits."""
    step = 1
    for _ in range(_MOST_BITS):
        if tiles >= step * _LEADING:
            step *= 2
    return -(-tiles // step) * step
