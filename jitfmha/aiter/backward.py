"""AITER's functions for the backward pass. They end in :func:`jitfmha.fmha_bwd`.

Models do not call them: ``torch.autograd`` does what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor

from ..call.interface import fmha_bwd
from ..layers.peer_values import as_flag, as_int
from ..problem.checks import describe, refuse_given, require_cu_seqlens, with_keyword_advice
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
    from ..problem.arguments import AttentionOptions, Bf16Cvt

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, softmax_d


class _Choices(NamedTuple):
    """What kernels may do, as ``fmha_bwd`` takes it."""

    deterministic: bool
    atomic_fp32: bool | None = None
    bf16_cvt: Bf16Cvt = "rtne"

    @classmethod
    def of(cls, deterministic: object, *v3: object) -> _Choices:
        """From AITER's arguments; ``v3`` are ``is_v3_atomic_fp32`` and ``how_v3_bf16_cvt``."""
        flag = as_flag("deterministic", deterministic)
        if not v3:
            return cls(flag)
        is_v3_atomic_fp32, how_v3_bf16_cvt = v3
        return cls(
            *(flag, as_flag("is_v3_atomic_fp32", is_v3_atomic_fp32)),
            as_v3_bf16_cvt(how_v3_bf16_cvt),
        )


@with_keyword_advice
def mha_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dbias: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None,
    gen: Generator | None = None,
    sink: Tensor | None = None,
    d_sink: Tensor | None = None,
) -> Results:
    """The gradients of :func:`jitfmha.aiter.mha_fwd` for a batch of sequences; see the module.

    deterministic: refuse kernels that add dq up with atomics, which are those of a tree that
        JITFMHA_HSA_DIR names.
    """
    return _batch(
        *(dout, q, k, v, out, softmax_lse, dropout_p, softmax_scale, is_causal),
        *(window_size_left, window_size_right, _Choices.of(deterministic), (dq, dk, dv)),
        alibi_slopes=alibi_slopes,
        rng_state=rng_state,
        gen=gen,
        bias=bias,
        dbias=dbias,
        sink=sink,
        d_sink=d_sink,
    )


def _batch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    choices: _Choices,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    gen: Generator | None,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
    sink: Tensor | None = None,
    d_sink: Tensor | None = None,
) -> Results:
    refuse_given(gen=gen)
    seqlen_k = k.shape[1] if isinstance(k, Tensor) and k.dim() > 1 else 0
    options = _options(
        *(dropout_p, softmax_scale, is_causal, window_size_left, window_size_right, seqlen_k),
        *(rng_state, choices),
    )
    dq, dk, dv = given
    options["bias"], dbias = (bias_with_dimensions(x, 4) for x in (bias, dbias))
    options["alibi_slopes"] = alibi_slopes
    _check_sinks(sink, d_sink)
    gradients = fmha_bwd(
        *(dout, q, k, v, out, softmax_lse),
        dq=dq,
        dk=dk,
        dv=dv,
        dbias=dbias,
        deterministic=choices.deterministic,
        atomic_fp32=choices.atomic_fp32,
        **options,
    )
    softmax_d = _softmax_d(dout, out)
    if sink is not None and d_sink is not None:
        # Of each sequence and head, for its queries.
        _add_gradient(d_sink, sink.expand(q.shape[0], -1)[..., None], softmax_lse, softmax_d)
    return *gradients, softmax_d


@with_keyword_advice
def fmha_v3_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool,
    is_v3_atomic_fp32: bool,
    how_v3_bf16_cvt: int,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None,
    gen: Generator | None = None,
) -> Results:
    """:func:`mha_bwd` without bias and sinks; see the module.

    is_v3_atomic_fp32: whether kernels that add dq up with atomics do so in float32, or in the dtype
        of q.
    how_v3_bf16_cvt: how they round to bf16: 0 to nearest even, 1 to nearest away from zero, 2
        towards zero.
    """
    choices = _Choices.of(deterministic, is_v3_atomic_fp32, how_v3_bf16_cvt)
    return _batch(
        *(dout, q, k, v, out, softmax_lse, dropout_p, softmax_scale, is_causal),
        *(window_size_left, window_size_right, choices, (dq, dk, dv)),
        alibi_slopes=alibi_slopes,
        rng_state=rng_state,
        gen=gen,
    )


@with_keyword_advice
def mha_varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None,
    gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    sink: Tensor | None = None,
    d_sink: Tensor | None = None,
) -> Results:
    """The gradients of :func:`jitfmha.aiter.mha_varlen_fwd` for packed sequences; see the module.

    zero_tensors: also set the rows of ``dq``, ``dk`` and ``dv`` to 0 that belong to no sequence.
    deterministic: as :func:`mha_bwd` has it.
    """
    return _varlen(
        *(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q),
        *(max_seqlen_k, dropout_p, softmax_scale, zero_tensors, is_causal),
        *(window_size_left, window_size_right, _Choices.of(deterministic), (dq, dk, dv)),
        alibi_slopes=alibi_slopes,
        rng_state=rng_state,
        gen=gen,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
        sink=sink,
        d_sink=d_sink,
    )


