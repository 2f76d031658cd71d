"""AITER's functions that share out the work of latent attention, and those that work by that.

Source: ``aiter/ops/attention.py`` of github.com/ROCm/aiter. Kernels here share out their work by
themselves, so there is none in what ``get_mla_metadata_v1`` fills in, and nothing to put together.

The prefill of projected keys, :func:`mla_prefill_ps_asm_fwd`, writes its result itself.
Frameworks call :func:`mla_reduce_v1` after it, for the lse among others. Where
:func:`get_ps_metadata_v1` is asked for that (``need_lse``), each tile of 256 queries of a sequence
has one part, which :func:`mla_reduce_v1` reads: rows and lse of tile n start at row 256 n of the
buffers for parts. All of this is done where the tensors are: a GPU is not read. What lies on the
CPU is checked.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..layers.peer_values import as_flag, as_int, drop_without_effect, ends_in, int32_vector
from ..problem.checks import (
    check_layout,
    describe,
    not_a_tensor,
    require_cu_seqlens,
    with_clear_errors,
)
from ..problem.memory import write_values, write_zeros
from ..problem.torch_parts import can_be_read
from .paged import NAMES_OF_PROJECTED, attend_projected

Shape = int | tuple[int, ...]
Buffers = tuple[tuple[Shape, torch.dtype], ...]

TILE = 256
"""Queries of a part: of vLLM's and SGLang's buffers, which are whole tiles."""


def _buffers(tiles: int) -> Buffers:
    """Shapes and dtypes of work_metadata, work_indptr, work_info and the three of the reduction."""
    kinds: tuple[Shape, ...] = 1, (1, 8), tiles + 1, (tiles, 2), tiles
    return ((2, torch.uint64), *((shape, torch.int32) for shape in kinds))


@with_clear_errors
def get_mla_metadata_info_v1(
    batch_size: int, max_seqlen_qo: int, num_head_qo: int, q_dtype: torch.dtype,
    kv_dtype: torch.dtype, is_sparse: bool, fast_mode: bool = True, num_kv_splits: int = 32,
    intra_batch_mode: bool = False, max_split_per_batch: int = -1,
) -> Buffers:  # fmt: skip
    """Shapes and dtypes of what :func:`get_mla_metadata_v1` fills in, in its order.

    Nothing depends on the arguments.

    Returns:
        ``(shape, dtype)`` of work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr,
        reduce_final_map and reduce_partial_map.
    """
    for name, number in (
        ("batch_size", batch_size),
        ("max_seqlen_qo", max_seqlen_qo),
        ("num_head_qo", num_head_qo),
        ("max_split_per_batch", max_split_per_batch),
    ):
        as_int(name, number)
    for name, dtype in (("q_dtype", q_dtype), ("kv_dtype", kv_dtype)):
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}={dtype!r} is no dtype of torch")
    as_flag("is_sparse", is_sparse)
    return _buffers(1)


# What has no effect, and is a tensor: of get_mla_metadata_v1, get_ps_metadata_v1 and
# get_pa_metadata_v1.
_BUFFERS = frozenset(
    ("seqlens_qo_indptr", "seqlens_kv_indptr", "pages_kv_indptr", "kv_last_page_lens")
    + ("context_lens", "work_metadata_ptrs", "work_info_set", "work_info")
    + ("reduce_final_map", "reduce_partial_map")
)


def _fill_nothing(
    *,
    work_indptr: Tensor,
    reduce_indptr: Tensor,
    num_heads_k: object,
    is_causal: object,
    is_cp_round_robin: object = False,
    **without_effect: Any,
) -> None:
    as_int("num_heads_k", num_heads_k)
    as_flag("is_causal", is_causal)
    if as_flag("is_cp_round_robin", is_cp_round_robin):
        raise NotImplementedError("is_cp_round_robin=True: keys of others are not known")
    for name in _BUFFERS.intersection(without_effect):
        if not isinstance(without_effect[name], Tensor):
            raise not_a_tensor(name, without_effect[name])
    drop_without_effect(without_effect)
    for name, x in (("work_indptr", work_indptr), ("reduce_indptr", reduce_indptr)):
        int32_vector(name, x)
        check_layout(name, x)
        write_zeros(x)


@ends_in(_fill_nothing)
def get_mla_metadata_v1(
    seqlens_qo_indptr: Tensor, seqlens_kv_indptr: Tensor, kv_last_page_lens: Tensor,
    num_heads_per_head_k: int, num_heads_k: int, is_causal: bool,
    work_metadata_ptrs: Tensor, work_info_set: Tensor, work_indptr: Tensor,
    reduce_indptr: Tensor, reduce_final_map: Tensor, reduce_partial_map: Tensor,
    page_size: int = 1, kv_granularity: int = 16, max_seqlen_qo: int = -1, uni_seqlen_qo: int = -1,
    fast_mode: bool = True, topk: int = -1, max_split_per_batch: int = -1,
    intra_batch_mode: bool = False, is_cp_round_robin: bool = False, mla_version: int = 0,
    dtype_q_nope: torch.dtype | None = None, dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None, dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None, dtype_kv: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Fill in that there is no work and nothing to put together.

    ``work_indptr`` and ``reduce_indptr`` become 0; the other tensors have no meaning then.
    :func:`jitfmha.aiter.mla.mla_decode_fwd` does not look at any of them. ``is_cp_round_robin`` is
    refused; no other argument has an effect.
    """


