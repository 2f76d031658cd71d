"""AITER's functions for fp8 inputs, which models call: they have scales, and return the output."""

from __future__ import annotations

from torch import Tensor

from ..layers.peer_values import ends_in
from .forward import called_by_models, forward_batch, forward_group


@ends_in(called_by_models(forward_batch))
def flash_attn_fp8_pertensor_func(
    q: Tensor, k: Tensor, v: Tensor,
    q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
    causal: bool = False, window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    softmax_scale: float | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`mha_fwd` for fp8 inputs and a batch of sequences of equal length.

    Args:
        q_descale, k_descale, v_descale: as for :func:`jitfmha.fmha_fwd`; AITER's own kernels take
            those of shape ``(1,)`` and ``(b, hk)``.
        window_size: ``(left, right)`` or ``(left, right, sink_size)``.

    The other arguments, and what is raised: see the module.

    Returns:
        out, bfloat16 ``(b, sq, hq, hdim_v)``.
    """


@ends_in(called_by_models(forward_group))
def flash_attn_varlen_fp8_pertensor_func(
    q: Tensor, k: Tensor, v: Tensor,
    q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    min_seqlen_q: int = 0,
    logits_soft_cap: float = 0.0,
    causal: bool = False, window_size: tuple[int, int] | tuple[int, int, int] = (-1, -1, 0),
    softmax_scale: float | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`flash_attn_fp8_pertensor_func` for sequences that are packed one after the other.

    The arguments of the sequences are those of :func:`mha_varlen_fwd`.

    Returns:
        out, bfloat16 ``(total_q, hq, hdim_v)``.
    """
