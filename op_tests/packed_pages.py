"""AITER's packed pages, made of pages of rows."""

from torch import Tensor


def packed_keys(k: Tensor) -> Tensor:
    """Pages ``(num_pages, hk, hdim / x, page_size, x)`` of ``(num_pages, page_size, hk, hdim)``."""
    piece = 16 // k.element_size()
    pieces: Tensor = k.unflatten(3, (-1, piece))
    return pieces.permute(0, 2, 3, 1, 4).contiguous()


def packed_values(v: Tensor) -> Tensor:
    """Pages ``(num_pages, hk, page_size / x, hdim, x)``."""
    piece = 16 // v.element_size()
    pieces: Tensor = v.unflatten(1, (-1, piece))
    return pieces.permute(0, 3, 1, 4, 2).contiguous()
