"""AITER's functions for a few queries against keys in pages, as vLLM and SGLang call them.

Sources: ``aiter/ops/triton/attention/unified_attention.py`` and ``aiter/ops/attention.py`` of
github.com/ROCm/aiter. All end in :func:`jitfmha.fmha_fwd`, which splits keys by itself: workspaces,
partition sizes and names of kernels have no effect.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..call.interface import OFF
from ..layers.known_attention import attend_noted, note_left_out, noted
from ..layers.kv_cache import starts_in_batch
from ..layers.peer_values import (
    as_flag,
    as_int,
    as_lengths,
    as_sink,
    as_softcap,
    as_softmax_scale,
    as_window,
    attends_in,
    descales_of,
    drop_without_effect,
    has_8_bits,
    sums_of,
    window_pair,
    with_contiguous_rows,
    written_to,
)
from ..problem.arguments import Options
from ..problem.checks import check_layout, describe, not_a_tensor, refuse_given, require_cu_seqlens
from ..problem.dtypes import out_dtype_of
from .batch_prefill import lists_of_pages

OPERATORS = {
    "paged_attention_v1": (
        "(Tensor(a!) out, Tensor workspace_buffer, Tensor query, Tensor key_cache, "
        "Tensor value_cache, float scale, Tensor block_tables, Tensor? cu_query_lens, "
        "Tensor context_lens, int max_context_len, Tensor? alibi_slopes, str kv_cache_dtype, "
        "str kv_cache_layout, float logits_soft_cap, Tensor k_scale, Tensor v_scale, "
        "Tensor? fp8_out_scale=None, int partition_size=256, int mtp=1, int sliding_window=0) "
        "-> Tensor(a!)"
    ),
    "paged_attention_ragged": (
        "(Tensor(a!) out, Tensor workspace_buffer, Tensor query, Tensor key_cache, "
        "Tensor value_cache, float scale, Tensor kv_indptr, Tensor kv_page_indices, "
        "Tensor kv_last_page_lens, int block_size, int max_num_partitions, Tensor? alibi_slopes, "
        "str kv_cache_dtype, str kv_cache_layout, float logits_soft_cap, Tensor k_scale, "
        "Tensor v_scale, Tensor? fp8_out_scale=None, int partition_size=256, int mtp=1) "
        "-> Tensor(a!)"
    ),
}
"""What ``torch.ops.aiter`` has of these functions, with their schemas."""


def attend_pages(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    pages: Options,
    softmax_scale: object,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: object = 1,
    max_seqlen_k: object = None,
    causal: object = True,
    window: tuple[int, int] = (-1, -1),
    softcap: object = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    output_scale: Tensor | None = None,
    num_splits: int = 0,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Out, and lse where it is asked for.

    ``pages`` are what :func:`pages_of_table` or :func:`lists_of_pages` makes. There is one query
    for each sequence, or as many as ``cu_seqlens_q`` says. Scales have a meaning of 8-bit tensors
    only.
    """
    if not isinstance(q, Tensor):
        raise not_a_tensor("q", q)
    if cu_seqlens_q is None:
        sums = pages["cu_seqlens_k"]
        assert sums is not None
        cu_seqlens_q = starts_in_batch(sums.shape[0] - 1, 1, sums.device)
    options: Options = {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if as_flag("causal", causal) else 0,
        "window_size": window_pair(*window),
        "logit_softcap": as_softcap("logits_soft_cap", softcap) or OFF,
        "alibi_slopes": alibi_slopes,
        "sink": as_sink(sink),
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": as_int("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": None if max_seqlen_k is None else as_int("max_seqlen_k", max_seqlen_k),
        "num_splits": num_splits or OFF,
    }
    options |= pages
    options |= descales_of(q, k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    is_of_result = isinstance(out, Tensor) and out.dtype == out_dtype_of(q.dtype)
    if is_of_result and output_scale is None:
        options["out"] = out
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    is_written = out is None or "out" in options
    result, lse = attend_noted(q, k, v, options, return_lse=with_lse, is_all=is_written)
    if not is_written:
        result = written_to(out, result, output_scale)
    return result, lse


def attend_projected(
    *,
    Q: Tensor,  # noqa: N803 - AITER's name
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    output: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    max_seqlen_q: object,
    softmax_scale: object,
    is_causal: object,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """:func:`attend_pages` with lists of pages ``(num_pages, hk, hdim)``, which hold one key."""
    for name, x in (("K", K), ("V", V)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(f"{name} is {describe(x)}; expected (num_pages, heads, hdim)")
    return attend_pages(
        q=Q,
        k=K[:, None],
        v=V[:, None],
        out=output,
        pages=lists_of_pages(kv_indptr, kv_page_indices, None, page_size=1),
        cu_seqlens_q=qo_indptr,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=is_causal,
        q_descale=q_scale,
        k_descale=k_scale,
        v_descale=v_scale,
        with_lse=with_lse,
    )


NAMES_OF_PROJECTED = {
    "q": "Q",
    "k": "K",
    "v": "V",
    "out": "output",
    "cu_seqlens_q": "qo_indptr",
    "cu_seqlens_k": "kv_indptr",
    "cu_seqlens_k_padded": "kv_indptr",
    "block_table": "kv_page_indices",
    "q_descale": "q_scale",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "causal": "is_causal",
}
"""What errors of :func:`attend_projected` name, by the arguments that it has them of."""


def refuse_segments(skip_reduce: object) -> None:
    """A caller who wants to reduce segments finds none."""
    if as_flag("skip_reduce", skip_reduce):
        raise NotImplementedError("skip_reduce=True is not implemented yet: there are no segments")


def pages_of_table(name: str, lengths_k: Tensor, block_table: Tensor) -> Options:
    """The pages as ``fmha_fwd`` takes them, with lengths that are given under that name."""
    sums = sums_of(as_lengths(name, lengths_k))
    return {"cu_seqlens_k": sums, "block_table": with_contiguous_rows(block_table)}


def _unified(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
    window_size: object,
    q_scales: Tensor | None,
    qq_bias: Tensor | None,
    sinks: Tensor | None,
    shuffled_kv_cache: object,
    skip_reduce: object,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    output_scale: Tensor | None,
    out: Tensor,
    **others: Any,
) -> Tensor:
    refuse_given(q_scales=q_scales, qq_bias=qq_bias)
    require_cu_seqlens(cu_seqlens_q=cu_seqlens_q)
    refuse_segments(skip_reduce)
    as_flag("shuffled_kv_cache", shuffled_kv_cache)  # packed pages have five dimensions
    # AITER multiplies with them, whatever the dtypes. Frameworks pass ones.
    for factor in (_factor(q, "q_descale", q_descale), _factor(k, "k_descale", k_descale)):
        if factor is not None and isinstance(q, Tensor):
            q = (q * factor).to(q.dtype)
    of_v = _factor(k, "v_descale", v_descale)
    result, _ = attend_pages(
        q=q,
        k=k,
        v=v,
        out=out if of_v is None else None,
        cu_seqlens_q=cu_seqlens_q,
        pages=pages_of_table("seqused_k", seqused_k, block_table),
        window=as_window(window_size)[:2],
        sink=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        output_scale=output_scale,
        **others,
    )
    if of_v is not None:
        written_to(out, result * of_v, output_scale)
    return out


def _factor(x: Tensor, name: str, scale: Tensor | None) -> Tensor | None:
    """The first number of x's scale; None with 8 bits, and where it is seen to be 1."""
    if scale is None or has_8_bits(x):
        return None
    if not isinstance(scale, Tensor) or scale.numel() == 0:
        raise ValueError(f"{name} is {describe(scale)}; expected a tensor of one number")
    check_layout(name, scale)
    if _begins_with_1(scale):
        note_left_out(scale)
        return None
    return scale.reshape(-1)[:1].float()


@noted
def _begins_with_1(scale: Tensor) -> bool:
    if scale.device.type != "cpu":
        return False
    return bool((scale if scale.numel() == 1 else scale.reshape(-1)[0]).item() == 1)


@attends_in(_unified, cu_seqlens_k="seqused_k", sink="sinks", logits_soft_cap="softcap")
def unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor, max_seqlen_k: int,
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
    block_table: Tensor, softcap: float,
    q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
    q_scales: Tensor | None = None, alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None, qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    shuffled_kv_cache: bool = False, skip_reduce: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of packed queries over keys in pages: prefill, decoding and both in one batch.

    Args:
        q: ``(total_q, hq, hdim)``.
        k, v: ``(num_pages, page_size, hk, hdim)``, or packed pages, as :func:`jitfmha.fmha_fwd`
            takes them.
        out: where to write the result, ``(total_q, hq, hdim_v)``; of any dtype with output_scale,
            and of 16 or 32 bits without.
        cu_seqlens_q: int32 ``(b + 1,)``, prefix sums of the numbers of queries.
        seqused_k: int32 or int64 ``(b,)``, how many keys each sequence has.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        block_table: int32 ``(b, most pages)``.
        window_size: ``(left, right)``, a negative side being open.
        q_descale, k_descale, v_descale: what q, k and v are multiplied with: one number, or those
            of 8-bit tensors in the shapes of :func:`jitfmha.fmha_fwd`.
        output_scale: one number, which the result is divided by.
        sinks: ``(hq,)``.
        q_scales, qq_bias: None; others are refused, as is ``skip_reduce``.

    Returns:
        ``out``.
    """


def _classic(
    *,
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: object,
    logits_soft_cap: object,
    kv_cache_layout: object,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    fp8_out_scale: Tensor | None,
    mtp: object,
    **others: Any,
) -> Tensor:
    refuse_given(fp8_out_scale=fp8_out_scale)
    if as_int("mtp", mtp) != 1:
        raise NotImplementedError(f"mtp={mtp!r}: sequences of more than one query are not served")
    attend_pages(
        q=query,
        k=_rows_of_pages("key_cache", key_cache, kv_cache_layout),
        v=_rows_of_pages("value_cache", value_cache, kv_cache_layout),
        out=out,
        softmax_scale=scale,
        softcap=logits_soft_cap,
        k_descale=k_scale,
        v_descale=v_scale,
        **others,
    )
    return out


@noted
def _rows_of_pages(name: str, cache: Tensor, layout: object) -> Tensor:
    """A cache as ``(num_pages, page_size, hk, hdim)``."""
    if not isinstance(layout, str) or layout not in ("NHD", "HND"):
        raise ValueError(f"kv_cache_layout={layout!r} is not known; use 'NHD' or 'HND'")
    if not isinstance(cache, Tensor) or cache.dim() != 4:
        raise ValueError(f"{name} is {describe(cache)}; expected four dimensions")
    return cache if layout == "NHD" else cache.transpose(1, 2)


def _v1(
    *,
    query: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_context_len: object,
    cu_query_lens: Tensor | None,
    sliding_window: object,
    **others: Any,
) -> Tensor:
    drop_without_effect(others, "workspace_buffer", "kv_cache_dtype", "partition_size")
    if cu_query_lens is not None:
        # vLLM passes where each query is, without where the last one ends.
        check_layout("cu_query_lens", as_lengths("cu_query_lens", cu_query_lens))
        note_left_out(cu_query_lens)
    window = as_int("sliding_window", sliding_window)
    return _classic(
        query=query,
        pages=pages_of_table("context_lens", context_lens, block_tables),
        max_seqlen_k=max_context_len,
        window=(window - 1, 0) if window > 0 else (-1, -1),
        **others,
    )


def _ragged(
    *,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    kv_last_page_lens: Tensor | None,
    block_size: object,
    **others: Any,
) -> Tensor:
    without_effect = "workspace_buffer", "kv_cache_dtype", "partition_size", "max_num_partitions"
    drop_without_effect(others, *without_effect)
    page_size = as_int("block_size", block_size)
    pages = lists_of_pages(kv_indptr, kv_page_indices, kv_last_page_lens, page_size)
    return _classic(pages=pages, **others)


_CLASSIC_NAMES = {
    "q": "query",
    "k": "key_cache",
    "v": "value_cache",
    "softmax_scale": "scale",
    "max_seqlen_k": "max_context_len",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
}


@attends_in(_v1, **_CLASSIC_NAMES, block_table="block_tables", cu_seqlens_k="context_lens")
def paged_attention_v1(
    out: Tensor, workspace_buffer: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor,
    scale: float, block_tables: Tensor, cu_query_lens: Tensor | None, context_lens: Tensor,
    max_context_len: int, alibi_slopes: Tensor | None, kv_cache_dtype: str, kv_cache_layout: str,
    logits_soft_cap: float, k_scale: Tensor, v_scale: Tensor,
    fp8_out_scale: Tensor | None = None, partition_size: int = 256, mtp: int = 1,
    sliding_window: int = 0,
) -> Tensor:  # fmt: skip
    """Attention of one query for each sequence over keys in pages that a block table names.

    Args:
        out: where to write the result, ``(b, hq, hdim_v)``.
        query: ``(b, hq, hdim)``, the query of each sequence in its row.
        key_cache, value_cache: ``(num_pages, page_size, hk, hdim)`` where ``kv_cache_layout`` is
            "NHD", and ``(num_pages, hk, page_size, hdim)`` where it is "HND".
        scale: what scores are multiplied with.
        block_tables: int32 ``(b, most pages)``.
        context_lens: int32 or int64 ``(b,)``, how many keys each sequence has.
        max_context_len: at least the longest of them.
        alibi_slopes, logits_soft_cap: as in :func:`jitfmha.aiter.flash_attn_varlen_func`.
        k_scale, v_scale: what 8-bit keys and values are multiplied with; no effect on others.
        sliding_window: how many of the last keys are seen; 0 for all.
        fp8_out_scale, mtp: None and 1; others are refused.
        workspace_buffer, cu_query_lens, kv_cache_dtype, partition_size: no effect.

    Returns:
        ``out``.
    """


@attends_in(
    _ragged,
    **_CLASSIC_NAMES,
    block_table="kv_page_indices",
    cu_seqlens_k="kv_indptr",
    cu_seqlens_k_padded="kv_indptr",
)
def paged_attention_ragged(
    out: Tensor, workspace_buffer: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor,
    scale: float, kv_indptr: Tensor, kv_page_indices: Tensor, kv_last_page_lens: Tensor | None,
    block_size: int, max_num_partitions: int, alibi_slopes: Tensor | None, kv_cache_dtype: str,
    kv_cache_layout: str, logits_soft_cap: float, k_scale: Tensor, v_scale: Tensor,
    fp8_out_scale: Tensor | None = None, partition_size: int = 256, mtp: int = 1,
) -> Tensor:  # fmt: skip
    """:func:`paged_attention_v1` with pages in lists, as
    :func:`jitfmha.aiter.mha_batch_prefill` has them.

    block_size: keys of a page. With 1 ``kv_last_page_lens`` is not looked at.
    max_num_partitions: no effect.
    """


def _asm(
    *,
    Q: Tensor,  # noqa: N803 - AITER's name
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    block_tables: Tensor,
    context_lens: Tensor,
    max_qlen: object,
    K_QScale: Tensor | None,  # noqa: N803
    V_QScale: Tensor | None,  # noqa: N803
    out_: Tensor | None,
    qo_indptr: Tensor | None,
    **others: Any,
) -> Tensor:
    drop_without_effect(others, "block_tables_stride0", "high_precision", "kernelName")
    return attend_pages(
        q=Q,
        k=K,
        v=V,
        out=out_,
        pages=pages_of_table("context_lens", context_lens, block_tables),
        cu_seqlens_q=qo_indptr,
        max_seqlen_q=1 if qo_indptr is None else max_qlen,
        softmax_scale=None,
        k_descale=scales_of_tokens(K_QScale),
        v_descale=scales_of_tokens(V_QScale),
        **others,
    )[0]


@noted
def scales_of_tokens(scale: Tensor | None) -> Tensor | None:
    """Scales ``(num_pages, hk, page_size)`` as ``fmha_fwd`` takes them; others as they are."""
    if isinstance(scale, Tensor) and scale.dim() == 3:
        return scale.transpose(1, 2)[..., None]
    return scale


@attends_in(
    _asm,
    q="Q",
    k="K",
    v="V",
    out="out_",
    block_table="block_tables",
    cu_seqlens_q="qo_indptr",
    cu_seqlens_k="context_lens",
    max_seqlen_q="max_qlen",
    k_descale="K_QScale",
    v_descale="V_QScale",
)
def pa_fwd_asm(
    Q: Tensor, K: Tensor, V: Tensor,  # noqa: N803
    block_tables: Tensor, context_lens: Tensor, block_tables_stride0: int, max_qlen: int = 1,
    K_QScale: Tensor | None = None, V_QScale: Tensor | None = None,  # noqa: N803
    out_: Tensor | None = None, qo_indptr: Tensor | None = None,
    high_precision: int | None = 1, kernelName: str | None = None,  # noqa: N803
) -> Tensor:  # fmt: skip
    """Attention over packed pages, causal, scaled by ``1 / sqrt(hdim)``.

    Args:
        Q: ``(b, hq, hdim)``, a query for each sequence; with qo_indptr ``(total_q, hq, hdim)``.
        K, V: packed pages, of five dimensions, as :func:`jitfmha.fmha_fwd` takes them.
        block_tables: int32 ``(b, most pages)``; block_tables_stride0 has no effect.
        context_lens: int32 or int64 ``(b,)``, how many keys each sequence has.
        max_qlen: the most queries of a sequence, where qo_indptr is given.
        K_QScale, V_QScale: ``(num_pages, hk, page_size)``, what 8-bit keys and values are
            multiplied with; no effect on others.
        out_: where to write the result.
        qo_indptr: int32 ``(b + 1,)``, prefix sums of the numbers of queries.
        high_precision, kernelName: no effect.

    Returns:
        out ``(b, hq, hdim_v)``, or ``(total_q, hq, hdim_v)``.
    """
