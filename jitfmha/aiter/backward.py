"""AITER's functions for the backward pass. They end in :func:`jitfmha.fmha_bwd`.

Models do not call them: ``torch.autograd`` does what they do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ..call.interface import fmha_bwd
from ..layers.peer_values import as_flag, as_int, ends_in, softmax_delta
from ..problem.checks import (
    check_all_beside,
    describe,
    refuse_given,
    require_cu_seqlens,
    result_requires_grad,
)
from ..problem.memory import overlaps_itself, refuse_shared_rooms, write_zeros
from ..problem.packed_rows import sequences_of_rows
from .common_arguments import bias_with_dimensions, common_options, length_of

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # dq, dk, dv, softmax_d


def backward(
    *,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    deterministic: object,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    rng_state: Tensor | None,
    gen: Generator | None,
    dbias: Tensor | None = None,
    sink: Tensor | None = None,
    d_sink: Tensor | None = None,
    zero_tensors: object = False,
    **given: Any,
) -> Results:
    """What all four end in; ``given`` is what ``common_options`` takes, and the lengths."""
    refuse_given(gen=gen)
    writes_zeros = as_flag("zero_tensors", zero_tensors)
    is_group = "cu_seqlens_q" in given
    if is_group:
        require_cu_seqlens(cu_seqlens_q=given["cu_seqlens_q"], cu_seqlens_k=given["cu_seqlens_k"])
        for name in ("max_seqlen_q", "max_seqlen_k"):
            given[name] = as_int(name, given[name])
    atomic_fp32 = None
    if "is_v3_atomic_fp32" in given:
        atomic_fp32 = as_flag("is_v3_atomic_fp32", given.pop("is_v3_atomic_fp32"))
    options = common_options(
        longest_keys=given["max_seqlen_k"] if is_group else length_of(k),
        bias_dimensions=4,
        **given,
    )
    if options["dropout_p"] > 0:
        if rng_state is None:
            raise ValueError(
                f"rng_state is missing; with dropout_p={given['dropout_p']!r} it is what the "
                "forward pass returned"
            )
        options["rng_state"] = rng_state
    read = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}
    refuse_shared_rooms(*read.items(), ("sink", sink), dq=dq, dk=dk, dv=dv, d_sink=d_sink)
    _check_sinks(sink, d_sink, softmax_lse, given.get("cu_seqlens_q"))
    gradients = fmha_bwd(
        *(dout, q, k, v, out, softmax_lse),
        dq=dq,
        dk=dk,
        dv=dv,
        dbias=bias_with_dimensions(dbias, 4),
        deterministic=as_flag("deterministic", deterministic) or None,
        atomic_fp32=atomic_fp32,
        **options,
    )
    softmax_d = softmax_delta(dout, out)
    if not is_group:
        if sink is not None and d_sink is not None:
            of_rows = sink.expand(q.shape[0], -1)[..., None]
            _add_gradient(d_sink, of_rows, softmax_lse, softmax_d)
        return *gradients, softmax_d
    sums_q, sums_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    padded_q, padded_k = given["cu_seqlens_q_padded"], given["cu_seqlens_k_padded"]
    starts_q = sums_q if padded_q is None else padded_q
    starts_k = sums_k if padded_k is None else padded_k
    if writes_zeros:
        ends = (sums_q, starts_q), *([(sums_k, starts_k)] * 2)
        for x, sums in zip(gradients, ends, strict=True):
            write_zeros(x, ~sequences_of_rows(x.shape[0], *sums)[2][:, None, None])
    sequence, _, is_used = sequences_of_rows(q.shape[0], sums_q, starts_q)
    softmax_d = softmax_d.masked_fill(~is_used, 0)
    if sink is not None and d_sink is not None and len(sums_q) > 1:
        of_rows = sink.expand(len(sums_q) - 1, -1)[sequence].T
        # What the lse holds in rows that belong to no sequence has no meaning.
        lse = softmax_lse.masked_fill(~is_used, -torch.inf)
        _add_gradient(d_sink, of_rows, lse, softmax_d)
    return *gradients, softmax_d


def _check_sinks(
    sink: Tensor | None, d_sink: Tensor | None, lse: Tensor, sums: Tensor | None
) -> None:
    """Check both beside ``lse``, of a batch or, with prefix sums, of packed sequences."""
    if (sink is None) != (d_sink is None):
        given = f"sink ({describe(sink)})" if d_sink is None else f"d_sink ({describe(d_sink)})"
        raise ValueError(f"{given} is given without the other of sink and d_sink")
    for name, x in (("sink", sink), ("d_sink", d_sink)):
        if x is not None and (not isinstance(x, Tensor) or x.dtype != torch.float32):
            raise TypeError(f"{name} must be a float32 tensor, got {describe(x)}")
    if sink is None or d_sink is None:
        return
    check_all_beside((("softmax_lse", lse), ("sink", sink), ("d_sink", d_sink)))
    if lse.dim() != (3 if sums is None else 2) or getattr(sums, "ndim", 1) != 1:
        return  # what is wrong with these is said elsewhere
    batch, heads = lse.shape[:2] if sums is None else (len(sums) - 1, len(lse))
    if d_sink.shape != (heads,) or sink.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"sink is {describe(sink)}, d_sink {describe(d_sink)}; expected {(heads,)} or "
            f"{(batch, heads)}, and {(heads,)}"
        )
    if d_sink.requires_grad and torch.is_grad_enabled():
        raise result_requires_grad("d_sink")
    if overlaps_itself(d_sink):
        raise ValueError(f"d_sink has strides {d_sink.stride()} with which its elements overlap")


def _add_gradient(d_sink: Tensor, sink: Tensor, lse: Tensor, softmax_d: Tensor) -> None:
    """Add what the softmax's derivative is in the column of the sink, whose value is 0."""
    heads = -2
    probability = torch.exp(sink - lse).masked_fill(lse == -torch.inf, 0)
    others = [d for d in range(lse.dim()) if d != lse.dim() + heads]
    d_sink -= (probability * softmax_d).sum(others)


