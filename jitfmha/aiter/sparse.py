"""AITER's functions for latent attention of queries to chosen keys.

Sources: ``unified_attention_sparse_mla.py``, ``pa_decode_sparse.py`` and ``pa_prefill_sparse.py``
of ``aiter/ops/triton/attention/``, and ``aiter/ops/pa_sparse_prefill_opus.py``, of
github.com/ROCm/aiter. Each query is a sequence of its own here, whose keys are a list of pages of
one. They end in :func:`jitfmha.mla_absorbed_fwd`, and read nothing from a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.kv_cache import starts_in_batch
from ..layers.mla import mla_absorbed_fwd
from ..layers.peer_values import (
    as_flag,
    as_int,
    as_sink,
    as_softmax_scale,
    descales_of,
    drop_without_effect,
    ends_in,
    int32_vector,
    written_to,
)
from ..layers.split_keys import flash_attn_combine
from ..problem.arguments import Options
from ..problem.checks import check_layout, describe, not_a_tensor, refuse_given
from .batch_prefill import lists_of_pages
from .paged import refuse_segments


class _Keys(NamedTuple):
    """Rows that are keys and values in one, ``(tokens, n)``, and the lists of them, by name."""

    rows: tuple[str, Tensor]
    indices: tuple[str, Tensor | None]
    indptr: tuple[str, Tensor | None]


def _attend(q: Tensor, keys: _Keys, rank: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Out and the lse ``(h, rows)`` of queries whose keys the lists name, but for those below 0."""
    latent, lists = _rows(*keys.rows, 2), []
    for name, x in keys[1:]:
        if x is None:
            raise ValueError(f"{name} is missing beside {keys.rows[0]} ({describe(latent)})")
        check_layout(name, int32_vector(name, x))
        lists.append(x)
    indices, indptr = lists
    if len(indptr) != len(q) + 1:
        raise ValueError(
            f"{keys.indptr[0]} is {describe(indptr)}; q has {len(q)} rows; expected one more"
        )
    is_key = indices >= 0
    before = torch.nn.functional.pad(is_key.cumsum(0), (1, 0))
    place = torch.where(is_key, before[:-1], len(indices))
    chosen = indices.new_zeros(len(indices) + 1).scatter_(0, place, indices)[:-1]
    starts = before[indptr.long().clamp(0, len(indices))].int()
    of_rows: Options = {
        "mask": 0,
        "cu_seqlens_q": starts_in_batch(len(q), 1, q.device),
        "max_seqlen_q": 1,
        **options,  # type: ignore[typeddict-item]
    }
    of_rows |= lists_of_pages(starts, chosen, None, page_size=1)
    out, lse = mla_absorbed_fwd(q, latent[:, None], rank, return_lse=True, **of_rows)
    return out, lse


