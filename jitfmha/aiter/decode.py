"""AITER's other functions for a few queries against keys in packed pages, and for latents.

Sources: ``aiter/ops/triton/gluon/pa_decode_gluon.py``, ``aiter/ops/triton/gluon/mla_gluon.py`` and
``aiter/ops/attention.py`` of github.com/ROCm/aiter. SGLang, vLLM and ATOM call them. They end in
:func:`jitfmha.fmha_fwd` and :func:`jitfmha.mla_absorbed_fwd`, which split keys by themselves:
buffers for parts, numbers of partitions and the sharing out of work have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers.known_attention import noted
from ..layers.kv_cache import starts_in_batch
from ..layers.mla import mla_absorbed_fwd
from ..layers.peer_values import (
    as_flag,
    as_int,
    as_number,
    as_sink,
    as_softmax_scale,
    attends_in,
    drop_without_effect,
    ends_in,
    int32_vector,
    written_to,
)
from ..problem.arguments import Options
from ..problem.checks import (
    check_layout,
    describe,
    not_a_tensor,
    refuse_given,
    with_clear_errors,
)
from ..problem.dtypes import EIGHT_BIT_DTYPES, out_dtype_of
from ..problem.packed_pages import are_packed, shape_of_keys
from .batch_prefill import lists_of_pages
from .mla_metadata import Buffers, _fill_nothing, get_mla_metadata_info_v1
from .paged import attend_pages, pages_of_table, scales_of_tokens

OPERATORS = {
    "pa_decode_gluon": (
        "(Tensor(a!) output, Tensor query, Tensor key_cache, Tensor value_cache, "
        "Tensor context_lengths, Tensor block_tables, float softmax_scale, int query_length, "
        "int max_context_partition_num, int context_partition_size=256, "
        "ScalarType compute_type=bfloat16, Tensor? query_scale=None, Tensor? key_scale=None, "
        "Tensor? value_scale=None, Tensor? exp_sums=None, Tensor? max_logits=None, "
        "Tensor? temporary_output=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "
        "int sliding_window=0, bool ps=True) -> ()"
    ),
    "paged_attention_rocm": (
        "(Tensor(a!) out, Tensor exp_sums, Tensor max_logits, Tensor tmp_out, Tensor query, "
        "Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, "
        "Tensor block_tables, Tensor context_lens, int block_size, int max_context_len, "
        "Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, "
        "Tensor? fp8_out_scale=None, int partition_size=256, int mtp=1, Tensor? q_scale=None) "
        "-> Tensor(a!)"
    ),
}
"""What ``torch.ops.aiter`` has of these functions, with their schemas."""

# ---- Keys and values in packed pages -------------------------------------------------------------


def _attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    pages: Options,
    queries: int,
    sliding_window: object = 0,
    **others: Any,
) -> Tensor:
    """What all end in: as many queries for each sequence, the last of its keys."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        if x.dim() != (3 if name == "q" else 5):
            expected = "(rows, heads, hdim)" if name == "q" else "packed pages, of five dimensions"
            raise ValueError(f"{name} is {describe(x)}; expected {expected}")
    sums = pages["cu_seqlens_k"]
    assert sums is not None
    sequences = sums.shape[0] - 1
    if queries < 1 or q.shape[0] != sequences * queries:
        raise ValueError(
            f"q has {q.shape[0]} rows; expected {queries} for each of {sequences} sequences"
        )
    window = as_int("sliding_window", sliding_window)
    return attend_pages(
        q=q,
        k=k,
        v=v,
        out=out,
        pages=pages,
        cu_seqlens_q=starts_in_batch(sequences, queries, sums.device),
        max_seqlen_q=queries,
        window=(window - 1, 0) if window > 0 else (-1, -1),
        **others,
    )[0]


@noted
def _of_tokens(scale: Tensor | None) -> Tensor | None:
    """:func:`scales_of_tokens`, which may have a dimension of 1 behind."""
    if isinstance(scale, Tensor) and scale.dim() == 4:
        scale = scale.squeeze(-1)
    return scales_of_tokens(scale)


def _gluon(
    *,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    query_length: object,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: object,
    sliding_window: object,
    alibi_slopes: Tensor | None,
    compute_type: object,
    **without_effect: Any,
) -> None:
    drop_without_effect(without_effect)
    if not isinstance(compute_type, torch.dtype):
        raise TypeError(f"compute_type={compute_type!r} is no dtype of torch")
    _attend(
        q=query,
        k=key_cache,
        v=value_cache,
        out=output,
        pages=pages_of_table("context_lengths", context_lengths, block_tables),
        queries=as_int("query_length", query_length),
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        sink=sinks,
        q_descale=query_scale,
        k_descale=_of_tokens(key_scale),
        v_descale=_of_tokens(value_scale),
    )


