"""AITER's packed pages, in which keys and values of a head lie as matrix units take them.

A page of keys is ``(hk, hdim / x, page_size, x)`` and one of values ``(hk, page_size / x, hdim_v,
x)``, with as many numbers in x as 16 bytes hold. A page's part of one head is contiguous.

Source: ``mha_batch_prefill`` of ``csrc/include/torch/mha_batch_prefill.h`` of
github.com/ROCm/aiter.
"""

from __future__ import annotations

import torch
from torch import Tensor

DIMENSIONS = 5
_PIECE_BYTES = 16
_FORMS = {
    "k": "(num_pages, heads, hdim / x, page_size, x)",
    "v": "(num_pages, heads, page_size / x, hdim, x)",
}


def are_packed(x: Tensor) -> bool:
    """Whether keys or values lie in packed pages."""
    return x.dim() == DIMENSIONS


def shape_of_keys(k: Tensor) -> tuple[int, ...]:
    """The shape of k in rows: of packed pages ``(num_pages, page_size, hk, hdim)``."""
    if not are_packed(k):
        return k.shape
    pages, heads, pieces, page_size, piece = k.shape
    return pages, page_size, heads, pieces * piece


def shape_of_values(v: Tensor) -> tuple[int, ...]:
    """The shape of v in rows, likewise."""
    if not are_packed(v):
        return v.shape
    pages, heads, pieces, hdim_v, piece = v.shape
    return pages, pieces * piece, heads, hdim_v


def strides_of_keys(k: Tensor) -> tuple[int, ...]:
    """Strides between pages, keys, heads and the numbers of a piece; pieces follow each other."""
    return (k.stride(0), k.stride(3), k.stride(1), 1) if are_packed(k) else k.stride()


def strides_of_values(v: Tensor) -> tuple[int, ...]:
    """Strides between pages, keys of a piece, heads and columns; pieces follow each other."""
    return (v.stride(0), 1, v.stride(1), v.stride(3)) if are_packed(v) else v.stride()


def packed_strides(
    pages: int, page_size: int, heads: int, hdims: tuple[int, int], dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides of keys and values, as above, in pages that follow each other.

    ``hdims`` are those of keys and of values, whose rows are in whole pieces.
    """
    shapes = packed_shapes(pages, page_size, heads, hdims, dtype)
    k, v = (torch.empty(shape, device="meta") for shape in shapes)
    return strides_of_keys(k), strides_of_values(v)


def packed_shapes(
    pages: int, page_size: int, heads: int, hdims: tuple[int, int], dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of packed pages of keys and of values, likewise."""
    piece = _piece(dtype)
    k = pages, heads, hdims[0] // piece, page_size, piece
    return k, (pages, heads, page_size // piece, hdims[1], piece)


def _piece(dtype: torch.dtype) -> int:
    return _PIECE_BYTES // dtype.itemsize


def as_rows(name: str, x: Tensor) -> Tensor:
    """The keys or values as ``(num_pages, page_size, hk, hdim)``, copied."""
    order = {"k": (0, 3, 1, 2, 4), "v": (0, 2, 4, 1, 3)}[name]
    shape = shape_of_keys(x) if name == "k" else shape_of_values(x)
    return x.permute(order).reshape(shape)


def as_packed(name: str, x: Tensor) -> Tensor:
    """Packed pages of the keys or values ``(num_pages, page_size, hk, hdim)``, copied."""
    dim, order = {"k": (3, (0, 2, 3, 1, 4)), "v": (1, (0, 3, 1, 4, 2))}[name]
    pieces: Tensor = x.unflatten(dim, (-1, _piece(x.dtype)))
    return pieces.permute(order).contiguous()


def check_whole_pieces(page_size: int, hdim: int, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` for pages that no such tensors can be."""
    piece = _piece(dtype)
    for name, size in (("page_size", page_size), ("hdim", hdim)):
        if size % piece:
            raise ValueError(
                f"{name} is {size}; packed pages are in pieces of {_PIECE_BYTES} bytes, which is "
                f"{piece} of {dtype}"
            )


def check_packed_shape(name: str, x: Tensor) -> None:
    """Raise ``ValueError`` for what are no packed pages of k or v, or k_cache or v_cache."""
    piece = _piece(x.dtype)
    if not are_packed(x) or x.shape[-1] != piece:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected {_FORMS[name[0]]}, as packed pages are, "
            f"with an x of {_PIECE_BYTES} bytes, which is {piece} of {x.dtype}"
        )


def check_packed_strides(name: str, x: Tensor) -> None:
    """Raise ``ValueError`` where a head's part of a page does not lie in one piece."""
    rows, piece = x.shape[-2:]
    wanted = rows * piece, piece, 1
    sizes = zip(x.shape[2:], x.stride()[2:], wanted, strict=True)
    if any(size > 1 and stride != expected for size, stride, expected in sizes):
        raise ValueError(
            f"{name} has strides {x.stride()}; the last three dimensions of packed pages are "
            f"contiguous, with strides {wanted}"
        )
