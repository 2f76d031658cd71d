"""How keys and values of a cache lie in its pages."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from ..problem.checks import can_be_read, describe
from ..problem.packed_pages import (
    are_packed,
    as_packed,
    as_rows,
    check_packed_shape,
    check_whole_pieces,
    packed_shapes,
    shape_of_keys,
    shape_of_values,
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

        Raises ``ValueError`` for packed pages whose sizes are no multiples of x.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        hdims = hdim, hdim if hdim_v is None else hdim_v
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


def append_to_pages(
    k_pages: Tensor,
    v_pages: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: Tensor,
    block_table: Tensor,
) -> None:
    """Write new keys and values behind those that sequences have in their pages.

    Args:
        k_pages, v_pages: pages in either :class:`PageLayout`, written in place.
        k, v: ``(b, s_new, hk, hdim)`` and ``(b, s_new, hk, hdim_v)``; they get the pages' dtype.
        seqlens: integers ``(b,)``, how many keys each sequence has in its pages.
        block_table: int32 ``(b, most pages)``, the pages of each sequence.

    Raises:
        ValueError: shapes do not fit together; or, where lengths and pages can be read (on the CPU,
            outside of compiled code), a sequence grows longer than its row of ``block_table``, or
            this names a page that is not there.
    """
    PageLayout.of(k_pages, v_pages)  # checks that they have one
    shapes = shape_of_keys(k_pages), shape_of_values(v_pages)
    for name, x, shape in zip(("k", "v"), (k, v), shapes, strict=True):
        expected = (block_table.shape[0], k.shape[1], *shape[2:])
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{name} is {describe(x)}; expected (batch, new keys, heads, hdim), which is "
                f"{expected}"
            )
    capacity = block_table.shape[1] * shapes[0][1]
    if can_be_read(seqlens) and seqlens.numel() > 0:
        for number in (int(seqlens.min()), int(seqlens.max())):
            if not 0 <= number <= capacity - k.shape[1]:
                raise ValueError(
                    f"seqlens holds {number}, and k has {k.shape[1]} more keys; a row of "
                    f"block_table ({describe(block_table)}) has room for {capacity}"
                )
    write_to_pages("k_pages", (k_pages, v_pages), (k, v), seqlens, block_table)


def write_to_pages(
    name: str,
    pages: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    seqlens: Tensor,
    block_table: Tensor,
) -> None:
    """Append what was checked; an error calls the pages of keys ``name``."""
    (k_pages, v_pages), (k, v) = pages, (x.to(y.dtype) for x, y in zip(new, pages, strict=True))
    page_size = shape_of_keys(k_pages)[1]
    position = seqlens.long()[:, None] + torch.arange(k.shape[1], device=k_pages.device)
    page, slot = block_table.long().gather(1, position // page_size), position % page_size
    check_page_numbers(name, page, k_pages.shape[0])
    if are_packed(k_pages):
        piece = k_pages.shape[-1]
        k_pages[page, :, :, slot] = k.unflatten(-1, (-1, piece))
        v_pages[page, :, slot // piece, :, slot % piece] = v
    else:
        k_pages[page, slot] = k
        v_pages[page, slot] = v


def check_page_numbers(name: str, pages: Tensor, num_pages: int) -> None:
    """Raise ``ValueError`` for pages of a ``block_table`` that ``name`` lacks, where they can be
    read.
    """
    if not can_be_read(pages) or pages.numel() == 0:
        return
    for number in (int(pages.min()), int(pages.max())):
        if not 0 <= number < num_pages:
            raise ValueError(f"block_table names page {number}; {name} has {num_pages} pages")
