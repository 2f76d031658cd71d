"""The same call gives the same bits: again, with other thread counts, and from many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from inputs import DTYPES, lay_out, prefix_sums, random_qkv
from torch import Tensor
from untyped import fmha_fwd

SIZES = [(1, 700, 8, 2), (130, 130, 3, 3), (300, 70, 4, 4), (2, 2, 16, 4), (513, 513, 1, 1)]


def results(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    masks = ("none", "causal")
    both = (fmha_fwd(q, k, v, mask=mask, return_lse=True, **options) for mask in masks)
    return [x for pair in both for x in pair]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_mode(rng, dtype, sizes):
    names = ("seqlen_q", "seqlen_k", "heads_q", "heads_k")
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype], **dict(zip(names, sizes, strict=True)))
    first = results(q, k, v)
    for threads in (1, 2, 3, 5, 1, 2):
        torch.set_num_threads(threads)
        assert same_bits(results(q, k, v), first), f"{threads} threads"


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_mode(rng, dtype):
    lengths = torch.randint(0, 200, (9,), generator=rng).tolist()
    q, k, v = random_qkv(
        rng, batch=1, seqlen_q=sum(lengths), seqlen_k=sum(lengths), dtype=DTYPES[dtype]
    )
    cu_seqlens = prefix_sums(lengths)
    groups = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    first = results(q[0], k[0], v[0], **groups)
    for threads in (1, 2, 3, 5, 1, 2):
        torch.set_num_threads(threads)
        assert same_bits(results(q[0], k[0], v[0], **groups), first), f"{threads} threads"


def test_layout_does_not_change_the_bits(rng):
    q, k, v = random_qkv(rng)
    first = results(q, k, v)
    for layout in ("bhsd", "packed_by_head", "odd_address"):
        assert same_bits(results(*(lay_out(x, layout) for x in (q, k, v))), first)


def test_called_from_many_threads_at_once(rng):
    problems = [
        random_qkv(rng, seqlen_q=n, heads_q=2 + n % 3 * 2, dtype=dtype)
        for n in (1, 40, 200)
        for dtype in DTYPES.values()
    ]
    expected = [results(*problem) for problem in problems]
    order = list(range(len(problems))) * 20
    with ThreadPoolExecutor(8) as pool:
        actual = pool.map(lambda i: results(*problems[i]), order)
        for i, result in zip(order, actual, strict=True):
            assert same_bits(result, expected[i])
