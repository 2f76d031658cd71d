"""How keys and values of a cache lie in its pages."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from ..problem.checks import check_counts, describe
from ..problem.packed_pages import (
    are_packed,
    as_packed,
    as_rows,
    check_packed_shape,
    check_whole_pieces,
    packed_shapes,
)


class PageLayout(Enum):
    """Which form the pages of keys and values have; ``fmha_fwd`` takes both.

    Attributes:
        ROWS: ``(num_pages, page_size, hk, hdim)``, and with hdim_v those of values.
        PACKED: AITER's packed pages, in which a head's keys and values lie as matrix units and
            products of pairs take them: ``(num_pages, hk, hdim / x, page_size, x)``, and
            ``(num_pages, hk, page_size / x, hdim_v, x)`` of values, with an x of 16 bytes. Decoding
            reads them in the order of memory.
    """

    ROWS = "rows"
    PACKED = "packed"

    @classmethod
    def of(cls, k_pages: Tensor, v_pages: Tensor) -> PageLayout:
        """The layout of these pages. Raises ``ValueError`` where they have none."""
        for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
            if are_packed(k_pages) or are_packed(v_pages):
                check_packed_shape(name, x)
            elif x.dim() != 4:
                raise ValueError(f"{name} is {describe(x)}; expected four dimensions or five")
        return cls.PACKED if are_packed(k_pages) else cls.ROWS

    def new_pages(
        self,
        num_pages: int,
        page_size: int,
        heads: int,
        hdim: int,
        hdim_v: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Pages of keys and of values that hold 0; ``hdim_v`` is hdim by default.

        Raises ``TypeError`` or ``ValueError`` for what is no size, and for packed pages whose sizes
        are no multiples of x.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        hdims = hdim, hdim if hdim_v is None else hdim_v
        check_counts(num_pages=num_pages, page_size=page_size, heads=heads)
        check_counts(hdim=hdims[0], hdim_v=hdims[1])
        if self is PageLayout.PACKED:
            check_whole_pieces(page_size, hdim, dtype)
            shapes = packed_shapes(num_pages, page_size, heads, hdims, dtype)
        else:
            k, v = ((num_pages, page_size, heads, n) for n in hdims)
            shapes = k, v
        k_pages, v_pages = (torch.zeros(x, dtype=dtype, device=device) for x in shapes)
        return k_pages, v_pages

    def converted(self, k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
        """The same pages in this layout: copies, or the given ones where they have it already."""
        if PageLayout.of(k_pages, v_pages) is self:
            return k_pages, v_pages
        if self is PageLayout.ROWS:
            return as_rows("k", k_pages), as_rows("v", v_pages)
        check_whole_pieces(k_pages.shape[1], k_pages.shape[3], k_pages.dtype)
        return as_packed("k", k_pages), as_packed("v", v_pages)
