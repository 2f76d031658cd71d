"""AITER's functions for the forward pass. They end in :func:`jitfmha.fmha_fwd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from ..layers.known_attention import attend_noted
from ..layers.kv_cache import starts_in_batch
from ..layers.peer_values import (
    as_dropout_p,
    as_flag,
    as_int,
    as_window,
    attends_in,
    check_num_splits,
    ends_in,
    with_contiguous_rows,
)
from ..problem.arguments import AttentionOptions
from ..problem.checks import check_given, describe, require_cu_seqlens
from ..problem.dropout import dropout_randval, new_rng_state
from ..problem.memory import write_zeros
from ..problem.packed_rows import sequences_of_rows
from .common_arguments import common_options, length_of

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, p, rng_state
Attention = Tensor | tuple[Tensor, ...]
# The same, with None in place of what was not asked for.
Found = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


# ---- What they end in ----------------------------------------------------------------------------


def with_all_results(core: Callable[..., Found]) -> Callable[..., Results]:
    """``core`` with AITER's four results; what was not asked for is empty, or 0."""

    def call(**given: Any) -> Results:
        out, lse, randval, rng_state = core(**given)
        q: Tensor = given["q"]
        return (
            out,
            q.new_empty(0, dtype=torch.float32) if lse is None else lse,
            q.new_empty(0) if randval is None else randval,
            q.new_zeros(2, dtype=torch.int64) if rng_state is None else rng_state,
        )

    return call


def called_by_models(core: Callable[..., Found]) -> Callable[..., Any]:
    """``core`` for the functions that models call, with their arguments and results."""

    def call(
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: object,
        window_size: object,
        dropout_p: object = 0.0,
        sink_size: object = None,
        deterministic: object = False,
        num_splits: object = 0,
        return_lse: object = False,
        return_attn_probs: object = False,
        **others: Any,
    ) -> Attention:
        check_num_splits(num_splits)
        with_probs = as_flag("return_attn_probs", return_attn_probs)
        with_lse = as_flag("return_lse", return_lse)
        left, right, sinks = as_window(window_size)
        out, lse, randval, _ = core(
            q=with_contiguous_rows(q),
            k=with_contiguous_rows(k),
            v=with_contiguous_rows(v),
            is_causal=as_flag("causal", causal),
            window_size_left=left,
            window_size_right=right,
            sink_size=sinks if sink_size is None else sink_size,
            dropout_p=dropout_p,
            # False leaves the choice to torch's own setting.
            deterministic=as_flag("deterministic", deterministic) or None,
            return_softmax_lse=with_lse,
            return_dropout_randval=with_probs and as_dropout_p(dropout_p) > 0,
            **others,
        )
        if not with_lse and not with_probs:
            return out
        if with_probs and randval is None:
            randval = q.new_empty(0)
        return (out, *((lse,) if with_lse else ()), *((randval,) if with_probs else ()))

    return call


def forward_batch(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    return_softmax_lse: object,
    return_dropout_randval: object,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    out: Tensor | None = None,
    gen: Generator | None = None,
    **given: Any,
) -> Found:
    """What all functions of a batch end in; ``given`` is what ``common_options`` takes."""
    seqlen_k = length_of(k)
    options = common_options(longest_keys=seqlen_k, bias_dimensions=4, **given)
    return_lse = as_flag("return_softmax_lse", return_softmax_lse)
    return_randval = _as_return_randval(return_dropout_randval, options["dropout_p"])
    if cu_seqlens_q is not None or cu_seqlens_kv is not None:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = cu_seqlens_q, cu_seqlens_kv
        return _padded_batch(q, k, v, options, return_lse, return_randval, out, gen)
    rng_state = options["rng_state"] = _new_rng_state(q, options["dropout_p"], gen)
    found = attend_noted(q, k, v, {**options, "out": out}, return_lse=return_lse)
    randval = None
    if rng_state is not None and return_randval:
        randval = dropout_randval(rng_state, q.shape[0], q.shape[2], q.shape[1], seqlen_k)
    return *found, randval, rng_state


