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
from untyped import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, fmha_fwd

import jitfmha
import jitfmha.aiter as peer
from jitfmha.aiter.ops.triton.unified_attention import unified_attention
from jitfmha.layers import known_attention

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
        self.rng, self.last, self.most = rng, torch.tensor([1, 3, 1], dtype=torch.int32), 9
        self.ends = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
        self.pages = torch.arange(6, dtype=torch.int32)
        self.ones, self.window, self.causal = torch.ones(2, 1), (-1, -1), True

    def change(self) -> None:
        """Other values in other tensors."""
        lengths = torch.randint(1, 13, (BATCH,), generator=self.rng, dtype=torch.int32)
        pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
        self.lengths, self.last = lengths, lengths - (pages - 1) * PAGE_SIZE
        self.most = int(lengths.max())
        self.sums_q, self.sums_k, self.ends = (
            self.sums_q.clone(),
            *(
                torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0))
                for x in (lengths, pages)
            ),
        )
        order = torch.randperm(PAGES, generator=self.rng, dtype=torch.int32)
        self.table, self.pages = order.view(BATCH, -1), order[: int(pages.sum())].clone()
        self.q, *self.caches = (
            torch.randn(x.shape, generator=self.rng) for x in (self.q, *self.caches)
        )
        self.out, self.ones = torch.full_like(self.out, torch.nan), self.ones.clone()

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

    def unified(self) -> Any:
        scores = HDIM**-0.5, self.causal, self.window, self.table, 0.0, None, *self.ones
        given = self.out, self.sums_q, 1, self.lengths, self.most, *scores
        return unified_attention(self.q[:, 0], *self.caches, *given)

    def in_lists(self) -> Any:
        given = self.sums_q, self.ends, self.pages, 1, self.most
        options = {"causal": self.causal, "window_size": self.window, "out": self.out}
        return peer.mha_batch_prefill_func(
            *(self.q[:, 0], *self.caches, *given), kv_last_page_lens=self.last, **options
        )

    def varlen(self) -> Any:
        given = self.sums_q, self.sums_k, 1, self.most
        options = {"causal": self.causal, "window_size": self.window, "return_lse": True}
        return peer.flash_attn_varlen_func(
            *(self.q[:, 0], *self.caches, *given), block_table=self.table, **options
        )

    def of_vllm(self) -> Any:
        return flash_attn_varlen_func(
            *(self.q[:, 0], *self.caches, self.sums_q),
            max_seqlen_q=1,
            max_seqlen_k=self.most,
            seqused_k=self.lengths,
            block_table=self.table,
            causal=self.causal,
            window_size=list(self.window),
            out=self.out,
            return_softmax_lse=True,
            scheduler_metadata=self.lengths,
        )

    def one_by_one(self) -> Any:
        return peer.paged_attention_v1(
            *(self.out, self.ones, self.q[:, 0], *self.caches, HDIM**-0.5, self.table, self.sums_q),
            *(self.lengths, self.most, None, "auto", "NHD", 0.0, *self.ones),
        )


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


@pytest.mark.parametrize("kind", ["append", "read", "write", "attend", "unified"])
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


SERVED = "unified", "in_lists", "varlen", "of_vllm", "one_by_one"
CONVERTS = "layers/peer_values.py as_", "call/interface.py fmha_fwd"