@attends_in(
    _gluon,
    q="query",
    k="key_cache",
    v="value_cache",
    out="output",
    cu_seqlens_q="query_length",
    cu_seqlens_k="context_lengths",
    block_table="block_tables",
    sink="sinks",
    q_descale="query_scale",
    k_descale="key_scale",
    v_descale="value_scale",
)
def pa_decode_gluon(
    output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor,
    context_lengths: Tensor, block_tables: Tensor, softmax_scale: float, query_length: int,
    max_context_partition_num: int, context_partition_size: int = 256,
    compute_type: torch.dtype = torch.bfloat16,
    query_scale: Tensor | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    exp_sums: Tensor | None = None, max_logits: Tensor | None = None,
    temporary_output: Tensor | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    sliding_window: int = 0, ps: bool = True,
) -> None:  # fmt: skip
    """Attention of a few queries for each sequence, the last of its keys, over packed pages.

    Args:
        output: where to write the result, ``(b * query_length, hq, hdim_v)``.
        query: ``(b * query_length, hq, hdim)``.
        key_cache, value_cache: packed pages, as :func:`jitfmha.fmha_fwd` takes them. Values of
            four dimensions, ``(num_pages, hk, hdim_v, page_size)``, are refused.
        context_lengths: int32 or int64 ``(b,)``, how many keys each sequence has.
        block_tables: int32 ``(b, most pages)``.
        query_length: queries of each sequence, any number from 1 on; they are causal.
        query_scale, key_scale, value_scale: what 8-bit tensors are multiplied with: one number, or
            of keys and values ``(num_pages, hk, page_size, 1)``; no effect on others.
        sinks: ``(hq,)``.
        sliding_window: how many of the last keys up to its own a query sees; 0 for all.
        max_context_partition_num, context_partition_size, compute_type, exp_sums, max_logits,
            temporary_output, ps: no effect.
    """


@with_clear_errors
def get_recommended_splits(num_sequences: int, num_kv_heads: int, split_kv_blocks: int = 1) -> int:
    """How many partitions the buffers of :func:`pa_decode_gluon` have room for: 1 is enough."""
    for name, value in (
        ("num_sequences", num_sequences),
        ("num_kv_heads", num_kv_heads),
        ("split_kv_blocks", split_kv_blocks),
    ):
        as_int(name, value)
    return 1


def _rocm(
    *,
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: object,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: object,
    alibi_slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
    fp8_out_scale: Tensor | None,
    mtp: object,
    **without_effect: Any,
) -> Tensor:
    refuse_given(fp8_out_scale=fp8_out_scale)
    drop_without_effect(without_effect)
    return _attend(
        q=query,
        k=key_cache,
        v=value_cache,
        out=out,
        pages=pages_of_table("context_lens", context_lens, block_tables),
        queries=as_int("mtp", mtp),
        max_seqlen_k=max_context_len,
        softmax_scale=scale,
        alibi_slopes=alibi_slopes,
        q_descale=q_scale,
        k_descale=_of_tokens(k_scale),
        v_descale=_of_tokens(v_scale),
    )


