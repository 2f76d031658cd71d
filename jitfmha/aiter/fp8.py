"""AITER's functions for fp8 inputs, which models call: they have scales, and return the output."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.peer_values import ends_in
from ..problem.packed_rows import sequences_of_rows
from .dtypes import fp8_of
from .forward import OWN_NAMES, called_by_models, forward_batch, forward_group


@ends_in(called_by_models(forward_batch), **OWN_NAMES)
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


@ends_in(called_by_models(forward_group), **OWN_NAMES)
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


def quantized(x: Tensor, groups: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed ``x`` in fp8, the scale of each sequence and group of its heads, and ``x`` as rounded.

    The largest number of each becomes the largest of fp8. Rows that belong to no sequence become 0.
    """
    dtype = fp8_of(x.device)
    limit = torch.finfo(dtype).max
    sequence, _, is_used = sequences_of_rows(len(x), cu_seqlens, cu_seqlens)
    values = x.detach().float().unflatten(1, (groups, -1))
    values = values.masked_fill(~is_used[:, None, None, None], 0)
    largest = values.new_zeros(len(cu_seqlens) - 1, groups)
    if len(largest):
        of_rows = sequence.long()[:, None].expand(-1, groups)
        largest = largest.scatter_reduce(0, of_rows, values.abs().flatten(2).amax(2), "amax")
    scale = (largest / limit).clamp(min=_LEAST)
    step = scale[sequence][..., None, None] if len(largest) else values.new_ones(())
    rounded = (values / step).clamp(-limit, limit).to(dtype)
    as_rounded = (rounded.float() * step).view(x.shape).to(x.dtype)
    # The derivative of rounding is taken to be 1.
    return rounded.view(x.shape), scale, x + (as_rounded - x).detach()


_LEAST = 1e-12
"""A scale of zeros alone."""
