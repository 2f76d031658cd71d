"""Large outputs ask for huge pages; small ones, and outputs that the caller owns, do not."""

import sys

import pytest
import torch
from closeness import assert_close
from untyped import fmha_fwd

from jitfmha.call import run as call
from jitfmha.problem import memory
from jitfmha.problem.float64_reference import attention


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tensors for which huge pages were requested."""
    sizes: list[int] = []
    monkeypatch.setattr(call, "request_huge_pages", lambda fresh: sizes.append(fresh.nbytes))
    return sizes


def test_only_large_new_outputs_ask(rng, requests):
    rows = memory.HUGE_PAGES_FROM_BYTES // (64 * 4)
    q = torch.randn(1, rows, 1, 64, generator=rng)
    k, v = (torch.randn(1, 3, 1, 64, generator=rng) for _ in range(2))
    fmha_fwd(q, k, v)
    assert requests == [memory.HUGE_PAGES_FROM_BYTES]
    fmha_fwd(q, k, v, out=torch.empty_like(q))
    fmha_fwd(q[:, 1:], k, v)
    assert len(requests) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")
def test_only_whole_pages_are_named(monkeypatch):
    """The range lies inside of the tensor, and what is asked for is huge pages."""
    calls: list[tuple[int, int, int]] = []

    class Library:
        @staticmethod
        def madvise(begin: object, length: object, advice: int) -> None:
            calls.append((begin.value, length.value, advice))  # type: ignore[attr-defined]

    monkeypatch.setattr(memory, "_c_library", Library)
    x = torch.empty(5 << 20, dtype=torch.uint8)
    memory.request_huge_pages(x)
    memory.request_huge_pages(x[: 1 << 20])
    ((begin, length, advice),) = calls
    assert begin % (2 << 20) == length % (2 << 20) == 0
    assert x.data_ptr() <= begin
    assert begin + length <= x.data_ptr() + x.nbytes
    assert length >= 2 << 20
    assert advice == 14  # MADV_HUGEPAGE


def test_the_result_is_right(rng):
    rows = memory.HUGE_PAGES_FROM_BYTES // (32 * 4) + 5
    q = torch.randn(1, rows, 1, 32, generator=rng)
    k, v = (torch.randn(1, 7, 1, 32, generator=rng) for _ in range(2))
    assert_close(fmha_fwd(q, k, v, return_lse=True), attention(q, k, v), q, k, v)
