"""Sequences that are longer than ``max_seqlen_q`` says, where nobody reads the numbers to find out.

On a GPU the prefix sums stay unread, and a captured graph may be replayed with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from inputs import prefix_sums
from untyped import fmha_fwd

from jitfmha.amd.chips import chip
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.amd.tree import trees_of
from jitfmha.emulator.session import Emulation
from jitfmha.planning.target import TARGET_HERE, AmdTarget
from jitfmha.problem.float64_reference import attention_packed

ARCHS, HDIMS, MASKS = ("gfx942", "gfx950"), ((64, 64), (128, 128), (192, 128)), (0, 2)


class _UnreadEmulation(Emulation):
    """An emulated GPU whose tensors count as a real GPU's, so that their values are not checked."""

    @property
    def has_host_memory(self) -> bool:
        return False


@contextmanager
def _unread(arch: str) -> Iterator[None]:
    emulated, runtime = chip(VIRTUAL_NODE[arch]), _UnreadEmulation(arch, "check")
    units, trees = emulated.compute_units, trees_of(emulated)
    token = TARGET_HERE.set(AmdTarget(emulated, runtime.device, units, runtime, trees))
    try:
        yield
    finally:
        TARGET_HERE.reset(token)


@pytest.mark.sample(
    ("arch", "hdims", "mask", "promised"),
    list(product(ARCHS, HDIMS, MASKS, (0, 1, 127, 128, 300))),
    24,
)
def test_queries_beyond_the_promise_are_not_computed(rng, arch, hdims, mask, promised):
    """And nothing outside of the tensors is touched."""
    run_with_promise(rng, arch, hdims, mask, promised, [(310, 520), (5, 40), (200, 7)])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("hdims", HDIMS, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_queries_beyond_the_promise_leave_no_splits(rng, arch, hdims, mask):
    """The workspace of split keys is as large as was promised."""
    run_with_promise(rng, arch, hdims, mask, 128, [(390, 1900), (5, 40)])


def run_with_promise(
    rng: torch.Generator,
    arch: str,
    hdims: tuple[int, int],
    mask: int,
    promised: int,
    lengths: list[tuple[int, int]],
) -> None:
    """Compute, and compare the promised queries with float64."""
    rows = [sum(pair[side] for pair in lengths) for side in (0, 1)]
    q, k, v = (
        torch.randn(n, heads, hdim, generator=rng).bfloat16()
        for n, heads, hdim in (
            (rows[0], 2, hdims[0]),
            (rows[1], 1, hdims[0]),
            (rows[1], 1, hdims[1]),
        )
    )
    sums = [prefix_sums([pair[side] for pair in lengths]) for side in (0, 1)]
    out = torch.full((rows[0], 2, hdims[1]), 7.0, dtype=torch.bfloat16)
    with _unread(arch):
        _, lse = fmha_fwd(
            *(q, k, v),
            mask=mask,
            out=out,
            return_lse=True,
            cu_seqlens_q=sums[0],
            cu_seqlens_k=sums[1],
            max_seqlen_q=promised,
        )
    starts = [each.tolist()[:-1] for each in sums]
    pairs = [[pair[side] for pair in lengths] for side in (0, 1)]
    exact, exact_lse = attention_packed(q, k, v, *pairs, *starts, mask=mask)
    for start, (length, _) in zip(starts[0], lengths, strict=True):
        computed = slice(start, start + min(length, promised))
        torch.testing.assert_close(
            out[computed].double(), exact[computed], atol=2e-2, rtol=2e-2, msg="a computed row"
        )
        torch.testing.assert_close(
            lse[:, computed].double(), exact_lse[:, computed], atol=2e-3, rtol=1e-3
        )
        assert (out[start + min(length, promised) : start + length] == 7).all(), "a row beyond"
