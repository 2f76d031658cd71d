"""Sequences that are longer than ``max_seqlen_q`` says, where nobody reads the numbers to find out.

On a GPU the prefix sums stay unread, and a captured graph may be replayed with others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from amd_problems import AmdProblem

from jitfmha import emulate
from jitfmha.emulator.session import Emulation
from jitfmha.planning.target import TARGET_HERE

ARCHS, HDIMS, MASKS = ("gfx942", "gfx950"), ((64, 64), (128, 128), (192, 128)), (0, 2)


class _UnreadEmulation(Emulation):
    """An emulated GPU whose tensors count as a real GPU's, so that their values are not checked."""

    @property
    def has_host_memory(self) -> bool:
        return False


@contextmanager
def _unread(arch: str) -> Iterator[None]:
    with emulate(arch, check=True) as run:
        TARGET_HERE.get().runtime = _UnreadEmulation(arch, "check")
        yield
        assert run.findings() == ()


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
    options = {"max_seqlen_q": promised}
    call = AmdProblem(rng, hdims=hdims, lengths=lengths, mask=mask, options=options)
    out = torch.full((*call.q.shape[:2], hdims[1]), 7.0, dtype=call.dtype)
    call.arguments["out"] = out
    with _unread(arch):
        actual = call.run()
    call.assert_right(actual, 2**-8, max_seqlen_q=promised)
    for start, (length, _) in zip(call.starts[0], lengths, strict=True):
        assert (out[start + min(length, promised) : start + length] == 7).all(), "a row beyond"
