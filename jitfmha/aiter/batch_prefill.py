"""AITER's functions for queries against paged keys. They end in :func:`jitfmha.fmha_fwd`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor

from ..layers.known_attention import note_left_out, noted
from ..layers.peer_values import (
    attends_in,
    ends_in,
    int32_vector,
    sums_of,
    sums_of_numbers,
    with_contiguous_rows,
)
from ..problem.arguments import Options
from ..problem.checks import check_layout, describe
from ..problem.packed_pages import are_packed, shape_of_keys
from ..problem.torch_parts import can_be_read
from .forward import Attention, Found, Results, called_by_models, forward_group, with_all_results


def _forward_pages(
    *,
    k: Tensor,
    v: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    kv_last_page_lens: Tensor | None,
    block_table: Tensor | None,
    seqlen_k: Tensor | None,
    kv_block_descale: Tensor | None,
    **others: Any,
) -> Found:
    k, v = _as_pages("k", k), _as_pages("v", v)
    num_pages, page_size, heads_k, _ = shape_of_keys(k)
    if kv_block_descale is not None:
        others |= _scales_of_tokens(kv_block_descale, (num_pages, heads_k, 2), page_size, others)
    if block_table is None and seqlen_k is None:
        pages = lists_of_pages(kv_indptr, kv_page_indices, kv_last_page_lens, page_size)
    elif block_table is None or seqlen_k is None:
        missing = "block_table" if block_table is None else "seqlen_k"
        raise ValueError(f"block_table and seqlen_k go together; {missing} is missing")
    else:
        sums = sums_of(int32_vector("seqlen_k", seqlen_k))
        pages = {"cu_seqlens_k": sums, "block_table": block_table}
    return forward_group(k=k, v=v, **pages, **others)


def _as_pages(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() not in (3, 4, 5):
        raise ValueError(
            f"{name} is {describe(x)}; expected (num_pages, page_size, heads, hdim), packed pages "
            "of five dimensions, or (num_pages, heads, hdim) with a key in each page"
        )
    check_layout(name, x)
    if are_packed(x):
        return x
    return with_contiguous_rows(x if x.dim() == 4 else _in_own_pages(x))


@noted
def _in_own_pages(x: Tensor) -> Tensor:
    return x[:, None]


def _scales_of_tokens(
    kv_block_descale: Tensor, expected: tuple[int, ...], page_size: int, beside: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The scales of pages as those of their tokens, which all lie in one place."""
    for name in ("k_descale", "v_descale"):
        if beside[name] is not None:
            raise ValueError(
                f"{name} ({describe(beside[name])}) cannot be combined with kv_block_descale "
                f"({describe(kv_block_descale)})"
            )
    if not isinstance(kv_block_descale, Tensor) or kv_block_descale.shape != expected:
        raise ValueError(
            f"kv_block_descale is {describe(kv_block_descale)}; expected a tensor of shape "
            f"(num_pages, heads of k, 2), which is {expected}"
        )
    of_tokens = kv_block_descale[:, None, :, None].expand(-1, page_size, -1, 1, 2)
    return {"k_descale": of_tokens[..., 0], "v_descale": of_tokens[..., 1]}


def lists_of_pages(
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    kv_last_page_lens: Tensor | None,
    page_size: int,
) -> Options:
    """The lists as ``fmha_fwd`` takes them, and how many keys they name; a GPU is not read.

    ``kv_last_page_lens`` is looked at only where a page holds more than one key.
    """
    starts = _strided_vector("kv_indptr", kv_indptr)
    indices = _strided_vector("kv_page_indices", kv_page_indices)
    if starts.shape[0] == 0:
        raise ValueError("kv_indptr has shape (0,); expected (batch + 1,)")
    sums = starts
    if page_size == 1:
        note_left_out(kv_last_page_lens)
    else:
        if kv_last_page_lens is None:
            raise ValueError(f"kv_last_page_lens is missing; pages of {page_size} keys need it")
        last = _strided_vector("kv_last_page_lens", kv_last_page_lens)
        sums = _sums_of_lists(starts, last, page_size)
    return {
        "block_table": with_contiguous_rows(indices),
        "cu_seqlens_k": sums,
        "cu_seqlens_k_padded": starts,
    }