def _rows(name: str, x: Tensor, dimensions: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    check_layout(name, x)
    if x.dim() != dimensions:
        raise ValueError(f"{name} is {describe(x)}; expected {dimensions} dimensions")
    return x


def _attend_topk(
    *,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    softmax_scale: object,
    topk_indices: Tensor,
    kv_lora_rank: object,
    q_descale: Tensor | None,
    kv_descale: Tensor | None,
    topk_indptr: Tensor | None,
    topk_count: Tensor | None,
    **without_effect: Any,
) -> None:
    refuse_given(topk_indptr=topk_indptr, topk_count=topk_count)
    drop_without_effect(without_effect)
    _rows("q", q, 3)
    check_layout("topk_indices", _rows("topk_indices", topk_indices, 2))
    if not isinstance(kv, Tensor) or kv.dim() not in (3, 4) or kv.shape[-2] != 1:
        raise ValueError(f"kv is {describe(kv)}; expected (tokens, 1, n) or (pages, size, 1, n)")
    check_layout("kv", kv)
    latent = kv.flatten(0, -2)
    if latent.data_ptr() != kv.data_ptr():
        raise ValueError(f"kv has strides {kv.stride()}; its tokens must lie at equal distances")
    columns = topk_indices.shape[1]
    options = descales_of(q, kv, q_descale=q_descale, k_descale=kv_descale, v_descale=kv_descale)
    found, _ = _attend(
        q,
        _Keys(
            ("kv", latent),
            ("topk_indices", topk_indices.flatten()),
            ("q", starts_in_batch(len(topk_indices), columns, q.device)),
        ),
        as_int("kv_lora_rank", kv_lora_rank),
        softmax_scale=as_softmax_scale(softmax_scale),
        **options,
    )
    written_to(out, found)


@ends_in(_attend_topk, latent="kv", k="kv", v="kv", rank="kv_lora_rank", kv_indices="topk_indices")
def unified_attention_sparse_mla(
    q: Tensor, kv: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int,
    seqused_k: Tensor | None, max_seqlen_k: int, softmax_scale: float, topk_indices: Tensor,
    block_table: Tensor | None, kv_lora_rank: int,
    q_descale: Tensor | None = None, kv_descale: Tensor | None = None,
    tile_size: int | None = None,
    topk_indptr: Tensor | None = None, topk_count: Tensor | None = None,
) -> None:  # fmt: skip
    """Latent attention of each query to the tokens that its row of ``topk_indices`` names.

    Args:
        q: ``(total_q, hq, rank + r)``.
        kv: ``(tokens, 1, rank + r)`` or ``(num_pages, page_size, 1, rank + r)``.
        out: where to write the result, ``(total_q, hq, rank)``.
        topk_indices: int32 ``(total_q, n)``, tokens of ``kv`` as it lies; below 0 for none.
        kv_lora_rank: rank.
        q_descale, kv_descale: what 8-bit queries and latents are multiplied with; no effect on
            others.
        topk_indptr, topk_count: None; others are refused.
        cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, block_table, tile_size: no effect.
    """


def _attend_lists(
    *,
    q: Tensor,
    keys: _Keys,
    more_keys: _Keys | None,
    attn_sink: Tensor | None,
    softmax_scale: object,
    out: Tensor | None = None,
) -> Tensor:
    """Over all keys, in one softmax with the sink."""
    _rows("q", q, 3)
    scale, sink = as_softmax_scale(softmax_scale), as_sink(attn_sink)
    rank = q.shape[-1]
    if more_keys is None:
        found, _ = _attend(q, keys, rank, softmax_scale=scale, sink=sink)
    else:
        both = [_attend(q, each, rank, softmax_scale=scale) for each in (keys, more_keys)]
        results, sums = [x.float() for x, _ in both], [lse.T for _, lse in both]
        if sink is not None:
            # A part without values, of which the sink is the score.
            expected = tuple(sums[0].shape[1:])
            is_sink = isinstance(sink, Tensor) and sink.dtype == torch.float32
            if not is_sink or sink.shape != expected:
                raise ValueError(f"attn_sink is {describe(sink)}; expected float32 {expected}")
            check_layout("attn_sink", sink)
            results.append(torch.zeros_like(results[0]))
            sums.append(sink.expand_as(sums[0]))
        combined, _ = flash_attn_combine(torch.stack(results)[:, None], torch.stack(sums)[:, None])
        found = combined[0].to(q.dtype)
    return found if out is None else written_to(out, found)


def _decode(
    *,
    q: Tensor,
    unified_kv: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_scales: Tensor | None,
    skip_reduce: object,
    has_invalid: object,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_indptr: Tensor | None,
    attn_sink: Tensor | None,
    softmax_scale: object,
    **without_effect: Any,
) -> Tensor:
    refuse_given(kv_scales=kv_scales)
    refuse_segments(skip_reduce)
    as_flag("has_invalid", has_invalid)
    drop_without_effect(without_effect)
    lists = ("kv_indices", kv_indices), ("kv_indptr", kv_indptr)
    extra = ("extra_indices", extra_indices), ("extra_indptr", extra_indptr)
    return _attend_lists(
        q=q,
        keys=_Keys(("unified_kv", unified_kv), *lists),
        more_keys=None if extra_cache is None else _Keys(("extra_cache", extra_cache), *extra),
        attn_sink=attn_sink,
        softmax_scale=softmax_scale,
    )


_OF_ROWS = {"latent": "unified_kv", "k": "unified_kv", "v": "unified_kv", "sink": "attn_sink"}


@ends_in(_decode, **_OF_ROWS)
def pa_decode_sparse(
    q: Tensor, unified_kv: Tensor, kv_indices: Tensor, kv_indptr: Tensor,
    attn_sink: Tensor | None, softmax_scale: float, kv_scales: Tensor | None = None,
    block_h: int | None = None, kv_splits: int | None = None, has_invalid: bool | None = True,
    skip_reduce: bool | None = False, USE_EXP2: bool | None = None,  # noqa: N803 - AITER's name
    *,
    extra_cache: Tensor | None = None, extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each query to the rows that its list names, which are keys and values in one.

    Args:
        q: ``(rows, hq, n)``.
        unified_kv: ``(tokens, n)``, of the dtype of q.
        kv_indices, kv_indptr: int32 ``(total,)``, of which those below 0 are none, and
            ``(rows + 1,)``, where the list of each query starts.
        attn_sink: ``(hq,)``, the ``sink`` of :func:`jitfmha.fmha_fwd`.
        extra_cache, extra_indices, extra_indptr: more of the same, in the same softmax.
        kv_scales, skip_reduce: None and False; others are refused.
        block_h, kv_splits, has_invalid, USE_EXP2: no effect.

    Returns:
        out, ``(rows, hq, n)``.
    """


def _prefill(
    *,
    q: Tensor,
    unified_kv: Tensor,
    kv_indices_prefix: Tensor,
    kv_indptr_prefix: Tensor,
    kv: Tensor | None,
    kv_indices_extend: Tensor | None,
    kv_indptr_extend: Tensor | None,
    has_invalid: object = None,
    **others: Any,
) -> Tensor:
    as_flag("has_invalid", has_invalid)
    prefix = ("kv_indices_prefix", kv_indices_prefix), ("kv_indptr_prefix", kv_indptr_prefix)
    extend = ("kv_indices_extend", kv_indices_extend), ("kv_indptr_extend", kv_indptr_extend)
    return _attend_lists(
        q=q,
        keys=_Keys(("unified_kv", unified_kv), *prefix),
        more_keys=None if kv is None else _Keys(("kv", kv), *extend),
        **others,
    )


@ends_in(_prefill, **_OF_ROWS)
def pa_prefill_sparse(
    q: Tensor, unified_kv: Tensor, kv_indices_prefix: Tensor, kv_indptr_prefix: Tensor,
    kv: Tensor | None, kv_indices_extend: Tensor | None, kv_indptr_extend: Tensor | None,
    attn_sink: Tensor | None, softmax_scale: float, has_invalid: bool | None = None,
) -> Tensor:  # fmt: skip
    """:func:`pa_decode_sparse` with rows of a prefix, and of new tokens (``kv``) or None."""


@ends_in(_prefill, **_OF_ROWS)
def pa_sparse_prefill_opus(
    q: Tensor, unified_kv: Tensor, kv_indices_prefix: Tensor, kv_indptr_prefix: Tensor,
    kv: Tensor | None, kv_indices_extend: Tensor | None, kv_indptr_extend: Tensor | None,
    attn_sink: Tensor | None, softmax_scale: float, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`pa_prefill_sparse`, where ``out`` may be given."""
