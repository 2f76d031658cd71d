"""Lengths that a CPU kernel finds plain are those that Python finds nothing wrong with."""

import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from inputs import prefix_sums
from torch import Tensor
from untyped import explain, flash_attn_varlen_func, flash_attn_with_kvcache, fmha_bwd, fmha_fwd

import jitfmha
from jitfmha.planning.plan import Plan
from jitfmha.problem.arguments import CuSeqlens
from jitfmha.problem.problem import check_cu_seqlens_values

pytestmark = pytest.mark.usefixtures("poisoned_memory")

AITER: Any = jitfmha.aiter
HDIM, PAGE_SIZE, PAGES = 32, 3, 4


class Drawn:
    """Tensors of one layout, whose numbers are drawn anew: what was there before is found."""

    def __init__(self, rng: torch.Generator, kind: str, batch: int) -> None:
        self.rows_q, self.rows_k = 7 if batch else 0, 9 if batch else 0
        self.kind, self.batch, self.rng = kind, batch, rng
        self.q = torch.randn(self.rows_q, 1, HDIM, generator=rng)
        shape = (self.rows_k, 1, HDIM) if kind == "rows" else (PAGES, PAGE_SIZE, 1, HDIM)
        self.k, self.v = (torch.randn(shape, generator=rng) for _ in range(2))

    def number(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self.rng))

    def side(self, rows: int, of_one: int = 1) -> tuple[Tensor, Tensor]:
        """Prefix sums, and those of the rooms; ``of_one`` keys fit where a row is counted."""
        ends = sorted(self.number(0, rows) for _ in range(self.batch))
        if ends and self.number(0, 1):
            ends[-1] = rows
        rooms = [end - start for start, end in pairwise([0, *ends])]
        is_full = self.number(0, 1)
        lengths = [n * of_one if is_full else self.number(0, n * of_one) for n in rooms]
        return prefix_sums(lengths), prefix_sums(rooms)

    def drawn(self) -> dict[str, Any]:
        """Lengths of a call. In half of all one number is another, which may or may not matter."""
        given: dict[str, Any] = {}
        given["cu_seqlens_q"], given["cu_seqlens_q_padded"] = self.side(self.rows_q)
        if self.kind == "table":
            given["cu_seqlens_k"] = prefix_sums(
                [self.number(0, 3 * PAGE_SIZE) for _ in range(self.batch)]
            )
            shape: tuple[int, ...] = (self.batch, 3)
        elif self.kind == "rows":
            given["cu_seqlens_k"], given["cu_seqlens_k_padded"] = self.side(self.rows_k)
        else:
            sums, starts = self.side(3 * self.batch, PAGE_SIZE)
            given["cu_seqlens_k"] = sums + self.number(0, 1)
            given["cu_seqlens_k_padded"] = starts + self.number(0, 1)
            shape = (3 * self.batch + 1,)
        for name in ("cu_seqlens_q_padded", "cu_seqlens_k_padded"):
            plain = given[name.removesuffix("_padded")]
            if name in given and self.kind != "lists" and given[name].equal(plain):
                del given[name]
        if self.number(0, 1):
            name = list(given)[self.number(0, len(given) - 1)]
            given[name][self.number(0, self.batch)] += self.number(-2, 2)
        for side in "qk":
            longest = max([0, *given[f"cu_seqlens_{side}"].diff().tolist()])
            if self.number(0, 1):
                given[f"max_seqlen_{side}"] = max(longest - (self.number(0, 9) == 0), 0)
        if self.kind != "rows":
            given["block_table"] = torch.randint(PAGES, shape, generator=self.rng).int()
        return given


def found(run: Callable[[], Any]) -> tuple[str, Any]:
    """What is wrong, or the result."""
    try:
        return "", run()
    except ValueError as error:
        return str(error), None


