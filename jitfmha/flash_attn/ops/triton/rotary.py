"""flash-attn's rotary position embedding (arXiv 2104.09864), in PyTorch's own operations.

Source: ``flash_attn/ops/triton/rotary.py`` of github.com/Dao-AILab/flash-attention, whose kernel
computes in float32 as well. It has gradients, and asks the GPU for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....layers.peer_values import as_flag, as_int, as_lengths
from ....problem.checks import (
    check_all_beside,
    check_layout,
    check_prefix_sums,
    describe,
    not_a_tensor,
    with_clear_errors,
)
from ....problem.memory import overlaps_itself, write_values
from ....problem.packed_rows import sequences_of_rows
from ....problem.torch_parts import can_be_read

__all__ = ["apply_rotary"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@with_clear_errors
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of each head by the position of its token.

    Args:
        x: ``(b, s, h, hdim)``; with cu_seqlens ``(total, h, hdim)``.
        cos, sin: ``(seqlen_ro, rotary_dim / 2)``, for each position.
        seqlen_offsets: the position of the first token of a sequence, an int for all or int32 or
            int64 ``(b,)``.
        cu_seqlens: int32 ``(b + 1,)``, prefix sums of the lengths of packed sequences.
        max_seqlen: the longest of these; no effect.
        interleaved: whether neighbouring elements are rotated together (GPT-J), or the halves of
            the first ``rotary_dim`` elements (GPT-NeoX).
        inplace: write the result to x.
        conjugate: rotate backwards.

    Returns:
        the rotated x, in its dtype; computed in float32.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value. Whether
            ``cos`` has all positions is looked at on the CPU only.
    """
    if max_seqlen is not None:
        as_int("max_seqlen", max_seqlen)
    turned = _turned(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, conjugate)
    if not as_flag("inplace", inplace):
        return torch.cat([turned, x[..., turned.shape[-1] :]], dim=-1)
    if overlaps_itself(x):
        raise ValueError(f"x has strides {x.stride()}; several of its elements are one")
    write_values(x[..., : turned.shape[-1]], turned)
    return x


def rotate_all(
    *given: tuple[Tensor, Tensor, Tensor], seqlen_offsets: int | Tensor, interleaved: bool
) -> None:
    """Rotate each x of ``(x, cos, sin)`` in place; where one is refused, none is written."""
    turned = [_turned(*each, seqlen_offsets, None, interleaved, False) for each in given]
    for (x, _, _), result in zip(given, turned, strict=True):
        write_values(x[..., : result.shape[-1]], result)


def check_floating(name: str, x: object) -> None:
    """Raise ``TypeError`` for what is no tensor of numbers that can be rotated."""
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    check_layout(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; expected one of {DTYPES}")


def _turned(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> Tensor:
    """What the elements that are rotated become."""
    dimensions = 4 if cu_seqlens is None else 3
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating(name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
        expected = dimensions if name == "x" else 2
        if tensor.dim() != expected:
            raise ValueError(f"{name} is {describe(tensor)}; expected {expected} dimensions")
    width = 2 * cos.shape[-1]
    if cos.shape != sin.shape or width > x.shape[-1]:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; expected one shape "
            "(seqlen_ro, rotary_dim / 2), with a rotary_dim of at most the hdim of x, which is "
            f"{x.shape[-1]}"
        )
    position = _positions(x, seqlen_offsets, cu_seqlens)
    if can_be_read(position) and position.numel():
        first, last = int(position.min()), int(position.max())
        if first < 0 or last >= cos.shape[0]:
            raise ValueError(
                f"cos has {cos.shape[0]} rows; seqlen_offsets and x reach from position {first} to "
                f"{last}"
            )
    c, s = (table[position].unsqueeze(-2).float() for table in (cos, sin))
    if as_flag("conjugate", conjugate):
        s = -s
    turned = x[..., :width].float()
    if as_flag("interleaved", interleaved):
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
    return turned.to(x.dtype)


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each token, ``(b, s)`` or ``(total,)``."""
    sequences = len(x)
    if cu_seqlens is not None:
        check_prefix_sums("cu_seqlens", cu_seqlens, "x", x)
        sequences = len(cu_seqlens) - 1
    if isinstance(seqlen_offsets, Tensor) and seqlen_offsets.dim() > 0:
        check_all_beside((("x", x), ("seqlen_offsets", seqlen_offsets)))
        first = as_lengths("seqlen_offsets", seqlen_offsets).long()
        if len(first) != sequences:
            raise ValueError(
                f"seqlen_offsets is {describe(seqlen_offsets)}; expected one for each of the "
                f"{sequences} sequences"
            )
    else:
        offset = as_int("seqlen_offsets", seqlen_offsets)
        first = torch.full((sequences,), offset, device=x.device)
    if cu_seqlens is None:
        return first[:, None] + torch.arange(x.shape[1], device=x.device)
    if sequences == 0:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)
    sequence, within, is_used = sequences_of_rows(len(x), cu_seqlens, cu_seqlens)
    # Rows of no sequence are turned by the position 0, as good as any.
    return (first[sequence] + within).masked_fill(~is_used, 0)
