"""Random inputs, and the memory layouts that a tensor of given values can have."""

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EIGHT_BITS = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "bf8_e5m2": torch.float8_e5m2,
    "bf8_e5m2fnuz": torch.float8_e5m2fnuz,
    "int8": torch.int8,
}
# Whole vectors and a rest in every instruction set, and an odd number of a tile unit's squares of
# values. One pair for what needs no other, as each pair has kernels of its own.
HDIM, HDIM_V = 53, 37
# seqlen_q, seqlen_k, heads_q, heads_k: single rows, nothing, and what lies around tiles.
Sizes = tuple[int, int, int, int]
SIZES: list[Sizes] = [
    *[(1, 1, 1, 1), (1, 300, 4, 4), (3, 77, 6, 2), (9, 0, 2, 2), (0, 5, 2, 1), (2, 129, 13, 13)],
    *[(33, 49, 2, 2), (150, 290, 3, 1), (17, 127, 7, 7), (129, 128, 2, 1)],
]


def random_qkv(
    rng: torch.Generator,
    sizes: Sizes = (33, 49, 2, 2),
    *,
    batch: int = 2,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    heads_q: int | None = None,
    heads_k: int | None = None,
    hdim: int = 64,
    hdim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous normal q, k, v in gm0's shape ``(batch, seqlen, heads, hdim)``.

    ``sizes`` are the lengths and heads, for which those with names stand in.
    """
    named = (seqlen_q, seqlen_k, heads_q, heads_k)
    lengths = [size if own is None else own for own, size in zip(named, sizes, strict=True)]
    seqlen_q, seqlen_k, heads_q, heads_k = lengths
    return (
        torch.randn(batch, seqlen_q, heads_q, hdim, generator=rng).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, hdim, generator=rng).to(dtype),
        torch.randn(batch, seqlen_k, heads_k, hdim_v or hdim, generator=rng).to(dtype),
    )


def prefix_sums(lengths: Sequence[int]) -> Tensor:
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