def used_rows(given: dict[str, Any], side: str, rows: int) -> Tensor:
    sums = given[f"cu_seqlens_{side}"].tolist()
    starts = given.get(f"cu_seqlens_{side}_padded", given[f"cu_seqlens_{side}"]).tolist()
    used = torch.zeros(rows, dtype=torch.bool)
    for start, begin, end in zip(starts, sums, sums[1:], strict=False):
        used[start : start + end - begin] = True
    return used


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_few_rows_have_a_kernel_of_their_own(heads_k):
    def plan_for(queries: int) -> Plan:
        k = torch.zeros(2, 9, heads_k, HDIM)
        plan: Plan | None = explain(torch.zeros(2, queries, 4, HDIM), k, k).plan
        assert plan is not None
        return plan

    plans = {queries: plan_for(queries) for queries in range(1, 12)}
    for queries, plan in plans.items():
        are_few = queries * 4 // heads_k <= 8
        assert ("few_rows" in plan.kernel) == are_few
        for other in plans.values():
            assert plan.serves(other.problem.sizes) == (plan.kernel == other.kernel)


@pytest.mark.parametrize("batch", [0, 1, 4])
@pytest.mark.parametrize("kind", ["rows", "table", "lists"])
def test_kernel_and_python_agree(rng, kind, batch):
    """On lengths of calls that were there before, which differ in numbers alone."""
    it, outcomes = Drawn(rng, kind, batch), set()
    for _ in range(150):
        given = it.drawn()
        sums = given["cu_seqlens_q"], given["cu_seqlens_k"]
        padded = [given.get(f"cu_seqlens_{x}_padded", y) for x, y in zip("qk", sums, strict=True)]
        longest = [given.get(f"max_seqlen_{x}") for x in "qk"]
        lengths, rows = CuSeqlens(*sums, *padded, *longest), (it.rows_q, it.k.shape[-3])
        table = given.get("block_table")
        text, _ = found(lambda: check_cu_seqlens_values(rows, lengths, table))  # type: ignore[arg-type]  # noqa: B023
        fault, results = found(lambda: fmha_fwd(it.q, it.k, it.v, return_lse=True, **given))  # noqa: B023
        assert fault == text
        out, lse = results or (torch.zeros_like(it.q), torch.zeros(1, it.rows_q))
        if kind == "rows":
            tensors = (out, it.q, it.k, it.v, out, lse)
            fault, gradients = found(lambda: fmha_bwd(*tensors, **given))  # noqa: B023
            assert fault == text
        outcomes.add(text == "")
        if text:
            continue
        used = used_rows(given, "q", it.rows_q)
        outcomes.add(("all", bool(used.all())))
        assert not out[~used].any()
        assert bool((lse[:, ~used] == -torch.inf).all())
        assert not out.isnan().any()
        assert not lse.isnan().any()
        if kind == "rows":
            unused = ~used_rows(given, "k", it.rows_k)
            for x, without in zip(gradients, (~used, unused, unused), strict=True):
                assert not x[without].any()
                assert not x.isnan().any()
    assert {True, False} <= outcomes
    assert not batch or {("all", True), ("all", False)} <= outcomes


