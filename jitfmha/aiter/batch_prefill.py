"""AITER's functions for queries against paged keys. They end in :func:`jitfmha.fmha_fwd`."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ..call.interface import OFF
from ..layers.peer_values import (
    as_dropout_p,
    as_flag,
    as_int,
    as_softcap,
    as_window,
    with_contiguous_rows,
)
from ..problem.checks import describe, refuse_given, with_keyword_advice
from .common_arguments import common_options, window_of_sides
from .forward import (
    Attention,
    Results,
    as_return_randval,
    as_sink,
    asked_for,
    forward_group,
)


@with_keyword_advice
def mha_batch_prefill_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    out: Tensor | None = None,
    kv_last_page_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    seqlen_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    kv_block_descale: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    sink_size: int = 0,
) -> Attention:
    """:func:`mha_batch_prefill` with the results of :func:`flash_attn_varlen_func`."""
    as_flag("deterministic", deterministic)
    return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    return_lse = as_flag("return_lse", return_lse)
    left, right, _ = as_window(window_size)
    results = mha_batch_prefill(
        *(with_contiguous_rows(q), k, v, cu_seqlens_q, kv_indptr, kv_page_indices),
        *(max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, logits_soft_cap),
        zero_tensors=False,
        is_causal=as_flag("causal", causal),
        window_size_left=left,
        window_size_right=right,
        sink_size=sink_size,
        return_softmax_lse=return_lse,
        return_dropout_randval=return_attn_probs and as_dropout_p(dropout_p) > 0,
        out=out,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        kv_block_descale=kv_block_descale,
        kv_last_page_lens=kv_last_page_lens,
        block_table=block_table,
        seqlen_k=seqlen_k,
        sink_ptr=sink_ptr,
    )
    return asked_for(results, return_lse, return_attn_probs)


@with_keyword_advice
def mha_batch_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    logits_soft_cap: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    sink_size: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    kv_block_descale: Tensor | None = None,
    kv_last_page_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    seqlen_k: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    gen: Generator | None = None,
) -> Results:
    """Attention of packed queries over keys and values in pages.

    Args:
        q: ``(total_q, hq, hdim)``.
        k, v: ``(num_pages, page_size, hk, hdim)``, any page size; or ``(num_pages, hk, hdim)``,
            with a key in each page. AITER's layout in five dimensions raises
            ``NotImplementedError``.
        kv_indptr: int32 ``(b + 1,)``, where the pages of each sequence start in kv_page_indices.
        kv_page_indices: int32 ``(total pages,)``, possibly followed by what has no meaning.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        kv_last_page_lens: int32 ``(b,)``, how many keys the last page of a sequence holds; needed
            where a page holds more than one.
        block_table, seqlen_k: int32 ``(b, most pages)`` and ``(b,)``, the pages of each sequence
            and its length. They replace the lists of pages, which are not looked at then.
        kv_block_descale: ``NotImplementedError`` where it is given.

    The other arguments, the results, and what is raised: see :func:`mha_varlen_fwd` and the module.
    """
    refuse_given(kv_block_descale=kv_block_descale)
    k, v = _as_pages("k", k), _as_pages("v", v)
    if block_table is None and seqlen_k is None:
        block_table, lengths = _table_of_lists(
            kv_indptr, kv_page_indices, kv_last_page_lens, page_size=k.shape[1]
        )
    elif block_table is None or seqlen_k is None:
        missing = "block_table" if block_table is None else "seqlen_k"
        raise ValueError(f"block_table and seqlen_k go together; {missing} is missing")
    else:
        lengths = _int32_vector("seqlen_k", seqlen_k)
    window = window_of_sides(window_size_left, window_size_right, sink_size)
    options = common_options(dropout_p, softmax_scale, as_flag("is_causal", is_causal), window)
    return forward_group(
        *(q, k, v),
        return_lse=as_flag("return_softmax_lse", return_softmax_lse),
        return_randval=as_return_randval(return_dropout_randval, options["dropout_p"]),
        gen=gen,
        zero_tensors=as_flag("zero_tensors", zero_tensors),
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
        block_table=block_table,
        logit_softcap=as_softcap("logits_soft_cap", logits_soft_cap) or OFF,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=as_sink(sink_ptr),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        **options,
    )


def _as_pages(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() not in (3, 4, 5):
        raise ValueError(
            f"{name} is {describe(x)}; expected (num_pages, page_size, heads, hdim), or "
            "(num_pages, heads, hdim) with a key in each page"
        )
    if x.dim() == 5:
        raise NotImplementedError(
            f"{name} ({describe(x)}) is in AITER's vectorized layout, which is not implemented; "
            "expected (num_pages, page_size, heads, hdim)"
        )
    return with_contiguous_rows(x if x.dim() == 4 else x[:, None])


def _table_of_lists(
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    kv_last_page_lens: Tensor | None,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """The lists of pages as a block table, and how many keys each sequence has."""
    starts = _int32_vector("kv_indptr", kv_indptr)
    indices = _int32_vector("kv_page_indices", kv_page_indices)
    counts = starts.diff()
    if starts.device.type == "cpu":
        ends = starts.tolist()
        if not ends or ends[0] < 0 or ends != sorted(ends) or ends[-1] > len(indices):
            raise ValueError(
                f"kv_indptr is {ends}; expected ascending numbers up to the {len(indices)} entries "
                "of kv_page_indices"
            )
    most = int(counts.max()) if len(counts) else 0
    places = starts[:-1, None] + torch.arange(most, dtype=torch.int32, device=starts.device)
    table = places if places.numel() == 0 else indices[places.clamp(max=len(indices) - 1)]
    if kv_last_page_lens is None:
        if page_size != 1:
            raise ValueError(f"kv_last_page_lens is missing; pages of {page_size} keys need it")
        return table, counts
    last = _int32_vector("kv_last_page_lens", kv_last_page_lens)
    if last.shape != counts.shape:
        raise ValueError(
            f"kv_last_page_lens has shape {tuple(last.shape)}; expected {tuple(counts.shape)}"
        )
    is_wrong = (counts > 0) & ((last < 1) | (last > page_size))
    if last.device.type == "cpu" and is_wrong.any():
        at = int(is_wrong.nonzero()[0])
        raise ValueError(
            f"kv_last_page_lens is {int(last[at])} for sequence {at}; a page holds {page_size} keys"
        )
    return table, ((counts - 1) * page_size + last).masked_fill(counts == 0, 0)


def _int32_vector(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.dim() != 1:
        raise TypeError(f"{name} must be an int32 tensor of one dimension, got {describe(x)}")
    return x
