"""Calls with keys in pages whose sequences have many queries, as those of prefill are.

``csrc_templates/amd/turns_fwd.hip.in`` serves them, with the tiles of the kernels that come ready.
"""

from __future__ import annotations

from ...amd.chips import Arch
from ...problem.dtypes import DTYPE_BYTES, FP8_NAMES
from ...problem.features import Feature
from ...problem.problem import PlainSizes, Problem, Sizes
from ..launch_estimate import WAVE_ROWS
from ..rules import ATTENTION
from .tile_table import Tile
from .turns_policy import may_take_turns, may_take_turns_in_packed_pages, rows_between_pages

_LARGE, _SMALL = (256, 64), (128, 32)
_MANY_KEYS = (256, 128)
# Queries and keys of a tile, by head dimensions; those of hsa/build.py where that has some.
_Tiles = dict[tuple[int, int], tuple[int, int]]
_NARROW: _Tiles = {(64, 64): _LARGE, (128, 128): _LARGE}
_16_BITS: dict[Arch, _Tiles] = {
    "gfx942": _NARROW | {(192, 128): _SMALL},
    "gfx950": _NARROW | {(192, 128): _LARGE},
}
_8_BITS: dict[Arch, _Tiles] = {
    "gfx942": {(64, 64): _MANY_KEYS, (128, 128): _LARGE},
    "gfx950": {(64, 64): _MANY_KEYS, (128, 128): _MANY_KEYS, (256, 256): _LARGE},
}
_TILES = {"bf16": _16_BITS, "fp16": _16_BITS} | dict.fromkeys(FP8_NAMES.values(), _8_BITS)
# Of queries of 16 bits, in wide pages or packed ones: head dimensions, bytes of a key's number, and
# whether there is a mask, with which the other kernel takes less by the cost model: on gfx950 since
# four of its waves share a SIMD then.
_WithoutTurns = dict[Arch, tuple[tuple[int, int, bool], ...]]
_WITHOUT_TURNS: _WithoutTurns = {
    "gfx942": ((192, 2, False), (192, 2, True)),
    "gfx950": ((64, 2, False),),
}
_WITHOUT_TURNS_IN_PACKED_PAGES: _WithoutTurns = {
    "gfx942": (
        *((64, 2, False), (64, 2, True)),
        *((64, 1, False), (64, 1, True)),
        (192, 2, False),
    ),
    "gfx950": ((64, 2, False),),
}
_SERVES = ATTENTION - {Feature.TOP_LEFT_MASK} | {
    *(Feature.BF16, Feature.FP16, Feature.FP8_E4M3FNUZ, Feature.FP8_E4M3FN),
    *(Feature.EIGHT_BIT_KEYS_AND_VALUES, Feature.INT8),
    *(Feature.DESCALES, Feature.PAGED_KEYS, Feature.NUM_SPLITS),
}
_PACKED = {Feature.PACKED_PAGES, Feature.COLUMN_MAJOR_V}


def takes_turns(problem: Problem, arch: Arch, *, are_wide: bool) -> bool:
    """Whether this kernel serves a call with keys in pages of rows, ``are_wide`` or small."""
    tile = _tile_of(arch, problem.dtype, problem.hdim_q, problem.hdim_v)
    serves = _SERVES | _PACKED if problem.has_packed_pages else _SERVES
    if tile is None or not (problem.is_paged and problem.features <= serves) or problem.is_empty:
        return False
    without = _WITHOUT_TURNS_IN_PACKED_PAGES if problem.has_packed_pages else _WITHOUT_TURNS
    kind = problem.hdim_q, DTYPE_BYTES[problem.kv_dtype], not problem.mask.is_none
    if are_wide and not problem.is_fp8 and kind in without[arch]:
        return False
    if problem.mode != "gm1":
        return False
    of_call = problem.seqlen_q, problem.packs, tile[0], *rows_of_pages(problem, problem.sizes)
    if problem.has_packed_pages:
        page_bytes = problem.hdim_q * problem.seqlen_k * DTYPE_BYTES[problem.kv_dtype]
        return may_take_turns_in_packed_pages(*of_call, page_bytes)
    return may_take_turns(*of_call)


def rows_of_pages(problem: Problem, sizes: Sizes | PlainSizes) -> tuple[int, int]:
    """How many rows there are from a page to the next one, of keys and of values.

    Of packed pages, how many times as many rows as a piece of values has; to kernels, those of
    values are hdim apart.
    """
    _, page_size, _, k, v, _ = sizes
    of_keys, of_values = k[1], v[1]
    if problem.has_packed_pages:
        piece = k[1]
        of_keys, of_values = piece * piece, piece * problem.hdim_v
    return (
        rows_between_pages(k[0], of_keys, page_size, problem.hdim_q),
        rows_between_pages(v[0], of_values, page_size, problem.hdim_v),
    )


def turns_tile(tile: Tile, arch: Arch, dtype: str, hdim_q: int, hdim_v: int) -> Tile:
    """The tile of such calls, made of that of others with their head dimensions."""
    found = _tile_of(arch, dtype, hdim_q, hdim_v)
    assert found is not None
    rows, keys = found
    return tile._replace(slices=1, tile_q=rows, tile_k=keys, waves=rows // WAVE_ROWS)


def _tile_of(arch: Arch, dtype: str, hdim_q: int, hdim_v: int) -> tuple[int, int] | None:
    tiles = _TILES.get(dtype)
    return tiles[arch].get((hdim_q, hdim_v)) if tiles else None
