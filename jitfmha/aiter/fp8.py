"""AITER's functions for fp8 inputs, which models call: they have scales, and return the output."""

from __future__ import annotations

from torch import Tensor

from ..layers.peer_values import as_flag, as_window, with_contiguous_rows
from ..problem.checks import with_keyword_advice
from .forward import mha_fwd, mha_varlen_fwd


@with_keyword_advice
def flash_attn_fp8_pertensor_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    causal: bool = False,
    window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    softmax_scale: float | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor:
    """:func:`mha_fwd` for fp8 inputs and a batch of sequences of equal length.

    Args:
        q_descale, k_descale, v_descale: as for :func:`jitfmha.fmha_fwd`; AITER's own kernels take
            those of shape ``(1,)`` and ``(b, hk)``.
        window_size: ``(left, right)`` or ``(left, right, sink_size)``.

    The other arguments, and what is raised: see the module.

    Returns:
        out, bfloat16 ``(b, sq, hq, hdim_v)``.
    """
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    out, _, _, _ = mha_fwd(
        *(q, k, v, 0.0, softmax_scale, as_flag("causal", causal), *as_window(window_size)),
        *(False, False),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        sink_ptr=sink_ptr,
    )
    return out


@with_keyword_advice
def flash_attn_varlen_fp8_pertensor_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    softmax_scale: float | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor:
    """:func:`flash_attn_fp8_pertensor_func` for sequences that are packed one after the other.

    The arguments of the sequences are those of :func:`mha_varlen_fwd`.

    Returns:
        out, bfloat16 ``(total_q, hq, hdim_v)``.
    """
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    out, _, _, _ = mha_varlen_fwd(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q),
        *(0.0, softmax_scale, logits_soft_cap, False, as_flag("causal", causal)),
        *(*as_window(window_size), False, False),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        sink_ptr=sink_ptr,
    )
    return out