@with_clear_errors
def get_ps_metadata_info_v1(
    batch_size: int, num_head_k: int, max_qlen: int, qlen_granularity: int = 256,
    max_kvlen: int | None = None,
) -> Buffers:  # fmt: skip
    """Shapes and dtypes of what :func:`get_ps_metadata_v1` fills in.

    Args:
        batch_size, max_qlen: the sequences, and the most queries of one.
        num_head_k, qlen_granularity, max_kvlen: no effect.

    Returns:
        as :func:`get_mla_metadata_info_v1`.
    """
    tiles = -(-as_int("max_qlen", max_qlen) // TILE)
    return _buffers(max(1, as_int("batch_size", batch_size) * tiles))


def _fill_tiles(
    *,
    seqlens_qo_indptr: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    need_lse: object,
    **others: Any,
) -> None:
    maps = {"reduce_final_map": reduce_final_map, "reduce_partial_map": reduce_partial_map}
    if not as_flag("need_lse", need_lse):
        maps["seqlens_qo_indptr"] = seqlens_qo_indptr
        _fill_nothing(reduce_indptr=reduce_indptr, **maps, **others)
        return
    ends = _sums("seqlens_qo_indptr", seqlens_qo_indptr)
    for (name, x), shape in zip(maps.items(), ((2,), ()), strict=True):
        is_map = isinstance(x, Tensor) and x.dtype == torch.int32 and x.dim() == 1 + len(shape)
        if not is_map or x.shape[1:] != shape:
            raise ValueError(f"{name} is {describe(x)}; expected int32 {('tiles', *shape)}")
        check_layout(name, x)
    room = min(len(int32_vector("reduce_indptr", reduce_indptr)) - 1, *map(len, maps.values()))
    _fill_nothing(reduce_indptr=reduce_indptr, **maps, **others)
    counts = (ends.diff() + TILE - 1) // TILE
    if len(counts) == 0:
        return
    behind = counts.cumsum(0)
    if can_be_read(ends):
        if ends.tolist() != sorted(ends.tolist()) or ends[0] != 0:
            raise ValueError(
                f"seqlens_qo_indptr is {ends.tolist()}; expected ascending numbers from 0"
            )
        if behind[-1] > room:
            raise ValueError(
                f"there are {int(behind[-1])} tiles of {TILE} queries; reduce_indptr, "
                f"reduce_final_map and reduce_partial_map have room for {room}"
            )
    tile = torch.arange(max(room, 0), device=ends.device)
    sequence = torch.searchsorted(behind, tile, right=True).clamp(max=len(counts) - 1)
    start = ends[sequence] + (tile - (behind - counts)[sequence]) * TILE
    # What lies behind the last tile is empty.
    number = torch.arange(len(reduce_indptr), device=ends.device)
    write_values(reduce_indptr, torch.minimum(number, behind[-1]))
    end = torch.minimum(start + TILE, ends[sequence + 1])
    write_values(reduce_final_map[: len(tile)], torch.stack((start, end), 1))
    write_values(reduce_partial_map[: len(tile)], tile * TILE)


def _sums(name: str, x: Tensor) -> Tensor:
    """``x``, which is int32 of one dimension and strided."""
    check_layout(name, int32_vector(name, x))
    return x


@ends_in(_fill_tiles)
def get_ps_metadata_v1(
    seqlens_qo_indptr: Tensor, pages_kv_indptr: Tensor, context_lens: Tensor,
    gqa_ratio: int, num_heads_k: int,
    work_metadata_ptrs: Tensor, work_indptr: Tensor, work_info: Tensor,
    reduce_indptr: Tensor, reduce_final_map: Tensor, reduce_partial_map: Tensor,
    qhead_granularity: int = 1, qlen_granularity: int = 256, kvlen_granularity: int = 16,
    block_size: int = 16, is_causal: bool = True, need_lse: bool = False,
) -> None:  # fmt: skip
    """Fill in what :func:`mla_reduce_v1` is to do after :func:`mla_prefill_ps_asm_fwd`.

    Args:
        seqlens_qo_indptr: int32 ``(b + 1,)``, prefix sums of the numbers of queries; on the CPU or
            where the other tensors are.
        work_indptr: becomes 0.
        reduce_indptr, reduce_final_map, reduce_partial_map: a part for each tile with ``need_lse``,
            and nothing without; see the module.

    No other argument has an effect.
    """


@with_clear_errors
def mla_reduce_v1(
    partial_output: Tensor, partial_lse: Tensor,
    reduce_indptr: Tensor, reduce_final_map: Tensor | None, reduce_partial_map: Tensor,
    max_seqlen_q: int, num_kv_splits: int | Tensor = 0,
    final_output: Tensor | None = None, final_lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Put parts of attention together, each to some rows of the result.

    Args:
        partial_output: float32 ``(rows, h, hdim_v)`` or ``(rows, 1, h, hdim_v)``, of each part as
            if it were all.
        partial_lse: float32 ``(rows, h)`` or ``(rows, 1, h, 1)``.
        reduce_indptr: int32 ``(n + 1,)``, which entries of reduce_partial_map are parts of which
            tile.
        reduce_final_map: int32 ``(n, 2)``, the first row of each tile in the result and the one
            behind its last; None: max_seqlen_q rows each, one after the other.
        max_seqlen_q: the most rows of a tile.
        reduce_partial_map: int32, where the rows of each part start.
        num_kv_splits: no effect. Older versions of AITER do not have it, and the results are in its
            place.
        final_output, final_lse: where to write, ``(total_q, h, hdim_v)`` and float32
            ``(total_q, h)``. Rows of no tile stay as they are.

    Raises:
        TypeError, ValueError: an argument breaks a rule.
    """
    if isinstance(num_kv_splits, Tensor):
        final_output, final_lse = num_kv_splits, final_output
    if not isinstance(final_output, Tensor) or final_output.dim() != 3:
        raise ValueError(f"final_output is {describe(final_output)}; expected (total_q, h, hdim_v)")
    check_layout("final_output", final_output)
    total_q, heads, hdim_v = final_output.shape
    if final_lse is not None:
        if not isinstance(final_lse, Tensor) or final_lse.shape != (total_q, heads):
            raise ValueError(f"final_lse is {describe(final_lse)}; expected {(total_q, heads)}")
        check_layout("final_lse", final_lse)
    rows = _parts("partial_output", partial_output, (heads, hdim_v))
    lse = _parts("partial_lse", partial_lse, (heads,))
    ends = _sums("reduce_indptr", reduce_indptr)
    parts = _sums("reduce_partial_map", reduce_partial_map)
    length, count = as_int("max_seqlen_q", max_seqlen_q), max(len(ends) - 1, 0)
    if length < 0:
        raise ValueError(f"max_seqlen_q={max_seqlen_q!r} must not be negative")
    if reduce_final_map is None:
        first = torch.arange(count, device=ends.device) * length
        tiles = torch.stack((first, first + length), 1)
    else:
        tiles = reduce_final_map
        is_map = isinstance(tiles, Tensor) and tiles.dtype == torch.int32 and tiles.dim() == 2
        if not is_map or len(tiles) < count or tiles.shape[1] != 2:
            raise ValueError(
                f"reduce_final_map is {describe(tiles)}; expected int32 {(f'>= {count}', 2)}"
            )
        check_layout("reduce_final_map", tiles)
        tiles = tiles[:count]
    room = min(len(rows), len(lse))
    if all(map(can_be_read, (ends, parts, tiles))):
        _check_tiles(ends.tolist(), parts.tolist(), tiles.tolist(), length, room, total_q)
    if 0 in (count, len(parts), length, room, total_q):
        return
    within = torch.arange(min(length, room, total_q), device=ends.device)
    source = (parts[:, None] + within).clamp(0, room - 1)
    ends = ends.long()
    number = torch.arange(len(parts), device=ends.device)
    tile_of_part = (torch.searchsorted(ends, number, right=True) - 1).clamp(0, count - 1)

    def reduced(kind: str, x: Tensor, initial: float) -> Tensor:
        return torch.segment_reduce(x, kind, offsets=ends, initial=initial, unsafe=True)

    # As in flash_attn_combine, but that tiles have as many parts as they like.
    largest = reduced("max", lse[source], -torch.inf)
    shift = largest.masked_fill(largest == -torch.inf, 0)
    weights = (lse[source] - shift[tile_of_part]).exp()
    sees_keys = largest != -torch.inf
    divisor = reduced("sum", weights, 0).masked_fill(~sees_keys, 1)
    counted = rows[source].masked_fill((weights == 0)[..., None], 0) * weights[..., None]
    combined = reduced("sum", counted, 0) / divisor[..., None]
    total = (divisor.log() + shift).masked_fill(~sees_keys, -torch.inf)
    # Of each row of the result, where it is among those of the tiles.
    row = tiles[:, :1] + within
    is_row = (row < tiles[:, 1:]) & (ends.diff() > 0)[:, None] & (row >= 0) & (row < total_q)
    place = row.new_full((total_q + 1,), -1, dtype=torch.int64)
    index = torch.where(is_row, row, total_q).flatten().long()
    place = place.scatter_(0, index, torch.arange(len(index), device=ends.device))[:-1]
    for results, found in ((final_output, combined), (final_lse, total)):
        if results is not None:
            chosen = found.flatten(0, 1)[place.clamp(min=0)].to(results.dtype)
            is_written = (place >= 0).view(-1, *(1,) * (results.dim() - 1))
            write_values(results, torch.where(is_written, chosen, results))


def _check_tiles(
    ends: list[int], parts: list[int], tiles: list[list[int]], length: int, room: int, total_q: int
) -> None:
    if ends != sorted(ends) or (ends and not 0 <= ends[0] <= ends[-1] <= len(parts)):
        raise ValueError(
            f"reduce_indptr is {ends}; expected ascending numbers up to the {len(parts)} entries "
            "of reduce_partial_map"
        )
    for n, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        first, last = tiles[n]
        if not 0 <= first <= last <= min(total_q, first + length):
            raise ValueError(
                f"reduce_final_map has {tiles[n]} for tile {n}; expected the first and the end of "
                f"some of the {total_q} rows of final_output, max_seqlen_q ({length}) at most"
            )
        if not all(0 <= part <= room - (last - first) for part in parts[start:end]):
            raise ValueError(
                f"reduce_partial_map has {parts[start:end]} for tile {n} of {last - first} rows; "
                f"partial_output and partial_lse have {room}"
            )


def _parts(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Parts as ``(rows, *shape)``, which may have dimensions of 1 between."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        raise TypeError(f"{name} must be a float32 tensor, got {describe(x)}")
    check_layout(name, x)
    if [n for n in x.shape[1:] if n != 1] != [n for n in shape if n != 1] or x.dim() == 0:
        raise ValueError(f"{name} is {describe(x)}; expected {('rows', *shape)}")
    return x.reshape(len(x), *shape)


def _prefill(
    *,
    qo_indptr: Tensor,
    splitData: Tensor | None,  # noqa: N803 - AITER's name
    splitLse: Tensor | None,  # noqa: N803
    output: Tensor,
    **given: Any,
) -> None:
    drop_without_effect(given, "work_indptr", "work_info_set")
    require_cu_seqlens(qo_indptr=qo_indptr)
    for name, x in (("splitData", splitData), ("splitLse", splitLse)):
        if isinstance(x, Tensor):
            check_layout(name, x)
        elif x is not None:
            raise not_a_tensor(name, x)
    has_parts = isinstance(splitData, Tensor) and splitData.numel() > 0
    if splitData is not None and has_parts and isinstance(output, Tensor):
        shape = splitData.shape[:1] + output.shape[1:]
        if splitData.shape != shape or splitLse is None or splitLse.shape != shape[:2]:
            raise ValueError(
                f"splitData is {describe(splitData)}, splitLse {describe(splitLse)}; output is "
                f"{describe(output)}; expected (rows, hq, hdim_v) and (rows, hq)"
            )
    out, lse = attend_projected(qo_indptr=qo_indptr, output=output, with_lse=has_parts, **given)
    if lse is None or splitData is None or splitLse is None:
        return
    if out.shape[0] == 0 or qo_indptr.shape[0] == 1:
        return
    # Of each row for parts, whose it is: so a GPU is not asked how many there are. There may be no
    # room for parts that nobody reads.
    counts = qo_indptr.diff()
    tiles = -(-counts // TILE)
    ends = tiles.cumsum(0) * TILE
    row = torch.arange(min(len(splitData), len(splitLse)), device=out.device)
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=len(counts) - 1)
    within = row - (ends - tiles * TILE)[sequence]
    is_part = within < counts[sequence]
    source = (qo_indptr[sequence] + within).clamp(max=len(out) - 1)
    for parts, results in ((splitData, out), (splitLse, lse.T)):
        of_rows = is_part.view(-1, *(1,) * (results.dim() - 1))
        room = parts[: len(row)]
        write_values(room, torch.where(of_rows, results[source], room))


@ends_in(_prefill, **NAMES_OF_PROJECTED)
def mla_prefill_ps_asm_fwd(
    Q: Tensor, K: Tensor, V: Tensor,  # noqa: N803
    qo_indptr: Tensor, kv_indptr: Tensor, kv_page_indices: Tensor,
    work_indptr: Tensor | None, work_info_set: Tensor | None,
    max_seqlen_q: int, softmax_scale: float, is_causal: bool,
    splitData: Tensor, splitLse: Tensor, output: Tensor,  # noqa: N803
    q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Attention of packed queries over projected keys and values, one in a page.

    Args:
        Q: ``(total_q, hq, hdim)``; K: ``(num_pages, hk, hdim)``; V: ``(num_pages, hk, hdim_v)``.
        qo_indptr: int32 ``(b + 1,)``, prefix sums of the numbers of queries.
        kv_indptr, kv_page_indices: the keys of each sequence, as
            :func:`jitfmha.aiter.mha_batch_prefill` has them.
        softmax_scale: finite and > 0.
        splitData, splitLse: float32 ``(rows, hq, hdim_v)`` and ``(rows, hq)``, for the parts that
            :func:`mla_reduce_v1` reads; see the module. Without rows none are written.
        output: where to write the result, ``(total_q, hq, hdim_v)``.
        q_scale, k_scale, v_scale: what 8-bit tensors are multiplied with; no effect on others.
        work_indptr, work_info_set: no effect.
    """
