"""Random inputs, and the memory layouts that a tensor of given values can have."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random_qkv(
    rng: torch.Generator,
    *,
    batch: int = 2,
    seqlen_q: int = 33,
    seqlen_k: int = 49,
    heads_q: int = 2,
    heads_k: int = 2,
    hdim: int = 64,
    hdim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous normal q, k, v in gm0's shape ``(batch, seqlen, heads, hdim)``."""
    return (
        torch.randn(batch, seqlen_q, heads_q, hdim, generator=rng).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, hdim, generator=rng).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, hdim_v or hdim, generator=rng).to(dtype),
    )


def prefix_sums(lengths: list[int]) -> Tensor:
    """``cu_seqlens`` of the given lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def _surrounded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    filling = torch.nan if x.dtype.is_floating_point else 99
    return torch.full(shape, filling, device=x.device).to(x.dtype)


def _bshd(x: Tensor) -> Tensor:
    return x.contiguous()


def _bhsd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _sbhd(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _packed(x: Tensor) -> Tensor:
    b, s, h, d = x.shape
    view = _surrounded(x, (b, s, 3, h, d))[:, :, 1]
    return view.copy_(x)


def _packed_by_head(x: Tensor) -> Tensor:
    b, s, h, d = x.shape
    view = _surrounded(x, (b, s, h, 2 * d + 3))[..., d + 1 : 2 * d + 1]
    return view.copy_(x)


def _every_other_row(x: Tensor) -> Tensor:
    b, s, h, d = x.shape
    view = _surrounded(x, (b, 2 * s + 1, h, d))[:, 1::2]
    return view.copy_(x)


def _odd_address(x: Tensor) -> Tensor:
    flat = _surrounded(x, (x.numel() + 2,))
    view = flat[1:-1].view(x.shape)
    return view.copy_(x)


LAYOUTS = {
    "bshd": _bshd,
    "bhsd": _bhsd,
    "sbhd": _sbhd,
    "packed": _packed,
    "packed_by_head": _packed_by_head,
    "every_other_row": _every_other_row,
    "odd_address": _odd_address,
}
"""The same values in another memory layout; what lies between the elements is NaN, or 99."""


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A view with the values of ``x`` in the named layout."""
    view = LAYOUTS[layout](x)
    assert torch.equal(view.float().nan_to_num(), x.float().nan_to_num())
    return view