@ends_in(backward)
def mha_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dropout_p: float, softmax_scale: float | None,
    is_causal: bool, window_size_left: int, window_size_right: int,
    deterministic: bool,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    dbias: Tensor | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None, gen: Generator | None = None, sink: Tensor | None = None,
    d_sink: Tensor | None = None,
) -> Results:  # fmt: skip
    """The gradients of :func:`jitfmha.aiter.mha_fwd` for a batch of sequences; see the module.

    deterministic: refuse kernels that add dq up with atomics in any order.
    """


@ends_in(backward)
def fmha_v3_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dropout_p: float, softmax_scale: float | None,
    is_causal: bool, window_size_left: int, window_size_right: int,
    deterministic: bool, is_v3_atomic_fp32: bool, how_v3_bf16_cvt: int,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None, gen: Generator | None = None,
) -> Results:  # fmt: skip
    """:func:`mha_bwd` without bias and sinks; see the module.

    is_v3_atomic_fp32: whether kernels that add dq up with atomics do so in float32, or in the dtype
        of q.
    how_v3_bf16_cvt: how they round to bf16: 0 to nearest even, 1 to nearest away from zero, 2
        towards zero.
    """


@ends_in(backward)
def mha_varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, zero_tensors: bool,
    is_causal: bool, window_size_left: int, window_size_right: int,
    deterministic: bool,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None, gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_k_padded: Tensor | None = None,
    sink: Tensor | None = None, d_sink: Tensor | None = None,
) -> Results:  # fmt: skip
    """The gradients of :func:`jitfmha.aiter.mha_varlen_fwd` for packed sequences; see the module.

    zero_tensors: also set the rows of ``dq``, ``dk`` and ``dv`` to 0 that belong to no sequence.
    deterministic: as :func:`mha_bwd` has it.
    """


@ends_in(backward)
def fmha_v3_varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, zero_tensors: bool,
    is_causal: bool, window_size_left: int, window_size_right: int,
    deterministic: bool, is_v3_atomic_fp32: bool, how_v3_bf16_cvt: int,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rng_state: Tensor | None = None, gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_k_padded: Tensor | None = None,
) -> Results:  # fmt: skip
    """:func:`mha_varlen_bwd` without sinks; see the module.

    is_v3_atomic_fp32, how_v3_bf16_cvt: as :func:`fmha_v3_bwd` has them.
    """