def all_the_way(given: Known, kind: str) -> Any:
    """What the call gives that is not looked up."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(known_attention, "has_watchers", lambda: True)
        return getattr(given, kind)()


def is_known(given: Known, kind: str) -> bool:
    """Whether a call whose like was there before converts nothing."""
    _, ran = known(getattr(given, kind))
    return not [each for each in ran if each.startswith(CONVERTS)]


@pytest.mark.parametrize("kind", SERVED)
def test_known_calls_give_what_others_give(rng, kind):
    given = Known(rng)
    for _ in range(4):
        given.change()
        assert is_known(given, kind)
        ours = getattr(given, kind)()
        given.out = torch.full_like(given.out, torch.nan)
        torch.testing.assert_close(ours, all_the_way(given, kind), rtol=0, atol=0)


def _scaled(given: Known) -> None:
    given.ones[0] = 2


def _windowed(given: Known) -> None:
    given.window = 2, 0


def _all(given: Known) -> None:
    given.causal = False
    given.window = 1, -1


def _columns(given: Known) -> None:
    given.q = given.q.transpose(-1, -2).contiguous().transpose(-1, -2)


def _turned(given: Known) -> None:
    given.q = torch._neg_view(-given.q)


def _of_subclass(given: Known) -> None:
    given.q = torch.Tensor._make_subclass(Subclass, given.q)


def _apart(given: Known) -> None:
    given.caches = [x.repeat_interleave(2, 0)[::2] for x in given.caches]


def _elsewhere(given: Known) -> None:
    given.out = given.out.transpose(0, 1).contiguous().transpose(0, 1)


class Subclass(torch.Tensor):
    """Of which the call has to ask."""


CHANGES = _scaled, _windowed, _all, _columns, _turned, _of_subclass, _apart, _elsewhere


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("change", CHANGES)
def test_calls_that_are_otherwise(rng, kind, change):
    """Behind known calls of plain ones, twice."""
    given = Known(rng)
    assert is_known(given, kind)
    for _ in range(2):
        given.change()
        change(given)
        with torch.no_grad():
            ours = getattr(given, kind)()
        found = [x.clone() for x in ([ours] if isinstance(ours, torch.Tensor) else ours)]
        expected = all_the_way(given, kind)
        expected = [expected] if isinstance(expected, torch.Tensor) else [*expected]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_tensors_that_are_one_and_then_two(rng):
    """Prefix sums of queries that serve as those of keys, too."""
    given = Known(rng)
    given.sums_k = given.sums_q
    assert is_known(given, "varlen")
    given.change()
    expected = all_the_way(given, "varlen")
    torch.testing.assert_close(given.varlen(), expected, rtol=0, atol=0)


def test_numbers_in_tensors_are_read_each_time(rng):
    given = Known(rng)
    given.change()
    longest = given.most = torch.tensor(12)
    given.window = torch.tensor([1, 0])
    given.unified()
    first = given.out.clone()
    given.window[0] = 8
    given.unified()
    assert not torch.equal(given.out, first)
    longest.fill_(-1)
    with pytest.raises(ValueError, match="max_seqlen_k"):
        given.unified()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("window", (-1.0, -1.0), TypeError),
        ("causal", 1.0, TypeError),
        ("most", True, TypeError),
        ("lengths", torch.tensor([1, -7, 9], dtype=torch.int32), ValueError),
        ("table", torch.full((BATCH, 4), PAGES, dtype=torch.int32), ValueError),
    ],
)
def test_what_is_wrong_is_found_behind_known_calls(rng, name, value, error):
    given = Known(rng)
    assert is_known(given, "unified")
    setattr(given, name, value)
    with pytest.raises(error) as found, torch.no_grad():
        given.unified()
    with pytest.raises(error) as expected:
        all_the_way(given, "unified")
    assert str(found.value) == str(expected.value)


def test_out_may_not_lie_in_what_is_read(rng):
    given = Known(rng)
    assert is_known(given, "unified")
    given.out = given.caches[1].view(-1)[: given.out.numel()].view(given.out.shape)
    with pytest.raises(ValueError, match="out shares memory with v"), torch.no_grad():
        given.unified()


@pytest.mark.parametrize("kind", SERVED)
def test_gradients_are_asked_for_behind_known_calls(rng, kind):
    given = Known(rng)
    assert is_known(given, kind)
    given.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="grad"):
        getattr(given, kind)()


def test_autocast_behind_known_calls(rng):
    given = Known(rng)
    assert is_known(given, "varlen")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out, _ = given.varlen()
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["in_lists", "varlen"])
def test_profiles_name_the_kernel_behind_known_calls(rng, kind):
    given = Known(rng)
    assert is_known(given, kind)
    with torch.profiler.profile() as profile, torch.no_grad():
        getattr(given, kind)()
    assert any(event.name.startswith("cpu_fwd") for event in profile.events())


def test_dropout_draws_other_numbers_each_time(rng):
    q = torch.randn(1, 4, 2, HDIM, generator=rng)
    with torch.no_grad():
        first, *others = (flash_attn_func(q, q, q, dropout_p=0.5) for _ in range(4))
    assert not any(torch.equal(first, x) for x in others)


def test_tensors_without_values_behind_known_calls():
    q = torch.empty(1, 4, 2, HDIM, device="meta")
    assert {flash_attn_func(q, q, q).shape for _ in range(3)} == {q.shape}
