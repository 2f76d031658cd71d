"""Layouts of pages: new ones, those that are given, conversions, and what is appended."""

import pytest
import torch
from inputs import DTYPES
from packed_pages import packed_keys, packed_values
from refusals import refused

from jitfmha import PageLayout, qk_norm_rope_cache

PAGES, PAGE_SIZE, HEADS, HDIM, HDIM_V = 7, 16, 3, 32, 21


def pages_of_rows(rng, dtype):
    k, v = (torch.randn(PAGES, PAGE_SIZE, HEADS, n, generator=rng) for n in (HDIM, HDIM_V))
    return k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float8_e4m3fn])
def test_conversions(rng, dtype):
    rows = pages_of_rows(rng, dtype)
    packed = packed_keys(rows[0]), packed_values(rows[1])
    layouts = {PageLayout.ROWS: rows, PageLayout.PACKED: packed}
    for layout, pages in layouts.items():
        assert PageLayout.of(*pages) is layout
        new = layout.new_pages(PAGES, PAGE_SIZE, HEADS, HDIM, HDIM_V, dtype=dtype)
        for x, y in zip(new, pages, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            assert not x.view(torch.uint8).any()
        assert layout.converted(*pages) == pages
        for other, expected in layouts.items():
            for x, y in zip(other.converted(*pages), expected, strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("layout", PageLayout)
def test_append(rng, layout):
    """From the middle of a page, over its end, and into an empty one."""
    rows = pages_of_rows(rng, torch.bfloat16)
    table = torch.randperm(PAGES, generator=rng)[:6].view(3, 2).int()
    seqlens = torch.tensor([0, 13, 27], dtype=torch.int32)
    k, v = (torch.randn(3, 5, HEADS, n, generator=rng).bfloat16() for n in (HDIM, HDIM_V))
    pages = layout.converted(*(x.clone() for x in rows))
    places = {"cache_seqlens": seqlens, "block_table": table}
    qk_norm_rope_cache(k=k, v=v, k_cache=pages[0], v_cache=pages[1], **places)
    for x, new in zip(rows, (k, v), strict=True):
        for n, first in enumerate(seqlens.tolist()):
            for i in range(5):
                x[int(table[n, (first + i) // PAGE_SIZE]), (first + i) % PAGE_SIZE] = new[n, i]
    for x, y in zip(PageLayout.ROWS.converted(*pages), rows, strict=True):
        assert torch.equal(x, y)


def test_what_is_refused(rng):
    rows = pages_of_rows(rng, torch.float32)
    packed = PageLayout.PACKED.converted(*rows)
    with refused(ValueError, "v_pages has shape", "page_size / x"):
        PageLayout.of(packed[0], rows[1])
    with refused(ValueError, "k_pages is", "four dimensions or five"):
        PageLayout.of(rows[0][0], rows[1])
    with refused(ValueError, "hdim is 30", "4 of torch.float32"):
        PageLayout.PACKED.new_pages(2, 16, 1, 30)
    with refused(ValueError, "page_size is 6", "4 of torch.float32"):
        PageLayout.PACKED.converted(*(x[:, :6] for x in rows))
