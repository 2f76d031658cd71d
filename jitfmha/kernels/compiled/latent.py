"""Calls whose values are the first columns of their keys, as those of latent attention (MLA) are.

``csrc_templates/amd/latent_fwd.hip.in`` serves those of few rows: it reads keys once, and makes all
columns of the output in one workgroup.
"""

from __future__ import annotations

from ...problem.dtypes import DTYPE_BYTES
from ...problem.problem import Problem
from ...problem.score_features import AskedModifiers
from .decode_policy import BLOCK_ROWS
from .latent_policy import latent_blocks
from .tile_table import Tile

_COLUMNS = 256  # a multiple of which a workgroup makes
_SERVED_COLUMNS = (_COLUMNS, 2 * _COLUMNS)  # more than the one, up to the other
_OF_16_BITS, _OF_8_BITS = ("bf16", "fp16"), ("fp8_e4m3fnuz", "fp8_e4m3fn")
_LANES = 64


def row_blocks_of(problem: Problem, are_heads_stacked: bool) -> int | None:
    """How many blocks of 16 rows a workgroup has; None where the other kernel serves the call.

    Narrower values have no slices there, whose scores are computed anew, and calls of many queries
    have rows enough for its tiles.
    """
    least, most = _SERVED_COLUMNS
    is_served = (
        are_heads_stacked
        and _are_values_of_keys(problem)
        and least < problem.hdim_v <= most
        and _has_served_dtypes(problem)
        and problem.modifiers == AskedModifiers()
        and problem.dropout_p == 0
        and not (problem.has_split_results or problem.has_token_k_descale)
        and not problem.has_token_v_descale
    )
    if not is_served:
        return None
    return latent_blocks(-(-problem.seqlen_q // problem.packs) * problem.gqa)


def _has_served_dtypes(problem: Problem) -> bool:
    """Keys are of the queries' dtype, or of 8 bits beside queries of 16."""
    if problem.dtype in _OF_16_BITS:
        return problem.kv_dtype in (problem.dtype, *_OF_8_BITS)
    return problem.dtype in _OF_8_BITS and problem.kv_dtype == problem.dtype


def latent_tile(tile: Tile, kv_dtype: str, row_blocks: int) -> Tile:
    """The tile of such calls, made of that of others with their head dimensions."""
    exchange = row_blocks * (5 * _LANES * 16 + 3 * BLOCK_ROWS * 4)
    columns = tile.other_rows * _SERVED_COLUMNS[1] * DTYPE_BYTES[kv_dtype]
    return tile._replace(slices=1, tile_q=row_blocks * BLOCK_ROWS, lds_bytes=columns + exchange)


def made_columns(hdim_v: int) -> int:
    """How many columns of the output a workgroup makes, with those behind the last one."""
    return -(-hdim_v // _COLUMNS) * _COLUMNS


def _are_values_of_keys(problem: Problem) -> bool:
    """Whether each row of v begins where that of k does."""
    _, seqlen_k, _, k, v, _ = problem.sizes
    return (
        problem.has_v_at_k
        and v[-1] == 1
        and k[:-3] == v[:-3]
        and (k[-3] == v[-3] or seqlen_k == 1)
        and (k[-2] == v[-2] or problem.heads_k == 1)
    )
