"""Calls of few rows, as those of decoding are: a query or some of each sequence.

``csrc_templates/amd/decode_fwd.hip.in`` serves them, whose waves share tiles of keys instead of
rows.
"""

from __future__ import annotations

from collections.abc import Callable

from ...amd.chips import Arch
from ...problem.dtypes import DTYPE_BYTES, FP8_NAMES
from ...problem.problem import Problem, element_bytes
from .decode_policy import BLOCK_ROWS, DECODE_WAVES, MOST_BLOCKS, StreamedKeys, decode_blocks
from .tile_table import WAVE, Tile

_MOST_HDIM = 256
_FOUR_BYTES = 16
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
    """How many waves a workgroup with so many blocks of rows has."""
    if blocks is None:
        return DECODE_WAVES
    workgroups = problem.batch * problem.heads_q // rows_of_query
    keys = streamed_keys(problem)
    return keys.waves(arch, problem.is_fp8, blocks, workgroups, compute_units)


def streamed_keys(problem: Problem) -> StreamedKeys:
    """What calls of few rows read of keys and values."""
    return StreamedKeys(
        number_bytes=element_bytes(problem).kv,
        are_fp8=problem.kv_dtype in FP8_NAMES.values(),
        is_fp16=problem.dtype == "fp16",
        hdim_q=problem.hdim_q,
        hdim_v=problem.hdim_v,
        page_rows=problem.seqlen_k if problem.is_paged else 0,
        has_packed_pages=problem.has_packed_pages,
    )


def decode_tile(tile: Tile, hdim_v: int, blocks: int, waves: int = DECODE_WAVES) -> Tile:
    """The tile of such calls, made of that of others with their head dimensions."""
    fours = 8 if made_columns(hdim_v) % (2 * _COLUMNS) == 0 else 4
    shared_steps = 2 if blocks == MOST_BLOCKS else 1
    lds_bytes = shared_steps * waves * fours * WAVE * _FOUR_BYTES
    # Of each row a wave's maximum and sum, beside what the first wave leaves free.
    of_rows = waves * blocks * BLOCK_ROWS * 2 * 4
    lds_bytes += max(of_rows - max(fours // waves, 1) * WAVE * _FOUR_BYTES, 0)
    return tile._replace(slices=1, tile_q=blocks * BLOCK_ROWS, waves=waves, lds_bytes=lds_bytes)


def made_columns(hdim_v: int) -> int:
    """How many columns of the output a workgroup makes, with those behind the last one."""
    return -(-hdim_v // _COLUMNS) * _COLUMNS
