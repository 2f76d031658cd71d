"""Into how many splits the keys of a compiled kernel's calls go."""

from __future__ import annotations

from functools import lru_cache

from ...amd.chips import Arch
from ...amd.manifest import KernelRow
from ...planning.target import AmdTarget
from ...problem.dtypes import FP8_NAMES
from ...problem.problem import Problem, element_bytes
from ..estimate import Machine
from ..ready.combine_estimate import combine_seconds
from ..ready.key_split import MOST_SPLITS, ONE_SPLIT, KeySplit, Splits
from .decode import DECODE_WAVES
from .tile_table import WAVE

# What a compute unit draws from HBM at most while others are idle, in bytes a second, by the cost
# model: mostly 57e9 to 108e9 on gfx942 and 74e9 to 143e9 on gfx950; what leaves some to spare is
# counted. Of wide rows that are in no pages it is 69e9 and 106e9 at least, and where so many units
# are enough no keys are split.
# Of 8-bit numbers, which become others, less: from 32e9 and 50e9 on. Of integers in wide pages from
# 40e9 on and 57e9, of fp8 beside fp16 28e9 and 46e9; of narrow integers 33e9 and 48e9, or in wide
# pages 28e9 and 40e9. Least where there is as much to do for few bytes, or each key is looked up:
# 21e9 to 28e9, and 29e9 to 38e9.
_MOST_OF_UNIT = 65e9
_MOST_OF_WIDE_ROWS: dict[Arch, float] = {"gfx942": 65e9, "gfx950": 100e9}
_MOST_OF_8_BIT_UNIT: dict[Arch, float] = {"gfx942": 40e9, "gfx950": 60e9}
_MOST_OF_INTEGERS_IN_PAGES: dict[Arch, float] = {"gfx942": 40e9, "gfx950": 57e9}
_MOST_OF_NARROW_INTEGERS: dict[Arch, float] = {"gfx942": 33e9, "gfx950": 48e9}
_MOST_OF_SLOW_UNIT: dict[Arch, float] = {"gfx942": 20e9, "gfx950": 30e9}
# Of workgroups of eight waves, which do more for it.
_MOST_OF_EIGHT_WAVES: dict[Arch, float] = {"gfx942": 36e9, "gfx950": 56e9}
_FOUR_WAVES = 4 * WAVE  # threads
_NARROW_HDIM, _WIDE_HDIM = 64, 128
# Fewer key tiles for a split would leave each wave of a workgroup less than two.
_LEAST_STREAMED_TILES = 8
# The splits that waves of the decode kernels combine at once, of narrow rows (kMostAtOnce in
# csrc_templates/amd/decode_fwd.hip.in).
_COMBINED_AT_ONCE = 16 * DECODE_WAVES
# As many leading bits of a number of key tiles decide about splits.
_LEADING_BITS = 4


