"""What a call does that was there before: it asks each tensor once, and prepares nothing."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from untyped import flash_attn_with_kvcache, fmha_fwd

import jitfmha
from jitfmha.aiter.ops.triton.unified_attention import unified_attention

PACKAGE = Path(jitfmha.__file__).parent
# Where calls are checked and planned, and kernels rendered, built and loaded.
PREPARES = (
    *("problem/problem.py make_problem", "problem/problem.py check_"),
    *("call/dispatch.py", "call/detection.py", "jit/"),
)
HDIM, HDIM_V = 32, 24  # those of test_kv_cache.py, whose kernels serve here, too
PAGES, PAGE_SIZE, BATCH = 12, 4, 3


class Known:
    """Tensors of a step of a server, and what a call with them does once more."""

    def __init__(self, rng: torch.Generator) -> None:
        self.q = torch.randn(BATCH, 1, 4, HDIM, generator=rng)
        self.k, self.v = (torch.randn(BATCH, 1, 2, n, generator=rng) for n in (HDIM, HDIM_V))
        self.caches = [torch.zeros(PAGES, PAGE_SIZE, 2, n) for n in (HDIM, HDIM_V)]
        self.table = torch.arange(PAGES, dtype=torch.int32).view(BATCH, -1)
        self.cos, self.sin = torch.randn(2, PAGES, HDIM // 2, generator=rng)
        self.lengths = torch.tensor([1, 7, 9], dtype=torch.int32)
        self.sums_q = torch.arange(BATCH + 1, dtype=torch.int32)
        self.sums_k = torch.tensor([0, 2, 9, 18], dtype=torch.int32)
        self.out = torch.empty(BATCH, 4, HDIM_V)

    def append(self) -> object:
        rotary = {"rotary_cos": self.cos, "rotary_sin": self.sin}
        return flash_attn_with_kvcache(
            *(self.q, *self.caches, self.k, self.v),
            cache_seqlens=self.lengths,
            block_table=self.table,
            causal=True,
            **rotary,
        )

    def read(self) -> object:
        given = {"cache_seqlens": self.lengths, "block_table": self.table}
        return flash_attn_with_kvcache(self.q, *self.caches, **given)

    def write(self) -> object:
        return jitfmha.qk_norm_rope_cache(
            *(self.q, self.k, self.v),
            cos=self.cos,
            sin=self.sin,
            k_cache=self.caches[0],
            v_cache=self.caches[1],
            cache_seqlens=self.lengths,
            block_table=self.table,
        )

    def attend(self) -> object:
        return fmha_fwd(
            *(self.q[:, 0], *self.caches),
            cu_seqlens_q=self.sums_q,
            cu_seqlens_k=self.sums_k,
            block_table=self.table,
        )

    def attend_to_out(self) -> object:
        rest = (16, HDIM**-0.5, True, (-1, -1), self.table, 0.0, None, None, None)
        given = self.out, self.sums_q, 1, self.lengths, *rest
        return unified_attention(self.q[:, 0], *self.caches, *given)


def known(call: Callable[[], object]) -> tuple[Counter[tuple[int, str]], set[str]]:
    """How often a known call calls methods of each tensor, and what it runs of the package."""
    asked: Counter[tuple[int, str]] = Counter()
    ran: set[str] = set()

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(getattr(function, "__self__", None), torch.Tensor):
            asked[id(function.__self__), function.__name__] += 1
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            ran.add(f"{path.relative_to(PACKAGE).as_posix()} {frame.f_code.co_name}")

    before = sys.getprofile()
    with torch.no_grad():
        for _ in range(3):
            call()
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(before)
    return asked, ran


@pytest.mark.parametrize(
    ("kind", "kernels"), [("append", 2), ("read", 1), ("write", 1), ("attend", 1)]
)
def test_each_tensor_is_asked_once(rng, kind, kernels):
    """Addresses are for each kernel, and once for what shares memory with what is written."""
    given = Known(rng)
    asked, _ = known(getattr(given, kind))
    tensors = {name: x for name, x in vars(given).items() if isinstance(x, torch.Tensor)}
    tensors |= zip(("k_cache", "v_cache"), given.caches, strict=True)
    often = {
        (name, method): count
        for name, x in tensors.items()
        for method, most in {"is_neg": 1, "stride": 1, "data_ptr": kernels + 1}.items()
        # Of rows of a table the distance is asked for as well, and whether they lie in one.
        if (count := asked[id(x), method]) > most + 2 * (name == "table" and method == "stride")
    }
    assert not often
    assert not [method for _, method in asked if method in ("contiguous", "clone", "to", "copy_")]


@pytest.mark.parametrize("kind", ["append", "read", "write", "attend", "attend_to_out"])
def test_nothing_is_prepared_again(rng, kind):
    _, ran = known(getattr(Known(rng), kind))
    assert ran, "nothing of the package was seen"
    assert not [each for each in ran if each.startswith(PREPARES)]


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": lambda x: torch._neg_view(-x),
    "apart": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "columns": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}
OTHERWISE = [*itertools.product(("append", "write"), ("negative", "apart")), ("append", "columns")]


@pytest.mark.parametrize(("kind", "form"), OTHERWISE)
def test_tensors_that_lie_otherwise(rng, kind, form):
    """Behind known calls of plain ones, in a first call and in a known one."""
    plain, other = Known(rng), Known(rng)
    getattr(plain, kind)()
    for _ in range(3):
        plain.q, plain.k, plain.v = (
            torch.randn(x.shape, generator=rng) for x in (plain.q, plain.k, plain.v)
        )
        other.q, other.k, other.v = map(FORMS[form], (plain.q, plain.k, plain.v))
        other.cos, other.sin = plain.cos, plain.sin
        ours, theirs = (getattr(each, kind)() for each in (plain, other))
        torch.testing.assert_close(theirs, ours)
        assert all(map(torch.equal, plain.caches, other.caches))