def _strided_vector(name: str, x: Tensor) -> Tensor:
    check_layout(name, int32_vector(name, x))
    return x


@noted
def _sums_of_lists(starts: Tensor, last: Tensor, page_size: int) -> Tensor:
    """The prefix sums of how many keys sequences have."""
    expected = (starts.shape[0] - 1,)
    if last.shape != expected:
        raise ValueError(f"kv_last_page_lens has shape {tuple(last.shape)}; expected {expected}")
    if not (can_be_read(starts) and can_be_read(last)):
        counts = starts.diff()
        of_all = torch.add(last, counts - 1, alpha=page_size)
        return sums_of(of_all.masked_fill(counts == 0, 0))
    lengths = []
    pairs = zip(pairwise(starts.tolist()), last.tolist(), strict=True)
    for sequence, ((start, end), keys) in enumerate(pairs):
        if end > start and not 1 <= keys <= page_size:
            raise ValueError(
                f"kv_last_page_lens is {keys} for sequence {sequence}; a page holds {page_size} "
                "keys"
            )
        lengths.append((end - start - 1) * page_size + keys if end != start else 0)
    return sums_of_numbers(lengths)


@attends_in(called_by_models(_forward_pages), cu_seqlens_k_padded="kv_indptr")
def mha_batch_prefill_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, kv_indptr: Tensor, kv_page_indices: Tensor, max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, logits_soft_cap: float = 0.0,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_lse: bool = False, return_attn_probs: bool = False,
    out: Tensor | None = None, kv_last_page_lens: Tensor | None = None,
    block_table: Tensor | None = None, seqlen_k: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, kv_block_descale: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    sink_size: int = 0,
) -> Attention:  # fmt: skip
    """:func:`mha_batch_prefill` with the results of :func:`flash_attn_varlen_func`."""


@ends_in(with_all_results(_forward_pages), cu_seqlens_k_padded="kv_indptr")
def mha_batch_prefill(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, kv_indptr: Tensor, kv_page_indices: Tensor, max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, logits_soft_cap: float, zero_tensors: bool,
    is_causal: bool, window_size_left: int, window_size_right: int, sink_size: int,
    return_softmax_lse: bool, return_dropout_randval: bool,
    out: Tensor | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, kv_block_descale: Tensor | None = None,
    kv_last_page_lens: Tensor | None = None, block_table: Tensor | None = None,
    seqlen_k: Tensor | None = None,
    sink_ptr: Tensor | None = None, gen: Generator | None = None,
) -> Results:  # fmt: skip
    """Attention of packed queries over keys and values in pages.

    Args:
        q: ``(total_q, hq, hdim)``.
        k, v: ``(num_pages, page_size, hk, hdim)``, any page size; or ``(num_pages, hk, hdim)``,
            with a key in each page; or packed pages, of five dimensions, as
            :func:`jitfmha.fmha_fwd` takes them.
        kv_indptr: int32 ``(b + 1,)``, where the pages of each sequence start in kv_page_indices.
        kv_page_indices: int32 ``(total pages,)``, possibly followed by what has no meaning.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        kv_last_page_lens: int32 ``(b,)``, how many keys the last page of a sequence holds; looked
            at where a page holds more than one.
        block_table, seqlen_k: int32 ``(b, most pages)`` and ``(b,)``, the pages of each sequence
            and its length. They replace the lists of pages, which are not looked at then.
        kv_block_descale: float32 ``(num_pages, hk, 2)``, what keys and values of each page and head
            are multiplied with; in place of k_descale and v_descale.

    The other arguments, the results, and what is raised: see :func:`mha_varlen_fwd` and the module.
    """