class Decoding:
    """A query for each of two sequences, and numbers about their keys in pages, kept in place."""

    def __init__(self, rng: torch.Generator) -> None:
        self.q = torch.randn(2, 2, HDIM, generator=rng)
        self.k, self.v = (torch.randn(6, PAGE_SIZE, 1, HDIM, generator=rng) for _ in range(2))
        self.out = torch.empty_like(self.q)
        self.sums_q = prefix_sums([1, 1])
        self.lengths, self.last = torch.zeros(2).int(), torch.zeros(2).int()
        self.sums, self.starts = torch.zeros(3).int(), torch.zeros(3).int()
        self.table, self.lists = torch.zeros(2, 3).int(), torch.zeros(6).int()

    def hold(self, lengths: list[int], pages: list[int]) -> None:
        """Sequences have these lengths, and three of the pages each."""
        counts = [min(-(-n // PAGE_SIZE), 3) for n in lengths]
        self.lengths.copy_(torch.tensor(lengths))
        self.sums.copy_(prefix_sums(lengths))
        self.table.copy_(torch.tensor(pages).view(2, 3))
        self.last.copy_(
            torch.tensor([n - (m - 1) * PAGE_SIZE for n, m in zip(lengths, counts, strict=True)])
        )
        self.starts.copy_(prefix_sums(counts))
        self.lists[: sum(counts)] = torch.cat([self.table[i, :n] for i, n in enumerate(counts)])

    def expected(self) -> Tensor:
        """By calls of a batch of one."""
        rows = []
        for q, pages, n in zip(self.q, self.table.long(), self.lengths.tolist(), strict=True):
            k, v = (x[pages].flatten(0, 1)[None, :n] for x in (self.k, self.v))
            rows.append(fmha_fwd(q[None, None], k, v)[0])
        return torch.cat(rows)

    def of_table(self) -> Tensor:
        sums = {"cu_seqlens_q": self.sums_q, "cu_seqlens_k": self.sums}
        return fmha_fwd(self.q, self.k, self.v, **sums, block_table=self.table)

    def of_lists(self) -> Tensor:
        sums = {"cu_seqlens_q": self.sums_q, "cu_seqlens_k": self.sums}
        starts = {"cu_seqlens_k_padded": self.starts}
        return fmha_fwd(self.q, self.k, self.v, **sums, **starts, block_table=self.lists)

    def kvcache(self) -> Tensor:
        given = {"cache_seqlens": self.lengths, "block_table": self.table}
        return flash_attn_with_kvcache(self.q[:, None], self.k, self.v, **given)[:, 0]

    def varlen(self) -> Tensor:
        given = {"seqused_k": self.lengths, "block_table": self.table}
        return flash_attn_varlen_func(
            self.q, self.k, self.v, self.sums_q, None, 1, 3 * PAGE_SIZE, **given
        )

    def batch_prefill(self) -> Tensor:
        lists = self.sums_q, self.starts, self.lists, 1, 3 * PAGE_SIZE
        return AITER.mha_batch_prefill_func(
            self.q, self.k, self.v, *lists, kv_last_page_lens=self.last
        )

    def paged_attention(self, lengths: Tensor | None = None) -> Tensor:
        one = torch.ones(1)
        return AITER.paged_attention_v1(
            *(self.out, one, self.q, self.k, self.v, HDIM**-0.5, self.table, None),
            self.lengths if lengths is None else lengths,
            *(3 * PAGE_SIZE, None, "auto", "NHD", 0.0, one, one),
        )


@pytest.mark.parametrize(
    "entry", ["of_table", "of_lists", "kvcache", "varlen", "batch_prefill", "paged_attention"]
)
def test_numbers_that_change_in_place(rng, entry):
    """A call that was there before looks at them again."""
    it = Decoding(rng)
    call: Callable[[], Tensor] = getattr(it, entry)
    good = [5, 9], [0, 1, 2, 3, 4, 5]
    wrong = ([5, 10], good[1]), ([5, 9], [0, 6, 2, 3, 4, 5]), ([5, 9], [0, 1, 2, 3, -1, 5])
    others = ([9, 1], [5, 4, 3, 2, 1, 0]), ([1, 4], [0, 1, 2, 0, 1, 2])
    for lengths, pages in (good, others[0], *wrong, others[1], *wrong, good):
        it.hold(lengths, pages)
        if (lengths, pages) in wrong:
            with pytest.raises(ValueError, match=r"10|page (6|-1)|kv_last_page_lens is 4") as error:
                call()
            assert "LengthsNotPlain" not in "".join(traceback.format_exception(error.value))
        else:
            torch.testing.assert_close(call(), it.expected(), rtol=1e-5, atol=1e-5)


def test_lengths_that_lie_anyhow(rng):
    """Strided ones, 64 bits, and those whose sign a bit of the tensor turns around."""
    it = Decoding(rng)
    it.hold([5, 9], [0, 1, 2, 3, 4, 5])
    expected = it.paged_attention().clone()
    for lengths in (
        torch.stack([it.lengths, it.lengths * 0], dim=1)[:, 0],
        it.lengths.long(),
        torch._neg_view(-it.lengths),
    ):
        it.out.fill_(torch.nan)
        assert torch.equal(it.paged_attention(lengths), expected)
    with pytest.raises(ValueError, match=r"all sequences have 4294967310 keys; 2147483647"):
        it.paged_attention(it.lengths.long() + torch.tensor([2**32, 0]))