@attends_in(
    _rocm,
    q="query",
    k="key_cache",
    v="value_cache",
    softmax_scale="scale",
    cu_seqlens_q="mtp",
    cu_seqlens_k="context_lens",
    max_seqlen_k="max_context_len",
    block_table="block_tables",
    q_descale="q_scale",
    k_descale="k_scale",
    v_descale="v_scale",
)
def paged_attention_rocm(
    out: Tensor, exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor,
    query: Tensor, key_cache: Tensor, value_cache: Tensor, num_kv_heads: int, scale: float,
    block_tables: Tensor, context_lens: Tensor, block_size: int, max_context_len: int,
    alibi_slopes: Tensor | None, kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
    fp8_out_scale: Tensor | None = None, partition_size: int = 256, mtp: int = 1,
    q_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`pa_decode_gluon` with the arguments of AITER's HIP kernel.

    Args:
        mtp: queries of each sequence.
        max_context_len: at least the longest of ``context_lens``.
        fp8_out_scale: None; others are refused.
        exp_sums, max_logits, tmp_out, num_kv_heads, block_size, kv_cache_dtype, partition_size: no
            effect.

    Returns:
        ``out``.
    """


def _common(
    *,
    Q: Tensor,  # noqa: N803 - AITER's name
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    block_tables: Tensor,
    context_lens: Tensor,
    scale: object,
    max_qlen: object,
    max_seq_len: object,
    K_QScale_hip: Tensor | None,  # noqa: N803
    V_QScale_hip: Tensor | None,  # noqa: N803
    K_QScale_asm: Tensor | None,  # noqa: N803
    V_QScale_asm: Tensor | None,  # noqa: N803
    out_: Tensor | None,
    qo_indptr: Tensor | None,
    **without_effect: Any,
) -> Tensor:
    drop_without_effect(without_effect)
    return attend_pages(
        q=Q,
        k=K,
        v=V,
        out=out_,
        pages=pages_of_table("context_lens", context_lens, block_tables),
        cu_seqlens_q=qo_indptr,
        max_seqlen_q=1 if qo_indptr is None else max_qlen,
        max_seqlen_k=max_seq_len,
        softmax_scale=scale,
        k_descale=_of_tokens(K_QScale_hip if K_QScale_asm is None else K_QScale_asm),
        v_descale=_of_tokens(V_QScale_hip if V_QScale_asm is None else V_QScale_asm),
    )[0]


_OF_PAGES = {
    "q": "Q",
    "k": "K",
    "v": "V",
    "out": "out_",
    "cu_seqlens_q": "qo_indptr",
    "cu_seqlens_k": "context_lens",
    "max_seqlen_q": "max_qlen",
}


@attends_in(
    _common,
    **_OF_PAGES,
    softmax_scale="scale",
    max_seqlen_k="max_seq_len",
    block_table="block_tables",
    k_descale="K_QScale_asm",
    v_descale="V_QScale_asm",
)
def paged_attention_common(
    Q: Tensor, K: Tensor, V: Tensor,  # noqa: N803
    exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor,
    block_tables: Tensor, context_lens: Tensor, block_tables_stride0: int, scale: float,
    max_qlen: int = 1, max_seq_len: int = 1,
    K_QScale_hip: Tensor | None = None, V_QScale_hip: Tensor | None = None,  # noqa: N803
    K_QScale_asm: Tensor | None = None, V_QScale_asm: Tensor | None = None,  # noqa: N803
    out_: Tensor | None = None, qo_indptr: Tensor | None = None,
    high_precision: int | None = 1, kernelName: str | None = None,  # noqa: N803
    kv_cache_dtype: str = "auto", kv_cache_tensor_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """:func:`jitfmha.aiter.pa_fwd_asm` with a scale.

    Args:
        max_seq_len: at least the longest of ``context_lens``.
        K_QScale_asm, V_QScale_asm: what 8-bit keys and values are multiplied with; where they are
            None, ``K_QScale_hip`` and ``V_QScale_hip``.
        exp_sums, max_logits, tmp_out, kv_cache_dtype, kv_cache_tensor_dtype: no effect.

    The other arguments and the result are those of :func:`jitfmha.aiter.pa_fwd_asm`.
    """


def _persistent(
    *,
    Q: Tensor,  # noqa: N803 - AITER's name
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    output: Tensor,
    max_qlen: object,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    context_lens: Tensor,
    K_QScale: Tensor | None,  # noqa: N803
    V_QScale: Tensor | None,  # noqa: N803
    softmax_scale: object,
    mask: object,
    **without_effect: Any,
) -> tuple[Tensor, Tensor]:
    drop_without_effect(without_effect)
    if not isinstance(K, Tensor) or not are_packed(K):
        raise ValueError(f"K is {describe(K)}; expected packed pages, of five dimensions")
    check_layout("K", K)
    page_size = shape_of_keys(K)[1]
    last = (int32_vector("context_lens", context_lens) - 1) % max(page_size, 1) + 1
    pages = lists_of_pages(kv_indptr, kv_indices, last, page_size)
    out, lse = attend_pages(
        q=Q,
        k=K,
        v=V,
        out=output,
        pages=pages,
        cu_seqlens_q=qo_indptr,
        max_seqlen_q=max_qlen,
        softmax_scale=softmax_scale,
        causal=as_int("mask", mask) != 0,
        k_descale=_of_pages(K_QScale, page_size),
        v_descale=_of_pages(V_QScale, page_size),
        with_lse=True,
    )
    assert lse is not None
    return out.new_empty(0, dtype=torch.float32), lse.T


def _of_pages(scale: Tensor | None, page_size: int) -> Tensor | None:
    """Scales ``(num_pages, hk)`` as those of tokens, which lie in one place; others likewise."""
    if isinstance(scale, Tensor) and scale.dim() == 2 and scale.numel() != 1:
        return scale[:, None, :, None].expand(-1, page_size, -1, -1)
    return _of_tokens(scale)


@ends_in(
    _persistent,
    **{**_OF_PAGES, "out": "output"},
    block_table="kv_indices",
    cu_seqlens_k_padded="kv_indptr",
    kv_page_indices="kv_indices",
    kv_last_page_lens="context_lens",
    k_descale="K_QScale",
    v_descale="V_QScale",
)
def pa_persistent_fwd(
    Q: Tensor, K: Tensor, V: Tensor, output: Tensor, max_qlen: int,  # noqa: N803
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, context_lens: Tensor,
    work_indptr: Tensor, work_info: Tensor, reduce_indptr: Tensor, reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    K_QScale: Tensor | None = None, V_QScale: Tensor | None = None,  # noqa: N803
    softmax_scale: float | None = None, mask: int = 0, quant_type: object = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed queries over packed pages in lists.

    Args:
        Q: ``(total_q, hq, hdim)``; K, V: packed pages, as :func:`jitfmha.fmha_fwd` takes them.
        output: where to write the result, ``(total_q, hq, hdim_v)``.
        qo_indptr: int32 ``(b + 1,)``, prefix sums of the numbers of queries, max_qlen at most.
        kv_indptr, kv_indices: the pages of each sequence, as
            :func:`jitfmha.aiter.mha_batch_prefill` has them.
        context_lens: int32 ``(b,)``, how many keys each sequence has.
        K_QScale, V_QScale: what 8-bit keys and values are multiplied with: one number, or
            ``(num_pages, hk, page_size)`` or ``(num_pages, hk)``; no effect on others.
        mask: 0 shows all keys to a query; with others it sees none behind its own.
        work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, quant_type: no
            effect.

    Returns:
        an empty tensor, there being no parts, and the lse, float32 ``(total_q, hq)``.
    """


@with_clear_errors
def get_pa_metadata_info_v1(batch_size: int, num_head_k: int = 1) -> Buffers:
    """Shapes and dtypes of what :func:`get_pa_metadata_v1` fills in, whatever the arguments are."""
    as_int("num_head_k", num_head_k)
    sequences, dtype = as_int("batch_size", batch_size), torch.bfloat16
    return get_mla_metadata_info_v1(sequences, 1, 1, dtype, dtype, is_sparse=False)


@ends_in(_fill_nothing)
def get_pa_metadata_v1(
    seqlens_qo_indptr: Tensor, pages_kv_indptr: Tensor, context_lens: Tensor,
    num_heads_per_head_k: int, num_heads_k: int, is_causal: bool,
    work_metadata_ptrs: Tensor, work_indptr: Tensor, work_info: Tensor,
    reduce_indptr: Tensor, reduce_final_map: Tensor, reduce_partial_map: Tensor,
    kv_granularity: int = 16, block_size: int = 16, max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1, fast_mode: bool = True, topk: int = -1, max_split_per_batch: int = -1,
) -> None:  # fmt: skip
    """:func:`jitfmha.aiter.get_mla_metadata_v1` for :func:`pa_persistent_fwd`, likewise."""


# ---- Latents -------------------------------------------------------------------------------------


def _latents(
    *,
    q_nope: Tensor,
    q_pe: Tensor | None,
    kv_c: Tensor,
    o: Tensor,
    page_table: Tensor,
    seq_info: Tensor,
    sm_scale: object,
    k_pe: Tensor | None,
    kv_pe_offset: object,
    use_2d_view: object,
    kv_scale: object,
    min_kv_seq_len: object,
    return_lse: object,
    has_pe: object,
    attn_sink: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    refuse_given(k_pe=k_pe)
    as_int("min_kv_seq_len", min_kv_seq_len)
    with_pe = as_flag("has_pe", has_pe)
    queries = {"q_nope": q_nope, **({"q_pe": q_pe} if with_pe else {})}
    for name, x in {**queries, "o": o}.items():
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        check_layout(name, x)
        if x.dim() not in (3, 4) or x.shape[:-1] != q_nope.shape[:-1]:
            raise ValueError(
                f"{name} is {describe(x)}; q_nope is {describe(q_nope)}; expected (b, heads, n) or "
                "(b, s, heads, n), with another n each"
            )
    if isinstance(q_pe, Tensor) and with_pe and q_pe.dtype != q_nope.dtype:
        raise TypeError(f"q_pe has dtype {q_pe.dtype}, q_nope {q_nope.dtype}; expected the same")
    if with_pe and as_int("kv_pe_offset", kv_pe_offset) != q_nope.shape[-1]:
        raise ValueError(
            f"kv_pe_offset={kv_pe_offset!r}; the part of kv_c for q_pe starts behind that for "
            f"q_nope, which has {q_nope.shape[-1]} columns"
        )
    if not isinstance(kv_c, Tensor) or kv_c.dim() != 2:
        raise ValueError(f"kv_c is {describe(kv_c)}; expected (pages, columns)")
    scale = as_number("kv_scale", kv_scale)
    has_scale = kv_c.dtype in EIGHT_BIT_DTYPES
    if scale != 1 and not has_scale:
        raise ValueError(f"kv_scale={kv_scale!r}; kv_c is {describe(kv_c)}, which has no scale")
    sequences = len(q_nope)
    if as_flag("use_2d_view", use_2d_view) and with_pe:
        pages = pages_of_table("seq_info", seq_info, page_table)
    else:
        pages = lists_of_pages(seq_info, page_table, None, page_size=1)
    sums = pages["cu_seqlens_k"]
    if sums is None or len(sums) != sequences + 1:
        raise ValueError(f"seq_info is {describe(seq_info)}; q_nope has {sequences} sequences")
    is_of_rows = q_nope.dim() == 3
    q = torch.cat([x for x in queries.values() if x is not None], dim=-1)
    length = 1 if is_of_rows else q.shape[1]
    options: Options = {
        "softmax_scale": as_softmax_scale(sm_scale),
        "mask": 2,
        "sink": as_sink(attn_sink),
        "cu_seqlens_q": starts_in_batch(sequences, length, kv_c.device),
        "max_seqlen_q": length,
    }
    options |= pages
    if has_scale:
        options["k_descale"] = options["v_descale"] = torch.full(
            (1,), scale, dtype=torch.float32, device=kv_c.device
        )
    if is_of_rows and o.dtype == out_dtype_of(q.dtype):
        options["out"] = o
    of_rows = q if is_of_rows else q.flatten(0, 1)
    out, lse = mla_absorbed_fwd(of_rows, kv_c[:, None], o.shape[-1], return_lse=True, **options)
    if "out" not in options:
        written_to(o, out.view(o.shape))
    return o, lse.T.reshape(sequences, length, -1) if as_flag("return_lse", return_lse) else None


@ends_in(
    _latents,
    q="q_nope",
    k="kv_c",
    v="kv_c",
    latent="kv_c",
    out="o",
    rank="o",
    softmax_scale="sm_scale",
    sink="attn_sink",
    cu_seqlens_q="q_nope",
    cu_seqlens_k="seq_info",
    cu_seqlens_k_padded="seq_info",
    block_table="page_table",
    kv_indptr="seq_info",
    kv_page_indices="page_table",
    k_descale="kv_scale",
    v_descale="kv_scale",
)
def mla_gluon(
    q_nope: Tensor, q_pe: Tensor | None, kv_c: Tensor, o: Tensor,
    page_table: Tensor, seq_info: Tensor, sm_scale: float,
    k_pe: Tensor | None = None, kv_pe_offset: int = 512, use_2d_view: bool = True,
    kv_scale: float = 1.0, min_kv_seq_len: int = 1, return_lse: bool = False, has_pe: bool = True,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Latent attention of one query for each sequence, or of the last few, which are causal.

    Args:
        q_nope, q_pe: ``(b, h, rank)`` and ``(b, h, r)``, of several queries ``(b, s, h, ...)``.
        kv_c: ``(pages, rank + r)``, with a key in each page: the latent, then the positional key.
        o: where to write the result, ``(b, h, rank)`` or ``(b, s, h, rank)``.
        page_table, seq_info: int32 ``(b, most pages)``, and how many each sequence has, ``(b,)``;
            without ``use_2d_view`` all pages one after the other, and where those of each sequence
            start, ``(b + 1,)``.
        sm_scale: finite and > 0.
        kv_pe_offset: rank.
        kv_scale: what 8-bit latents are multiplied with; 1 with others.
        has_pe: False if queries are q_nope alone, and all of kv_c is latent. q_pe, kv_pe_offset and
            use_2d_view, which is False, are not looked at then.
        attn_sink: ``(h,)``, the ``sink`` of :func:`jitfmha.fmha_fwd`.
        k_pe: None; others are refused.
        min_kv_seq_len: no effect.

    Returns:
        ``(o, lse)``, lse being float32 ``(b, s, h)``, and None where ``return_lse`` does not ask
        for it.
    """
