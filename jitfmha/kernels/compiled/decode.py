"""Calls of few rows, as those of decoding are: a query or some of each sequence.

``csrc_templates/amd/decode_fwd.hip.in`` serves them, whose waves share tiles of keys instead of
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ...amd.chips import Arch
from ...problem.dtypes import DTYPE_BYTES
from ...problem.problem import Problem
from .decode_policy import BLOCK_ROWS, DECODE_WAVES, WIDE_HDIM, decode_blocks
from .tile_table import WAVE, Tile

_MOST_HDIM = 256
_FOUR_BYTES = 16
_MOST_WAVES = 8
_LOADED_TOGETHER = 8  # numbers of a row
_LEAST_OF_UNITS = 0.4  # where fewer have a workgroup, its keys have to be split in any case
# For which keys, by dtype (fp8, or int8), eight waves take less than two splits, by the cost model:
# where keys are, and whether rows are narrow. Scattered ones have a place each.
_NARROW_HDIM = 64
_Places = Literal["dense", "pages", "scattered"]
_OF_EIGHT_WAVES: dict[tuple[Arch, bool], frozenset[tuple[_Places, bool]]] = {
    ("gfx942", True): frozenset((("scattered", True), ("scattered", False), ("pages", True))),
    ("gfx950", True): frozenset((("scattered", True), ("scattered", False), ("pages", True))),
    ("gfx942", False): frozenset((("scattered", True), ("scattered", False), ("pages", True))),
    ("gfx950", False): frozenset(
        (("scattered", False), ("pages", False), ("pages", True), ("dense", True))
    ),
}
_COLUMNS = 64  # a multiple of which a workgroup makes


def decode_blocks_of(
    problem: Problem, rows_of_query: int, compute_units: int
) -> Callable[[int], int | None]:
    """How many blocks of 16 rows a workgroup has, by seqlen_q; None where the other kernel serves.

    ``rows_of_query`` are the heads that are stacked. Biases, dropout and float32 take what such a
    workgroup has no room for, the other one alone leaves the results of splits, and longer calls
    have rows enough for larger tiles.
    """
    modifiers, packs = problem.modifiers, problem.packs
    widest = max(problem.hdim_q, problem.hdim_v)
    is_served = (
        widest <= _MOST_HDIM
        and DTYPE_BYTES[problem.dtype] <= 2
        and not (modifiers.bias or problem.dropout_p or problem.has_p_descale)
        and (problem.has_packed_pages or not problem.has_column_major_v)
        and not problem.has_split_results
        and not problem.is_empty
    )
    have_units_idle = 2 * problem.batch * problem.heads_q // rows_of_query <= compute_units

    def blocks_of(seqlen_q: int) -> int | None:
        if not is_served:
            return None
        queries = -(-seqlen_q // packs)
        return decode_blocks(queries, rows_of_query, widest, have_units_idle) or None

    return blocks_of


def decode_waves(
    problem: Problem, arch: Arch, rows_of_query: int, compute_units: int, blocks: int | None
) -> int:
    """How many waves a workgroup with so many blocks of rows has.

    Of 8-bit numbers four waves mostly attend to less than HBM brings to a unit. Where there are
    about half as many workgroups as units, each has eight: that takes less than to split the keys.
    More rows, or wider ones, have no registers for that.
    """
    hdims = problem.hdim_q, problem.hdim_v
    workgroups = problem.batch * problem.heads_q // rows_of_query
    is_meant = (
        blocks == 1
        and DTYPE_BYTES[problem.kv_dtype] == 1
        and max(hdims) <= WIDE_HDIM
        and not any(hdim % _LOADED_TOGETHER for hdim in hdims)
        and _LEAST_OF_UNITS * compute_units <= workgroups <= compute_units
    )
    if not is_meant:
        return DECODE_WAVES
    places: _Places = "dense"
    if problem.is_paged:
        is_wide = not problem.has_packed_pages and problem.seqlen_k % BLOCK_ROWS == 0
        places = "pages" if is_wide else "scattered"
    kind = places, max(hdims) <= _NARROW_HDIM
    return _MOST_WAVES if kind in _OF_EIGHT_WAVES[arch, problem.is_fp8] else DECODE_WAVES


def decode_tile(tile: Tile, hdim_v: int, blocks: int, waves: int = DECODE_WAVES) -> Tile:
    """The tile of such calls, made of that of others with their head dimensions."""
    fours = 8 if made_columns(hdim_v) % (2 * _COLUMNS) == 0 else 4
    lds_bytes = waves * fours * WAVE * _FOUR_BYTES
    # Of each row a wave's maximum and sum, beside what the first wave leaves free.
    of_rows = waves * blocks * BLOCK_ROWS * 2 * 4
    lds_bytes += max(of_rows - max(fours // waves, 1) * WAVE * _FOUR_BYTES, 0)
    return tile._replace(slices=1, tile_q=blocks * BLOCK_ROWS, waves=waves, lds_bytes=lds_bytes)


def made_columns(hdim_v: int) -> int:
    """How many columns of the output a workgroup makes, with those behind the last one."""
    return -(-hdim_v // _COLUMNS) * _COLUMNS