def _padded_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    return_lse: bool,
    return_randval: bool,
    out: Tensor | None,
    gen: Generator | None,
) -> Found:
    """Sequences that are shorter than their place in the batch: gm1 with padding between them."""
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if x is not None and (not isinstance(x, Tensor) or x.dim() != 4):
            raise ValueError(f"{name} is {describe(x)}; expected (batch, seqlen, heads, hdim)")
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k = k.shape[1]
    places_q = starts_in_batch(batch, seqlen_q, q.device)
    places_k = starts_in_batch(batch, seqlen_k, k.device)
    bias = options["bias"]
    if bias is not None:
        check_given("bias", bias, q)
        full = batch, q.shape[2], seqlen_q
        if bias.dim() != 4 or any(n not in (1, f) for n, f in zip(bias.shape, full, strict=False)):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; expected {(*full, seqlen_k)}")
        # One row for each row of the packed q.
        rows = bias.expand(batch, -1, seqlen_q, -1).transpose(0, 1)
        options["bias"] = rows.reshape(-1, batch * seqlen_q, bias.shape[-1])
    options["cu_seqlens_q"] = _as_int32(options["cu_seqlens_q"], places_q)
    options["cu_seqlens_k"] = _as_int32(options["cu_seqlens_k"], places_k)
    options["cu_seqlens_q_padded"], options["cu_seqlens_k_padded"] = places_q, places_k
    options["max_seqlen_q"], options["max_seqlen_k"] = seqlen_q, seqlen_k
    packed_q, packed_k, packed_v = (x.flatten(0, 1) for x in (q, k, v))
    packed_out, lse, _, rng_state = _group(
        *(packed_q, packed_k, packed_v, options),
        return_lse=return_lse,
        out=None if out is None else _rows_of_batch(out),
        gen=gen,
    )
    randval = None
    if return_randval and rng_state is not None:
        randval = dropout_randval(rng_state, batch, heads_q, seqlen_q, seqlen_k)
    if lse is not None:
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
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: object,
    max_seqlen_k: object,
    return_softmax_lse: object,
    return_dropout_randval: object,
    min_seqlen_q: object = 0,
    zero_tensors: object = False,
    out: Tensor | None = None,
    gen: Generator | None = None,
    **given: Any,
) -> Found:
    """What all functions of packed sequences end in; ``given`` as in :func:`forward_batch`."""
    longest_k = as_int("max_seqlen_k", max_seqlen_k)
    options = common_options(longest_keys=longest_k, bias_dimensions=3, **given)
    options["max_seqlen_q"] = as_int("max_seqlen_q", max_seqlen_q)
    options["max_seqlen_k"] = longest_k
    return _group(
        *(q, k, v, options),
        return_lse=as_flag("return_softmax_lse", return_softmax_lse),
        return_randval=_as_return_randval(return_dropout_randval, options["dropout_p"]),
        zero_tensors=as_flag("zero_tensors", zero_tensors),
        # None is what vLLM says where it knows nothing.
        min_seqlen_q=0 if min_seqlen_q is None else as_int("min_seqlen_q", min_seqlen_q),
        out=out,
        gen=gen,
    )


def _group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    return_lse: bool,
    return_randval: bool = False,
    zero_tensors: bool = False,
    min_seqlen_q: int = 0,
    out: Tensor | None,
    gen: Generator | None,
) -> Found:
    # Without any of the four, fmha_fwd would take the call for one of batch mode.
    require_cu_seqlens(cu_seqlens_q=options["cu_seqlens_q"], cu_seqlens_k=options["cu_seqlens_k"])
    _skip_short_sequences(options, min_seqlen_q)
    cu_seqlens_q = options["cu_seqlens_q"]
    max_seqlen_q, max_seqlen_k = options["max_seqlen_q"], options["max_seqlen_k"]
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    cu_seqlens_q_padded = options.get("cu_seqlens_q_padded")
    rng_state = options["rng_state"] = _new_rng_state(q, options["dropout_p"], gen)
    given = {**options, "out": out}
    found = attend_noted(q, k, v, given, return_lse=return_lse, is_all=not zero_tensors)
    starts = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
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
    return *found, randval, rng_state


def _skip_short_sequences(options: AttentionOptions, min_seqlen_q: int) -> None:
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


