"""AITER's functions under ``torch.autograd``: one pass each, with all that the other needs.

Source: ``aiter/ops/mha.py`` of github.com/ROCm/aiter, from where libraries with derivatives of
their own import them. Arguments mean what they mean in :mod:`jitfmha.aiter`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layers.peer_values import as_flag, check_num_splits, ends_in
from .backward import backward
from .forward import (
    OF_BATCH,
    OWN_NAMES,
    Found,
    Results,
    forward_batch,
    forward_group,
    with_all_results,
)

_FLAGS = {"return_dropout_randval": "return_softmax", "is_causal": "causal"}


def _batch(
    *, causal: object, return_lse: object, return_softmax: object, num_splits: object, **given: Any
) -> Found:
    check_num_splits(num_splits)
    return forward_batch(
        is_causal=as_flag("causal", causal),
        return_softmax_lse=as_flag("return_lse", return_lse),
        return_dropout_randval=as_flag("return_softmax", return_softmax),
        **given,
    )


def _group(*, causal: object, return_lse: object, return_softmax: object, **given: Any) -> Found:
    return forward_group(
        is_causal=as_flag("causal", causal),
        return_softmax_lse=as_flag("return_lse", return_lse),
        return_dropout_randval=as_flag("return_softmax", return_softmax),
        **given,
    )


def _backward(*, causal: object, **given: Any) -> Tensor:
    return backward(is_causal=as_flag("causal", causal), gen=None, **given)[3]


@ends_in(with_all_results(_batch), **OF_BATCH, **_FLAGS)
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, sink_size: int,
    bias: Tensor | None, alibi_slopes: Tensor | None,
    q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
    return_lse: bool, return_softmax: bool, how_v3_bf16_cvt: int = 1,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
    sink_ptr: Tensor | None = None, out: Tensor | None = None, num_splits: int = 0,
) -> Results:  # fmt: skip
    """:func:`jitfmha.aiter.mha_fwd`, in another order."""


@ends_in(with_all_results(_group), **OWN_NAMES, **_FLAGS)
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    cu_seqlens_q_padded: Tensor | None, cu_seqlens_k_padded: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, min_seqlen_q: int,
    dropout_p: float, softmax_scale: float, causal: bool, logits_soft_cap: float = 0.0,
    window_size_left: int = -1, window_size_right: int = -1, sink_size: int = 0,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False, return_softmax: bool = False, how_v3_bf16_cvt: int = 1,
    block_table: Tensor | None = None, out: Tensor | None = None, zero_tensors: bool = False,
    sink_ptr: Tensor | None = None,
) -> Results:  # fmt: skip
    """:func:`jitfmha.aiter.mha_varlen_fwd`, in another order."""


@ends_in(_backward)
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int,
    bias: Tensor | None, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
    is_v3_atomic_fp32: bool = True, how_v3_bf16_cvt: int = 1,
    sink: Tensor | None = None, d_sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`jitfmha.aiter.mha_bwd`, in another order; the gradients are written to dq, dk and dv.

    Returns:
        ``softmax_d``.
    """


@ends_in(_backward)
def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
    is_v3_atomic_fp32: bool = True, how_v3_bf16_cvt: int = 1, zero_tensors: bool = False,
    cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_k_padded: Tensor | None = None,
    sink: Tensor | None = None, d_sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`jitfmha.aiter.mha_varlen_bwd`, likewise."""
