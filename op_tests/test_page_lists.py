"""Pages that lists name in place of a block table, where each begins being told beside them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import is_same
from inputs import prefix_sums
from packed_pages import packed_keys, packed_values
from page_lists import PageLists
from refusals import refused
from torch import Tensor
from untyped import flash_attn_with_kvcache, fmha_fwd

import jitfmha
from jitfmha.call import run

pytestmark = pytest.mark.usefixtures("poisoned_memory")

AITER: Any = jitfmha.aiter
LENGTHS_Q, LENGTHS_K = [1, 4, 1, 33, 0, 2, 1], [0, 1, 127, 129, 40, 300, 700]


def call(it: PageLists, **options: Any) -> tuple[Tensor, Tensor]:
    return fmha_fwd(it.q, it.k, it.v, return_lse=True, **(it.groups | options))


@pytest.mark.sample("page_size", [1, 7, 16, 64, 128], 2)
@pytest.mark.parametrize("mask", [{}, {"mask": 2}, {"window_size": (60, 5), "sink_size": 3}])
def test_page_sizes(rng, page_size, mask):
    it = PageLists(rng, LENGTHS_Q, LENGTHS_K, page_size)
    for num_splits in (0, 2):
        actual = call(it, num_splits=num_splits, **mask)
        it.check(actual, **mask)
        assert is_same(actual, call(it, num_splits=num_splits, **mask, **it.by_table))


def test_packed_pages(rng):
    it = PageLists(rng, LENGTHS_Q, LENGTHS_K, 16, dtype=torch.bfloat16)
    pages = packed_keys(it.k), packed_values(it.v)
    actual = fmha_fwd(it.q, *pages, return_lse=True, mask=2, **it.groups)
    it.check(actual, mask=2)


def test_scales_of_tokens(rng):
    """The same as with a table of the same pages."""
    it = PageLists(rng, LENGTHS_Q, LENGTHS_K, 16, dtype=torch.float8_e4m3fn)
    scales = {f"{x}_descale": torch.rand(*it.k.shape[:-1], 1, generator=rng) + 0.5 for x in "kv"}
    assert is_same(call(it, **scales), call(it, **scales, **it.by_table))


def test_lists_that_begin_anywhere_are_the_sums_of_single_keys(rng):
    it = PageLists(rng, [1, 2, 1], [5, 0, 9], 1)
    lists = torch.cat([torch.tensor([-7, -7], dtype=torch.int32), *it.pages])
    starts = it.cu_k + 2
    for given in ({"cu_seqlens_k_padded": starts}, {"cu_seqlens_k_padded": None}):
        actual = call(it, cu_seqlens_k=starts, block_table=lists, **given)
        it.check(actual)


def test_lists_of_other_lengths_are_calls_of_the_same_kind(rng, monkeypatch):
    it = PageLists(rng, [1, 1], [30, 40], 16)
    expected = call(it)
    monkeypatch.setattr(run, "_first_of_kind", lambda arguments: pytest.fail("a kind of its own"))
    longer = torch.cat([it.lists, it.lists])
    assert is_same(call(it, block_table=longer), expected)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_aiter_functions(rng, page_size):
    it = PageLists(rng, LENGTHS_Q, LENGTHS_K, page_size)
    longest = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    results = AITER.mha_batch_prefill_func(
        it.q, it.k, it.v, it.cu_q, **it.without_gaps, **longest, causal=True, return_lse=True
    )
    it.check(results, mask=2)


LISTS = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"cu_seqlens_k_padded": None}, ["block_table", "(4,)", "cu_seqlens_k_padded"]),
        ({"cu_seqlens_k_padded": prefix_sums([1, 4])}, ["cu_seqlens_k_padded", "5", "4 entries"]),
        ({"cu_seqlens_k_padded": prefix_sums([1, 2]) - 1}, ["cu_seqlens_k_padded", "[-1, 0, 2]"]),
        ({"cu_seqlens_k_padded": prefix_sums([3, -1])}, ["cu_seqlens_k_padded", "ascending"]),
        ({"cu_seqlens_k_padded": prefix_sums([1, 1])}, ["sequence 1", "7 keys", "its list", "4"]),
        ({"block_table": LISTS + 3}, ["block_table", "page 3", "sequence 0", "3 pages"]),
        (
            {"block_table": LISTS[None, None], "cu_seqlens_k_padded": None},
            ["block_table", "lists of one dimension"],
        ),
        ({"block_table": torch.zeros(8, dtype=torch.int32)[::2]}, ["block_table", "contiguous"]),
    ],
)
def test_errors(changes, texts):
    k = torch.zeros(3, 4, 1, 16)
    given = {"q": torch.zeros(2, 1, 16), "k": k, "v": k, "block_table": LISTS}
    given |= {"cu_seqlens_q": prefix_sums([1, 1]), "cu_seqlens_k": prefix_sums([3, 7])}
    given |= {"cu_seqlens_k_padded": prefix_sums([1, 3])}
    fmha_fwd(**given)
    with refused(ValueError, *texts):
        fmha_fwd(**(given | changes))


# ---- What reads a GPU ----------------------------------------------------------------------------

# Tensors on meta have no values: whoever asks for one fails.


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> Tensor:
    return on_meta(*shape, dtype=torch.int32)


Q, PAGES, LATENT = on_meta(3, 4, 64), on_meta(9, 16, 2, 64), on_meta(9, 16, 1, 576)
SINGLE = on_meta(9, 2, 64)
IN_LISTS = integers(4), integers(20)
ONE = on_meta(1, dtype=torch.float32)


def ragged() -> Tensor:
    return AITER.paged_attention_ragged(
        *(Q.clone(), Q, Q, PAGES, PAGES, 0.1, *IN_LISTS, integers(3), 16, 512),
        *(None, "auto", "NHD", 0.0, ONE, ONE, None, 256),
    )


def batch_prefill(k: Tensor) -> Tensor:
    longest = 2, 100
    return AITER.mha_batch_prefill_func(
        *(Q, k, k, integers(4), *IN_LISTS, *longest), causal=True, kv_last_page_lens=integers(3)
    )


def latent(function: Callable[..., Any]) -> Tensor:
    q, out = on_meta(3, 16, 576), on_meta(3, 16, 512)
    return function(q, LATENT, out, integers(4), *IN_LISTS, integers(3), 1)[0]


def projected() -> Tensor:
    out = Q.clone()
    parts = on_meta(256, 4, 64, dtype=torch.float32), on_meta(256, 4, dtype=torch.float32)
    AITER.mla_prefill_ps_asm_fwd(
        *(Q, SINGLE, SINGLE, integers(4), *IN_LISTS, None, None, 2, 0.1, True, *parts, out)
    )
    return out


def padded_cache() -> Tensor:
    cache = on_meta(3, 50, 2, 64)
    of_batch = {"cache_seqlens": integers(3), "cache_leftpad": integers(3)}
    return flash_attn_with_kvcache(Q[:, None], cache, cache, **of_batch)[:, 0]


@pytest.mark.parametrize(
    "function",
    [
        ragged,
        lambda: batch_prefill(PAGES),
        lambda: batch_prefill(SINGLE),
        lambda: latent(AITER.mla.mla_decode_fwd)[:, :4, :64],
        lambda: latent(AITER.mla.mla_prefill_fwd)[:, :4, :64],
        projected,
        padded_cache,
    ],
)
def test_nothing_is_read(function):
    assert function().shape == Q.shape