def _as_int32(cu_seqlens: Tensor | None, places: Tensor) -> Tensor:
    if cu_seqlens is None:
        return places
    is_int64 = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype == torch.int64
    return cu_seqlens.int() if is_int64 else cu_seqlens


def _new_rng_state(q: Tensor, dropout_p: float, gen: Generator | None) -> Tensor | None:
    if gen is not None and not isinstance(gen, Generator):
        raise TypeError(f"gen must be a torch.Generator, got {type(gen).__name__} ({gen!r})")
    if dropout_p == 0 or not isinstance(q, Tensor):
        return None
    return new_rng_state(q.device, generator=gen)


def _as_return_randval(return_dropout_randval: object, dropout_p: float) -> bool:
    """A flag, which asks for nothing without dropout."""
    flag = as_flag("return_dropout_randval", return_dropout_randval)
    if flag and dropout_p == 0:
        raise ValueError(
            f"return_dropout_randval={return_dropout_randval!r}: there are no random values "
            "without dropout"
        )
    return flag


OWN_NAMES = {"sink": "sink_ptr", "logit_softcap": "logits_soft_cap"}
"""What AITER's functions call the arguments of ``fmha_fwd`` that have another name there."""
OF_BATCH = {**OWN_NAMES, "cu_seqlens_k": "cu_seqlens_kv"}

# ---- The functions -------------------------------------------------------------------------------


@attends_in(called_by_models(forward_batch), **OF_BATCH)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    deterministic: bool = True, return_lse: bool = False, return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
    sink_ptr: Tensor | None = None, num_splits: int = 0,
) -> Attention:  # fmt: skip
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


@attends_in(called_by_models(forward_group), **OWN_NAMES)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0, softmax_scale: float | None = None, logits_soft_cap: float = 0.0,
    causal: bool = False, window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_lse: bool = False, return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    block_table: Tensor | None = None, out: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    *,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Attention:  # fmt: skip
    """Attention over sequences of different lengths, packed one after the other.

    Args:
        window_size: as for :func:`flash_attn_func`.
        q_descale, k_descale, v_descale: by name, as vLLM passes them.
        out: where to write the result, ``(total_q, hq, hdim_v)``.

    The arguments of the sequences are those of :func:`mha_varlen_fwd`; for the others, and for what
    is raised, see the module.

    Returns:
        as :func:`flash_attn_func`, with out ``(total_q, hq, hdim_v)`` and softmax_lse
        ``(hq, total_q)``.
    """


@ends_in(with_all_results(forward_batch), **OF_BATCH)
def mha_fwd(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float, softmax_scale: float | None,
    is_causal: bool, window_size_left: int, window_size_right: int, sink_size: int,
    return_softmax_lse: bool, return_dropout_randval: bool,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
    out: Tensor | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    sink_ptr: Tensor | None = None, gen: Generator | None = None,
) -> Results:  # fmt: skip
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


@ends_in(with_all_results(forward_group), **OWN_NAMES)
def mha_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float, softmax_scale: float | None, logits_soft_cap: float, zero_tensors: bool,
    is_causal: bool, window_size_left: int, window_size_right: int, sink_size: int,
    return_softmax_lse: bool, return_dropout_randval: bool,
    out: Tensor | None = None, block_table: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> Results:  # fmt: skip
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


@ends_in(with_all_results(forward_batch), **OWN_NAMES)
def fmha_v3_fwd(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float, softmax_scale: float | None,
    is_causal: bool, window_size_left: int, window_size_right: int,
    return_softmax_lse: bool, return_dropout_randval: bool, how_v3_bf16_cvt: int,
    out: Tensor | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
) -> Results:  # fmt: skip
    """:func:`mha_fwd` without sinks and prefix sums, and with a choice of rounding."""


@ends_in(with_all_results(forward_group), **OWN_NAMES)
def fmha_v3_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float, softmax_scale: float | None, logits_soft_cap: float, zero_tensors: bool,
    is_causal: bool, window_size_left: int, window_size_right: int,
    return_softmax_lse: bool, return_dropout_randval: bool, how_v3_bf16_cvt: int,
    out: Tensor | None = None, block_table: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_k_padded: Tensor | None = None,
) -> Results:  # fmt: skip
    """:func:`mha_varlen_fwd` without sinks, and with a choice of rounding."""
