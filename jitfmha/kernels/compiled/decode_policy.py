"""What decides about calls of few rows: the rows of a workgroup, and the splits of their keys.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...amd.chips import Arch
from ..ready.combine_estimate import combine_fours_seconds
from ..ready.key_split import MOST_SPLITS, ONE_SPLIT, KeySplit, Splits

BLOCK_ROWS = 16
DECODE_WAVES = 4
_MOST_QUERIES = 16
_MOST_ROWS = 128
# Of rows. A wave has all of them, and what it makes of them, in its registers.
MOST_BLOCKS, _MOST_WIDE_BLOCKS, WIDE_HDIM = 4, 2, 128
_UNDIVIDED_BLOCKS = 2  # with as many, keys take longer to come than to be attended to
# What a workgroup takes for a key, of any data type, by the cost model: most up to 15 % less.
_KEY_SECONDS: dict[Arch, float] = {"gfx942": 0.9e-9, "gfx950": 0.75e-9}
_KEY_SECONDS_OF_BLOCK: dict[Arch, float] = {"gfx942": 1.03e-9, "gfx950": 0.45e-9}
_NUMBER_SECONDS: dict[Arch, float] = {"gfx942": 8.5e-12, "gfx950": 4.9e-12}
_NUMBER_SECONDS_OF_BLOCK: dict[Arch, float] = {"gfx942": 5.5e-12, "gfx950": 4.3e-12}
# More of fp8 that becomes fp16, and of pages.
_FP16_SECONDS: dict[Arch, float] = {"gfx942": 9e-12, "gfx950": 4e-12}
_LOOK_UP_SECONDS, _IN_PAGES = 0.6e-9, 1.12
# From asking HBM for a tile until it is there, and what a unit draws at most.
SECONDS_ON_THE_WAY: dict[Arch, float] = {"gfx942": 0.72e-6, "gfx950": 0.62e-6}
_MOST_OF_UNIT = 105e9
# Tiles on their way (kTilesAhead in csrc_templates/amd/decode_fwd.hip.in).
_AHEAD, _AHEAD_OF_EIGHT_WAVES, _WHOLE = 512, 256, 64
_NARROW_HDIM = 64
# Where eight waves gain by how wide rows are, too, of fp8 or int8 beside wider queries.
_GAINS_BY_WIDTH: dict[Arch, bool] = {"gfx942": False, "gfx950": True}
MOST_WAVES = 8
_LOADED_TOGETHER = 8  # numbers of a row
_LEAST_OF_UNITS = 0.4  # where fewer have a workgroup, its keys have to be split in any case
# Fewer key tiles for a split would leave each wave of a workgroup less than two.
_LEAST_STREAMED_TILES = 8
_MOST_ROUNDS = 3  # of workgroups that the GPU runs at a time
SPLIT_STEPS, WORTH_SPLITTING = 16, 0.99
# Of what HBM takes for a tile that waves take, by the cost model, which some waves have and others
# not: mostly these bring their last tiles meanwhile. Of 8 to 32 of 128 and 256 tiles 0.08 to 0.12.
_OF_UNEVEN_TILES = 0.1
# The splits that each wave of these kernels combines at once (kMostAtOnce in
# csrc_templates/amd/combine_fours.h), and the waves of a unit that have registers for them.
_COMBINED_AT_ONCE, _COMBINING_WAVES = 16, 8
COMBINED_COLUMNS = 32  # of a workgroup
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
        are_fp8: what these are, where they have 8 bits.
        is_fp16: whether queries are.
        page_rows: keys of a page; 0 where they are in none.
    """

    number_bytes: int
    are_fp8: bool
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
        is_held = blocks == 1 and self.number_bytes == 1
        return is_held and max(self.hdim_q, self.hdim_v) <= WIDE_HDIM and self.has_even_rows()

    def has_even_rows(self) -> bool:
        of_both = self.hdim_q // _LOADED_TOGETHER + self.hdim_v // _LOADED_TOGETHER
        return of_both * _LOADED_TOGETHER == self.hdim_q + self.hdim_v

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

    def bytes_ahead(self, ts_kv: int, waves: int, blocks: int) -> int:
        row = -(-self.hdim_q * self.number_bytes // _WHOLE) * _WHOLE
        row += -(-self.hdim_v // _WHOLE) * _WHOLE * self.number_bytes
        has_room = self.has_even_rows() and (self.number_bytes > 1 or blocks < MOST_BLOCKS)
        most = _AHEAD if waves == DECODE_WAVES else _AHEAD_OF_EIGHT_WAVES
        tiles = max(most // row, 1) if has_room else 1
        return waves * tiles * ts_kv * self.row_bytes()

    def row_bytes(self) -> int:
        return (self.hdim_q + self.hdim_v) * self.number_bytes

    def computed_of_unit(self, arch: Arch, ts_kv: int, blocks: int) -> float:
        of_number = _NUMBER_SECONDS[arch] + _NUMBER_SECONDS_OF_BLOCK[arch] * blocks
        if self.are_fp8 and self.is_fp16:
            of_number += _FP16_SECONDS[arch]
        seconds = _KEY_SECONDS[arch] + _KEY_SECONDS_OF_BLOCK[arch] * blocks
        seconds += of_number * (self.hdim_q + self.hdim_v)
        # A tile lies in one page or two, unless these are small.
        half_tile = ts_kv // 2
        if self.page_rows // half_tile * half_tile != self.page_rows:
            seconds += _LOOK_UP_SECONDS
        return self.row_bytes() / seconds / self.slowness()

    def drawn_of_unit(self, arch: Arch, ts_kv: int, waves: int, blocks: int) -> float:
        comes = self.bytes_ahead(ts_kv, waves, blocks) / SECONDS_ON_THE_WAY[arch]
        return min(comes, _MOST_OF_UNIT) / self.slowness()

    def slowness(self) -> float:
        return _IN_PAGES if self.page_rows > 0 else 1.0


@dataclass(frozen=True)
class StreamedSplits:
    """The splits of calls that memory bounds, of one kernel.

    Attributes:
        rows_of_query: query heads that are rows of the same tiles.
        waves: of a workgroup, which have its tiles of keys in turn.
        units: compute units.
        tile_bytes: of a tile of keys and its values.
        bytes_ahead: those on their way to a workgroup.
        computed: bytes a second that a unit attends to.
        drawn: those that come to it at most.
        streamed: those that HBM gives the GPU.
        on_the_way: seconds from asking for results until they are there.
    """

    key_split: KeySplit
    rows_of_query: int
    waves: int
    units: int
    tile_bytes: int
    bytes_ahead: int
    computed: float
    drawn: float
    streamed: float
    on_the_way: float

    @classmethod
    def of(
        cls,
        key_split: KeySplit,
        keys: StreamedKeys,
        rows_of_query: int,
        arch: Arch,
        ts_kv: int,
        waves: int,
        units: int,
        streamed: float,
    ) -> StreamedSplits:
        """Take what decides from a kernel's split, and what its calls read."""
        blocks = key_split.ts_qo // BLOCK_ROWS
        return cls(
            key_split,
            rows_of_query,
            waves,
            units,
            ts_kv * keys.row_bytes(),
            keys.bytes_ahead(ts_kv, waves, blocks),
            keys.computed_of_unit(arch, ts_kv, blocks),
            keys.drawn_of_unit(arch, ts_kv, waves, blocks),
            streamed,
            SECONDS_ON_THE_WAY[arch],
        )

    def splits(self, seqlen_q: int, tiles: int) -> Splits:
        """Choose the number with which the last workgroup ends first, and its part is combined."""
        split = self.key_split
        workgroups = split.sequences * self.row_tiles(seqlen_q)
        counted = rounded_tiles(tiles)
        if workgroups == 0:
            return ONE_SPLIT
        most_of_any = min(_MOST_ROUNDS * split.slots // workgroups, MOST_SPLITS)
        most = min(counted // _LEAST_STREAMED_TILES, most_of_any)
        if most < 2:
            return ONE_SPLIT
        num_splits = 1
        least = WORTH_SPLITTING * self.seconds(seqlen_q, counted, 1)
        for i in range(SPLIT_STEPS + 1 + _MOST_ROUNDS):
            count = _COMBINED_AT_ONCE * self.waves
            if i < SPLIT_STEPS:
                count = (i + 1) * self.units // (SPLIT_STEPS * workgroups)
            elif i > SPLIT_STEPS:
                count = (i - SPLIT_STEPS) * split.slots // workgroups
            # No more than leave the busiest wave as many tiles.
            of_waves = self.tiles_of_wave(counted, min(max(count, 1), most)) * self.waves
            count = -(-counted // of_waves)
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
        rounds = (count - 1) // split.slots
        last = count - rounds * split.slots
        of_waves = self.tiles_of_wave(tiles, num_splits) * self.waves
        uneven = of_waves * num_splits - tiles
        tiles_read = (tiles + uneven * _OF_UNEVEN_TILES) / num_splits / row_tiles
        seconds = self.combine_seconds(seqlen_q, num_splits)
        seconds += rounds * self.round_seconds(split.slots, row_tiles, tiles_read, of_waves)
        return seconds + self.round_seconds(last, row_tiles, tiles_read, of_waves)

    def round_seconds(
        self, workgroups: int, row_tiles: int, tiles_read: float, of_waves: int
    ) -> float:
        """What workgroups take that run together, each of which HBM gives so many tiles."""
        # Nothing hides what workgroups ask for at first.
        seconds = workgroups * tiles_read * self.tile_bytes / self.streamed
        begun = min(workgroups / row_tiles * self.bytes_ahead / self.streamed, seconds)
        computed = of_waves * self.tile_bytes / self.computed * -(-workgroups // self.units)
        drawn = of_waves * self.tile_bytes / self.drawn
        return max(seconds, max(begun + computed, drawn))

    def tiles_of_wave(self, tiles: int, num_splits: int) -> int:
        return -(-tiles // (num_splits * self.waves))

    def combine_seconds(self, seqlen_q: int, num_splits: int) -> float:
        """What it takes to combine them."""
        rows = seqlen_q * self.rows_of_query
        at_once = _COMBINED_AT_ONCE * self.waves
        slots = self.units * (_COMBINING_WAVES // self.waves)
        return combine_fours_seconds(
            self.key_split, rows, num_splits, COMBINED_COLUMNS, at_once, slots, self.on_the_way
        )


def rounded_tiles(tiles: int) -> int:
    """As many for a while, so that a decode loop finds its splits: rounded up in leading bits."""
    step = 1
    for _ in range(_MOST_BITS):
        if tiles >= step * _LEADING:
            step *= 2
    return -(-tiles // step) * step
