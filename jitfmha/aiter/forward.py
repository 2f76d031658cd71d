"""AITER's functions for the forward pass. They end in :func:`jitfmha.fmha_fwd`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from ..call.interface import OFF, fmha_fwd
from ..layers.kv_cache import starts_in_batch
from ..layers.peer_values import (
    as_flag,
    as_int,
    as_softcap,
    as_window,
    check_num_splits,
    with_contiguous_rows,
)
from ..problem.checks import describe, require_cu_seqlens, with_keyword_advice
from ..problem.dropout import dropout_randval, new_rng_state
from ..problem.memory import write_zeros
from ..problem.packed_rows import sequences_of_rows
from .common_arguments import (
    as_v3_bf16_cvt,
    bias_with_dimensions,
    clipped,
    common_options,
    window_of_sides,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.arguments import Options

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, p, rng_state
Attention = Tensor | tuple[Tensor, ...]


@with_keyword_advice
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    num_splits: int = 0,
) -> Attention:
    """Attention over a batch of sequences.

    Args:
        window_size: ``(left, right)`` or ``(left, right, sink_size)``, also as a list, a tensor or
            an array.
        cu_seqlens_q, cu_seqlens_kv: int32 or int64 ``(b + 1,)``, prefix sums of the lengths where
            sequences are shorter than their place in the batch.

    The other arguments, and what is raised: see the module.

    Returns:
        out ``(b, sq, hq, hdim_v)``; or a tuple with, after it, softmax_lse, float32
        ``(b, hq, sq)``, where ``return_lse`` asks for it, and an empty tensor, as AITER returns
        without dropout, where ``return_attn_probs`` does.
    """
    as_flag("deterministic", deterministic)
    check_num_splits(num_splits)
    return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    return_lse = as_flag("return_lse", return_lse)
    options = common_options(
        dropout_p, softmax_scale, as_flag("causal", causal), as_window(window_size)
    )
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    results = _forward_batch(
        *(q, k, v, (cu_seqlens_q, cu_seqlens_kv)),
        return_lse=return_lse,
        return_randval=return_attn_probs and options["dropout_p"] > 0,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=as_sink(sink_ptr),
        bf16_cvt=as_v3_bf16_cvt(how_v3_bf16_cvt),
        **options,
    )
    return asked_for(results, return_lse, return_attn_probs)


@with_keyword_advice
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> Attention:
    """Attention over sequences of different lengths, packed one after the other.

    Args:
        window_size: as for :func:`flash_attn_func`.
        out: where to write the result, ``(total_q, hq, hdim_v)``.

    The arguments of the sequences are those of :func:`mha_varlen_fwd`; for the others, and for what
    is raised, see the module.

    Returns:
        as :func:`flash_attn_func`, with out ``(total_q, hq, hdim_v)`` and softmax_lse
        ``(hq, total_q)``.
    """
    as_flag("deterministic", deterministic)
    return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    return_lse = as_flag("return_lse", return_lse)
    options = common_options(
        dropout_p, softmax_scale, as_flag("causal", causal), as_window(window_size)
    )
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    results = forward_group(
        *(q, k, v),
        return_lse=return_lse,
        return_randval=return_attn_probs and options["dropout_p"] > 0,
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
        min_seqlen_q=as_int("min_seqlen_q", min_seqlen_q),
        block_table=block_table,
        logit_softcap=as_softcap("logits_soft_cap", logits_soft_cap) or OFF,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=as_sink(sink_ptr),
        bf16_cvt=as_v3_bf16_cvt(how_v3_bf16_cvt),
        **options,
    )
    return asked_for(results, return_lse, return_attn_probs)


@with_keyword_advice
def mha_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    sink_size: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    gen: Generator | None = None,
) -> Results:
    """Attention over a batch of sequences.

    Args:
        cu_seqlens_q, cu_seqlens_kv: as for :func:`flash_attn_func`. Rows of ``out`` behind the end
            of a sequence stay as they are.
        out: where to write the result, ``(b, sq, hq, hdim_v)``.

    The other arguments, and what is raised: see the module.

    Returns:
        ``(out, softmax_lse, p, rng_state)``: lse float32 ``(b, hq, sq)``, or empty where it was not
        asked for; p the dropout's random values, empty; rng_state int64 ``(2,)``, zero without
        dropout.
    """
    window = window_of_sides(window_size_left, window_size_right, sink_size)
    options = common_options(dropout_p, softmax_scale, as_flag("is_causal", is_causal), window)
    return _forward_batch(
        *(q, k, v, (cu_seqlens_q, cu_seqlens_kv)),
        return_lse=as_flag("return_softmax_lse", return_softmax_lse),
        return_randval=as_return_randval(return_dropout_randval, options["dropout_p"]),
        gen=gen,
        out=out,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=as_sink(sink_ptr),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        **options,
    )


@with_keyword_advice
def mha_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int,
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
    block_table: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> Results:
    """Attention over sequences of different lengths, packed one after the other.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 ``(b + 1,)``, prefix sums of the lengths, from 0.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        min_seqlen_q: where it is above 0, sequences with at most so many queries are skipped: their
            rows are 0 in a fresh output and -inf in the lse, and stay as they are in ``out``.
        zero_tensors: also set the rows of ``out`` to 0 that belong to no sequence. A fresh output
            has them 0 in any case.
        out: where to write the result, ``(total_q, hq, hdim_v)``.
        cu_seqlens_q_padded, cu_seqlens_k_padded: int32 ``(b + 1,)``, where each sequence starts if
            there are unused rows between them.
        block_table: int32 ``(b, most pages)``, the pages of each sequence, where k and v are
            ``(num_pages, page_size, hk, hdim)``, with any page size.

    The other arguments, and what is raised: see the module.

    Returns:
        ``(out, softmax_lse, p, rng_state)`` as :func:`mha_fwd`, with lse ``(hq, total_q)``.
    """
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
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
        min_seqlen_q=as_int("min_seqlen_q", min_seqlen_q),
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


@with_keyword_advice
def fmha_v3_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    how_v3_bf16_cvt: int,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
) -> Results:
    """:func:`mha_fwd` without sinks and prefix sums, and with a choice of rounding."""
    window = window_of_sides(window_size_left, window_size_right)
    options = common_options(dropout_p, softmax_scale, as_flag("is_causal", is_causal), window)
    return _forward_batch(
        *(q, k, v, (None, None)),
        return_lse=as_flag("return_softmax_lse", return_softmax_lse),
        return_randval=as_return_randval(return_dropout_randval, options["dropout_p"]),
        gen=gen,
        out=out,
        bias=bias,
        alibi_slopes=alibi_slopes,
        bf16_cvt=as_v3_bf16_cvt(how_v3_bf16_cvt),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        **options,
    )


@with_keyword_advice
def fmha_v3_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float,
    softmax_scale: float | None,
    logits_soft_cap: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    how_v3_bf16_cvt: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
) -> Results:
    """:func:`mha_varlen_fwd` without sinks, and with a choice of rounding."""
    window = window_of_sides(window_size_left, window_size_right)
    options = common_options(dropout_p, softmax_scale, as_flag("is_causal", is_causal), window)
    return forward_group(
        *(q, k, v),
        return_lse=as_flag("return_softmax_lse", return_softmax_lse),
        return_randval=as_return_randval(return_dropout_randval, options["dropout_p"]),
        gen=gen,
        zero_tensors=as_flag("zero_tensors", zero_tensors),
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
        min_seqlen_q=as_int("min_seqlen_q", min_seqlen_q),
        block_table=block_table,
        logit_softcap=as_softcap("logits_soft_cap", logits_soft_cap) or OFF,
        bias=bias,
        alibi_slopes=alibi_slopes,
        bf16_cvt=as_v3_bf16_cvt(how_v3_bf16_cvt),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        **options,
    )


def as_sink(sink_ptr: Tensor | None) -> Tensor | None:
    """The logits in float32, as AITER converts them; what is no tensor is refused later."""
    if isinstance(sink_ptr, Tensor) and sink_ptr.dtype in (torch.bfloat16, torch.float16):
        return sink_ptr.float()
    return sink_ptr


def as_return_randval(return_dropout_randval: object, dropout_p: float) -> bool:
    """A flag, which asks for nothing without dropout."""
    flag = as_flag("return_dropout_randval", return_dropout_randval)
    if flag and dropout_p == 0:
        raise ValueError(
            f"return_dropout_randval={return_dropout_randval!r}: there are no random values "
            "without dropout"
        )
    return flag


# ---- The calls -----------------------------------------------------------------------------------


def _forward_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    *,
    return_lse: bool,
    return_randval: bool,
    gen: Generator | None = None,
    **options: Unpack[Options],
) -> Results:
    options["bias"] = bias_with_dimensions(options.get("bias"), 4)
    if cu_seqlens != (None, None):
        return _forward_padded_batch(
            *(q, k, v, cu_seqlens),
            return_lse=return_lse,
            return_randval=return_randval,
            gen=gen,
            **options,
        )
    seqlen_k = k.shape[1] if isinstance(k, Tensor) and k.dim() > 1 else 0
    options["window_size"] = clipped(options["window_size"], seqlen_k)
    rng_state = options["rng_state"] = _new_rng_state(q, options["dropout_p"], gen)
    result = fmha_fwd(q, k, v, return_lse=return_lse, **options)
    randval = None
    if rng_state is not None and return_randval:
        randval = dropout_randval(rng_state, q.shape[0], q.shape[2], q.shape[1], seqlen_k)
    return _results(q, result, randval, rng_state)


def _forward_padded_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    *,
    return_lse: bool,
    return_randval: bool,
    gen: Generator | None,
    **options: Unpack[Options],
) -> Results:
    """Sequences that are shorter than their place in the batch: gm1 with padding between them."""
    for name, x in (("q", q), ("k", k), ("v", v), ("out", options.get("out"))):
        if x is not None and (not isinstance(x, Tensor) or x.dim() != 4):
            raise ValueError(f"{name} is {describe(x)}; expected (batch, seqlen, heads, hdim)")
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k = k.shape[1]
    (cu_seqlens_q, cu_seqlens_kv), out = cu_seqlens, options.get("out")
    places_q = starts_in_batch(batch, seqlen_q, q.device)
    places_k = starts_in_batch(batch, seqlen_k, k.device)
    bias = options["bias"]
    if bias is not None:
        # One row for each row of the packed q.
        rows = bias.expand(batch, -1, seqlen_q, -1).transpose(0, 1)
        options["bias"] = rows.reshape(-1, batch * seqlen_q, bias.shape[-1])
    if out is not None:
        options["out"] = _rows_of_batch(out)
    options["cu_seqlens_q"] = places_q if cu_seqlens_q is None else _as_int32(cu_seqlens_q)
    options["cu_seqlens_k"] = places_k if cu_seqlens_kv is None else _as_int32(cu_seqlens_kv)
    options["cu_seqlens_q_padded"], options["cu_seqlens_k_padded"] = places_q, places_k
    options["max_seqlen_q"], options["max_seqlen_k"] = seqlen_q, seqlen_k
    packed_out, lse, _, rng_state = forward_group(
        *(x.flatten(0, 1) for x in (q, k, v)),
        return_lse=return_lse,
        return_randval=False,
        gen=gen,
        **options,
    )
    randval = q.new_empty(0)
    if return_randval:
        randval = dropout_randval(rng_state, batch, heads_q, seqlen_q, seqlen_k)
    if return_lse:
        lse = lse.view(heads_q, batch, seqlen_q).transpose(0, 1)
    full_out = packed_out.view(batch, seqlen_q, *packed_out.shape[1:])
    return full_out if out is None else out, lse, randval, rng_state


def _rows_of_batch(out: Tensor) -> Tensor:
    """A view of ``out (b, sq, hq, hdim_v)`` in which the sequences lie one after the other."""
    if out.shape[0] > 1 and out.stride(0) != out.shape[1] * out.stride(1):
        raise ValueError(
            f"out has strides {out.stride()}; with cu_seqlens_q or cu_seqlens_kv its sequences lie "
            "one after the other"
        )
    return out.flatten(0, 1)


def forward_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    return_randval: bool,
    gen: Generator | None = None,
    zero_tensors: bool = False,
    min_seqlen_q: int = 0,
    **options: Unpack[Options],
) -> Results:
    """What all functions of packed sequences end in."""
    max_seqlen_q, max_seqlen_k = options["max_seqlen_q"], options["max_seqlen_k"]
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    cu_seqlens_q = options["cu_seqlens_q"]
    # Without any of the four, fmha_fwd would take the call for one of batch mode.
    require_cu_seqlens(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=options["cu_seqlens_k"])
    assert cu_seqlens_q is not None
    _skip_short_sequences(options, min_seqlen_q)
    cu_seqlens_q = options["cu_seqlens_q"]
    assert cu_seqlens_q is not None
    cu_seqlens_q_padded = options.get("cu_seqlens_q_padded")
    options["window_size"] = clipped(options["window_size"], max_seqlen_k)
    options["bias"] = bias_with_dimensions(options.get("bias"), 3)
    rng_state = options["rng_state"] = _new_rng_state(q, options["dropout_p"], gen)
    result = fmha_fwd(q, k, v, return_lse=return_lse, **options)
    starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    out = options.get("out")
    if zero_tensors and out is not None:
        sequence, within, is_used = sequences_of_rows(out.shape[0], cu_seqlens_q, starts)
        write_zeros(out, ~is_used[:, None, None])
    randval = None
    if rng_state is not None and return_randval:
        batch = cu_seqlens_q.shape[0] - 1
        whole = dropout_randval(rng_state, batch, q.shape[1], max_seqlen_q, max_seqlen_k)
        sequence, within, is_used = sequences_of_rows(q.shape[0], cu_seqlens_q, starts)
        rows = whole[sequence, :, within.clamp(max=max_seqlen_q - 1)]
        randval = rows.masked_fill(~is_used[:, None, None], 0).transpose(0, 1)
    return _results(q, result, randval, rng_state)


def _skip_short_sequences(options: Options, min_seqlen_q: int) -> None:
    """Sequences of at most ``min_seqlen_q`` queries have none; their rows stay where they are."""
    if min_seqlen_q < 0:
        raise ValueError(f"min_seqlen_q={min_seqlen_q} must not be negative")
    cu_seqlens_q = options["cu_seqlens_q"]
    if min_seqlen_q == 0 or not isinstance(cu_seqlens_q, Tensor) or cu_seqlens_q.dim() != 1:
        return
    lengths = cu_seqlens_q.diff()
    # No length is larger than an int32.
    lengths = lengths.masked_fill(lengths <= min(min_seqlen_q, 2**31 - 1), 0)
    sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=cu_seqlens_q.dtype), (1, 0))
    if options.get("cu_seqlens_q_padded") is None:
        options["cu_seqlens_q_padded"] = cu_seqlens_q
    options["cu_seqlens_q"] = sums


def _as_int32(cu_seqlens: Tensor) -> Tensor:
    is_int64 = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype == torch.int64
    return cu_seqlens.int() if is_int64 else cu_seqlens


def _new_rng_state(q: Tensor, dropout_p: float, gen: Generator | None) -> Tensor | None:
    if gen is not None and not isinstance(gen, Generator):
        raise TypeError(f"gen must be a torch.Generator, got {type(gen).__name__} ({gen!r})")
    if dropout_p == 0 or not isinstance(q, Tensor):
        return None
    return new_rng_state(q.device, generator=gen)


def _results(
    q: Tensor,
    result: Tensor | tuple[Tensor, Tensor],
    randval: Tensor | None,
    rng_state: Tensor | None,
) -> Results:
    """AITER's four results; what was not asked for is empty, or 0."""
    if isinstance(result, Tensor):
        out, lse = result, q.new_empty(0, dtype=torch.float32)
    else:
        out, lse = result
    randval = q.new_empty(0) if randval is None else randval
    rng_state = q.new_zeros(2, dtype=torch.int64) if rng_state is None else rng_state
    return out, lse, randval, rng_state


def asked_for(results: Results, return_lse: bool, return_attn_probs: bool) -> Attention:
    """What the functions that models call return of the four results."""
    out, lse, randval, _ = results
    if not return_lse and not return_attn_probs:
        return out
    return (out, *((lse,) if return_lse else ()), *((randval,) if return_attn_probs else ()))