class SplitChoice:
    """The splits of calls that differ in lengths only: as many as are asked for, else as pay."""

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        row: KernelRow,
        slices: int,
        columns: int,
        *,
        streams: bool = False,
    ) -> None:
        """Prepare for a kernel whose output is made in ``slices`` of ``columns`` each.

        Of a kernel that ``streams``, memory bounds the calls, and else what its units compute.
        """
        self._asked_for = problem.num_splits
        self._leaves_parts = problem.has_split_results
        self._mask = problem.mask
        self._sink_size = problem.modifiers.sink_size
        self._rows_of_query = problem.gqa if row.stacks_heads else 1
        self._queries_of_tile = -(-row.ts_qo // self._rows_of_query)
        self._ts_kv = row.ts_kv
        sequences = problem.batch * problem.heads_q // self._rows_of_query * slices
        of_slice = row._replace(hdim_v=columns)
        self._split = KeySplit.of(of_slice, sequences, target.compute_units, target.arch)
        self._streams = streams
        self._streamed = Machine.of(target).bytes_per_second
        hdims = problem.hdim_q + problem.hdim_v
        number_bytes = element_bytes(problem).kv
        self._tile_bytes = row.ts_kv * hdims * number_bytes
        # Fewer workgroups than these leave HBM idle.
        most = _most_of_unit(problem, target.arch, row)
        self._enough = self._streamed / most
        is_wide = min(problem.hdim_q, problem.hdim_v) >= _WIDE_HDIM and not problem.is_paged
        if is_wide and number_bytes > 1:
            most = _MOST_OF_WIDE_ROWS[target.arch]
        self._enough_unsplit = self._streamed / most
        # Asked in every call of gm1, mostly for the lengths of the call before.
        self.splits = lru_cache(maxsize=64)(self._splits)
        self._streamed_splits = lru_cache(maxsize=64)(self._choose_streamed)

    def combine_seconds(self, seqlen_q: int, num_splits: int) -> float:
        """What it takes to combine them, for sequences of up to ``seqlen_q`` queries."""
        at_once = _COMBINED_AT_ONCE if self._streams else None
        return combine_seconds(self._split, seqlen_q * self._rows_of_query, num_splits, at_once)

    def _splits(self, seqlen_q: int, seqlen_k: int) -> Splits:
        """Choose for sequences of up to ``seqlen_q`` queries and about ``seqlen_k`` keys.

        More splits than there are tiles of keys would only leave empty results to be combined, but
        a caller who wants each split's results gets as many as were asked for.
        """
        rows = seqlen_q * self._rows_of_query
        tiles = -(-self._visible_keys(seqlen_q, seqlen_k) // self._ts_kv)
        if self._asked_for:
            most = self._asked_for if self._leaves_parts else max(tiles, 1)
            num_splits = min(self._asked_for, most)
            if num_splits == 1 and not self._leaves_parts:
                return ONE_SPLIT
            return Splits(num_splits, self._split.workspace_floats(rows, num_splits))
        if not self._streams:
            return self._split.splits(rows, tiles)
        # As many for a while, so that a decode loop finds them.
        shift = max(tiles.bit_length() - _LEADING_BITS, 0)
        return self._streamed_splits(seqlen_q, -(-tiles >> shift) << shift)

    def _choose_streamed(self, seqlen_q: int, tiles: int) -> Splits:
        """Choose the number with which the last workgroup ends first, and its part is combined."""
        split = self._split
        rows = seqlen_q * self._rows_of_query
        row_tiles = -(-rows // split.ts_qo)
        workgroups = split.sequences * row_tiles
        most = min(tiles // _LEAST_STREAMED_TILES, MOST_SPLITS)
        if workgroups == 0 or most < 2:
            return ONE_SPLIT
        bytes_of_all = split.sequences * tiles * self._tile_bytes
        # The tiles of a sequence's rows read the same: of what units draw, HBM gives one a share.
        enough = self._enough * row_tiles

        def seconds(num_splits: int) -> float:
            count = workgroups * num_splits
            rounds, rest = divmod(count, split.slots)
            least = enough if num_splits > 1 else self._enough_unsplit * row_tiles
            busy = rounds * split.slots + (max(rest, least) if rest else 0)
            streamed = bytes_of_all / self._streamed * busy / count
            return streamed + self.combine_seconds(seqlen_q, num_splits)

        full_rounds = (max(n * split.slots // workgroups, 1) for n in (1, 2, 3))
        candidates = (1, -(-int(enough) // workgroups), _COMBINED_AT_ONCE, *full_rounds)
        num_splits = min((min(n, most) for n in candidates), key=seconds)
        if num_splits == 1:
            return ONE_SPLIT
        return Splits(num_splits, split.workspace_floats(rows, num_splits))

    def _visible_keys(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many keys the queries of a tile see at most."""
        left, right = self._mask.left, self._mask.right
        if left is None or right is None:
            return seqlen_k
        seen = self._sink_size + left + right + min(seqlen_q, self._queries_of_tile)
        return min(seqlen_k, seen)


def _most_of_unit(problem: Problem, arch: Arch, row: KernelRow) -> float:
    """What a compute unit draws at most of such calls' keys and values."""
    if element_bytes(problem).kv > 1:
        return _MOST_OF_UNIT
    if row.threads > _FOUR_WAVES:
        return _MOST_OF_EIGHT_WAVES[arch]
    # Those of fp8 become others in fewer instructions than integers, but for fp16.
    is_quick = problem.kv_dtype in FP8_NAMES.values() and problem.dtype != "fp16"
    is_narrow = max(problem.hdim_q, problem.hdim_v) <= _NARROW_HDIM
    # A tile lies in one page or two, unless these are small.
    half_tile = row.ts_kv // 2
    looks_up_keys = problem.is_paged and problem.seqlen_k % half_tile != 0
    if problem.has_packed_pages or looks_up_keys:
        return _MOST_OF_SLOW_UNIT[arch]
    if is_narrow and problem.kv_dtype == "int8" and not problem.is_paged:
        return _MOST_OF_NARROW_INTEGERS[arch]
    if is_narrow and (problem.is_paged or not is_quick):
        return _MOST_OF_SLOW_UNIT[arch]
    if problem.is_paged and not is_quick:
        return _MOST_OF_INTEGERS_IN_PAGES[arch]
    return _MOST_OF_8_BIT_UNIT[arch]