def _varlen(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    choices: _Choices,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    gen: Generator | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_k_padded: Tensor | None,
    sink: Tensor | None = None,
    d_sink: Tensor | None = None,
) -> Results:
    refuse_given(gen=gen)
    require_cu_seqlens(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    longest = as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k)
    options = _options(
        *(dropout_p, softmax_scale, is_causal, window_size_left, window_size_right, longest[1]),
        *(rng_state, choices),
    )
    dq, dk, dv = given
    options["alibi_slopes"] = alibi_slopes
    options["cu_seqlens_q"], options["cu_seqlens_k"] = cu_seqlens_q, cu_seqlens_k
    options["cu_seqlens_q_padded"] = cu_seqlens_q_padded
    options["cu_seqlens_k_padded"] = cu_seqlens_k_padded
    options["max_seqlen_q"], options["max_seqlen_k"] = longest
    _check_sinks(sink, d_sink)
    gradients = fmha_bwd(
        *(dout, q, k, v, out, softmax_lse),
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=choices.deterministic,
        atomic_fp32=choices.atomic_fp32,
        **options,
    )
    starts_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    starts_k = cu_seqlens_k if cu_seqlens_k_padded is None else cu_seqlens_k_padded
    if as_flag("zero_tensors", zero_tensors):
        ends = (cu_seqlens_q, starts_q), *([(cu_seqlens_k, starts_k)] * 2)
        for x, sums in zip(gradients, ends, strict=True):
            write_zeros(x, ~sequences_of_rows(x.shape[0], *sums)[2][:, None, None])
    sequence, _, is_used = sequences_of_rows(q.shape[0], cu_seqlens_q, starts_q)
    softmax_d = _softmax_d(dout, out).masked_fill(~is_used, 0)
    if sink is not None and d_sink is not None and len(cu_seqlens_q) > 1:
        of_rows = sink.expand(len(cu_seqlens_q) - 1, -1)[sequence].T
        _add_gradient(d_sink, of_rows, softmax_lse, softmax_d)
    return *gradients, softmax_d


@with_keyword_advice
def fmha_v3_varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    deterministic: bool,
    is_v3_atomic_fp32: bool,
    how_v3_bf16_cvt: int,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None,
    gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
) -> Results:
    """:func:`mha_varlen_bwd` without sinks; see the module.

    is_v3_atomic_fp32, how_v3_bf16_cvt: as :func:`fmha_v3_bwd` has them.
    """
    choices = _Choices.of(deterministic, is_v3_atomic_fp32, how_v3_bf16_cvt)
    return _varlen(
        *(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q),
        *(max_seqlen_k, dropout_p, softmax_scale, zero_tensors, is_causal),
        *(window_size_left, window_size_right, choices, (dq, dk, dv)),
        alibi_slopes=alibi_slopes,
        rng_state=rng_state,
        gen=gen,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
    )


def _options(
    dropout_p: object,
    softmax_scale: object,
    is_causal: object,
    window_size_left: object,
    window_size_right: object,
    seqlen_k: int,
    rng_state: Tensor | None,
    choices: _Choices,
) -> AttentionOptions:
    window = window_of_sides(window_size_left, window_size_right)
    common = common_options(dropout_p, softmax_scale, as_flag("is_causal", is_causal), window)
    options: AttentionOptions = {
        "softmax_scale": common["softmax_scale"],
        "mask": common["mask"],
        "window_size": clipped(common["window_size"], seqlen_k),
        "dropout_p": common["dropout_p"],
        "bf16_cvt": choices.bf16_cvt,
    }
    if common["dropout_p"] > 0:
        if rng_state is None:
            raise ValueError(
                f"rng_state is missing; with dropout_p={dropout_p!r} it is what the forward pass "
                "returned"
            )
        options["rng_state"] = rng_state
    return options


def _check_sinks(sink: Tensor | None, d_sink: Tensor | None) -> None:
    if (sink is None) != (d_sink is None):
        given = f"sink ({describe(sink)})" if d_sink is None else f"d_sink ({describe(d_sink)})"
        raise ValueError(f"{given} is given without the other of sink and d_sink")
    for name, x in (("sink", sink), ("d_sink", d_sink)):
        if x is not None and (not isinstance(x, Tensor) or x.dtype != torch.float32):
            raise TypeError(f"{name} must be a float32 tensor, got {describe(x)}")


def _softmax_d(dout: Tensor, out: Tensor) -> Tensor:
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()


def _add_gradient(d_sink: Tensor, sink: Tensor, lse: Tensor, softmax_d: Tensor) -> None:
    """Add what the softmax's derivative is in the column of the sink, whose value is 0."""
    heads = -2
    probability = torch.exp(sink - lse).masked_fill(lse == -torch.inf, 0)
    others = [d for d in range(lse.dim()) if d != lse.dim() + heads]
    d_sink -= (probability * softmax_d).sum(others)
