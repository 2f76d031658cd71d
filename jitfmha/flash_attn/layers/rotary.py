"""The functions of flash-attn's layer for the rotary position embedding.

Source: ``flash_attn/layers/rotary.py`` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.triton.rotary import apply_rotary

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_torch", "rotate_half"]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """``x (..., d)``, every pair ``(a, b)`` of it as ``(-b, a)``; pairs as of ``apply_rotary``."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """:func:`apply_rotary_emb` in the dtype of x; ``cos`` and ``sin`` may also have a batch.

    x is ``(b, s, h, hdim)``, cos and sin ``(s, rotary_dim / 2)`` or ``(b, s, rotary_dim / 2)``.
    """
    width = 2 * cos.shape[-1]

    def of_pairs(table: Tensor) -> Tensor:
        repeated = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
        return repeated.unsqueeze(-2)

    turned = x[..., :width]
    turned = turned * of_pairs(cos) + rotate_half(turned, interleaved) * of_pairs(sin)
    return torch.cat((turned, x[..., width:]), dim=-1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """:func:`jitfmha.flash_attn.ops.triton.rotary.apply_rotary`, with another order of arguments.

    Raises:
        TypeError, ValueError: as that does.
    """
    return apply_rotary(
        x,
        cos,
        sin,
        seqlen_offsets=seqlen_offsets,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        interleaved=interleaved,
        inplace=inplace,
    )


apply_rotary_emb_func = apply_rotary_emb
"""The name that it had before."""
