"""Keys and values in pages that a block table names, read where they lie."""

from typing import Any

import pytest
import torch
from closeness import assert_close, is_same
from fresh_calls import fresh_calls
from inputs import DTYPES, lay_out, prefix_sums
from packed_calls import PREFILL_OPTIONS
from refusals import refused
from torch import Tensor
from untyped import fmha_fwd

import jitfmha
from jitfmha.aiter import batch_prefill
from jitfmha.problem.float64_reference import attention_packed, unpaged

mha_batch_prefill: Any = jitfmha.aiter.mha_batch_prefill
mha_batch_prefill_func: Any = jitfmha.aiter.mha_batch_prefill_func
mha_varlen_fwd: Any = jitfmha.aiter.mha_varlen_fwd

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HEADS_Q, HEADS_K, HDIM, HDIM_V = 6, 3, 32, 24
# A sequence without keys, one key, keys around the tiles of 128 and 132, and no query.
LENGTHS_Q, LENGTHS_K = [1, 4, 1, 33, 0, 2, 1], [0, 1, 127, 129, 40, 300, 700]


class Paged:
    """Packed queries, and keys in shuffled pages among others that hold NaN."""

    def __init__(self, rng: torch.Generator, page_size: int, dtype: str = "fp32") -> None:
        lengths = torch.tensor(LENGTHS_K)
        counts = (lengths + page_size - 1) // page_size
        num_pages = 2 * int(counts.sum()) + 1
        order = torch.randperm(num_pages, generator=rng).tolist()
        self.table = torch.full((len(LENGTHS_K), int(counts.max())), -(10**6), dtype=torch.int32)
        caches = []
        for hdim in (HDIM, HDIM_V):
            cache = torch.full((num_pages, page_size, HEADS_K, hdim), torch.nan)
            caches.append(cache)
        for n, count in enumerate(counts.tolist()):
            for i in range(count):
                page = order.pop()
                self.table[n, i] = page
                used = min(page_size, LENGTHS_K[n] - i * page_size)
                for cache in caches:
                    cache[page, :used] = torch.randn(cache[page, :used].shape, generator=rng)
        self.q = torch.randn(sum(LENGTHS_Q), HEADS_Q, HDIM, generator=rng).to(DTYPES[dtype])
        self.k, self.v = (x.to(DTYPES[dtype]) for x in caches)
        self.cu_q, self.cu_k = prefix_sums(LENGTHS_Q), prefix_sums(LENGTHS_K)

    @property
    def groups(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k, "block_table": self.table}

    def call(self, **options: Any) -> tuple[Tensor, Tensor]:
        return fmha_fwd(self.q, self.k, self.v, return_lse=True, **(self.groups | options))

    def check(self, actual: tuple[Tensor, Tensor], lengths_q: Any = None, **options: Any) -> None:
        k, v = (unpaged(x, self.table, LENGTHS_K) for x in (self.k, self.v))
        starts = self.cu_q.tolist()[:-1], self.cu_k.tolist()[:-1]
        lengths = lengths_q or LENGTHS_Q, LENGTHS_K
        expected = attention_packed(self.q, k, v, *lengths, *starts, **options)
        assert_close(actual, expected, self.q, k, v)


# Of all page sizes, those around the vectors, steps and tiles of keys.
@pytest.mark.parametrize("page_size", [1, 7, 16, 33, 128, 1000])
@pytest.mark.parametrize("mask", [{}, {"mask": 2}, {"window_size": (60, 5), "sink_size": 3}])
def test_page_sizes(rng, page_size, mask):
    it = Paged(rng, page_size)
    for num_splits in (0, 2):
        it.check(it.call(num_splits=num_splits, **mask), **mask)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtypes(rng, dtype):
    it = Paged(rng, 5, dtype)
    it.check(it.call(mask=2), mask=2)


@pytest.mark.parametrize("page_size", [7, 40])
def test_in_the_tile_unit(rng, page_size):
    """Tiles of a few rows' keys lie in one page or in two, and NaN behind the last ones."""
    with fresh_calls("amx_emulated"):
        it = Paged(rng, page_size, "bf16")
        it.check(it.call(mask=2), mask=2)


def test_score_features(rng):
    it = Paged(rng, 19)
    slopes = torch.rand(len(LENGTHS_Q), HEADS_Q, generator=rng) / 1000
    it.check(it.call(alibi_slopes=slopes), alibi_slopes=slopes)


@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "packed", "every_other_row", "odd_address"])
def test_layouts(rng, layout):
    it = Paged(rng, 16)
    expected = it.call(mask=2)
    it.k, it.v = lay_out(it.k, layout), lay_out(it.v, layout)
    actual = it.call(mask=2)
    assert is_same(actual, expected)


def test_sequences_share_pages(rng):
    """More keys in all than the caches hold."""
    q = torch.randn(3, HEADS_Q, HDIM, generator=rng)
    k, v = (torch.randn(2, 16, HEADS_K, hdim, generator=rng) for hdim in (HDIM, HDIM_V))
    table = torch.tensor([[1, 0], [1, 1], [0, -5]], dtype=torch.int32)
    lengths, cu_q = [32, 20, 16], prefix_sums([1, 1, 1])
    cu_k = prefix_sums(lengths)
    actual = fmha_fwd(
        *(q, k, v), return_lse=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, block_table=table
    )
    keys, values = (unpaged(x, table, lengths) for x in (k, v))
    starts = [0, 1, 2], cu_k.tolist()[:-1]
    expected = attention_packed(q, keys, values, [1, 1, 1], lengths, *starts)
    assert_close(actual, expected, q, keys, values)


def test_a_table_that_is_a_slice(rng):
    """Its rows lie farther apart than they are long."""
    it = Paged(rng, 16)
    expected = it.call()[0]
    wide = torch.full((it.table.shape[0], it.table.shape[1] + 3), -7, dtype=torch.int32)
    wide[:, : it.table.shape[1]] = it.table
    assert torch.equal(it.call(block_table=wide[:, : it.table.shape[1]])[0], expected)


def test_new_lengths_and_tables_of_a_kind(rng):
    """Calls that are looked up see what changed: queries, lengths, pages and the size of pages."""
    for page_size in (16, 16, 33, 16):
        it = Paged(rng, page_size)
        it.check(it.call())
        fewer = it.q[: sum(LENGTHS_Q[:5])], it.k, it.v
        groups = {"cu_seqlens_q": it.cu_q[:6].clone(), "cu_seqlens_k": it.cu_k[:6].clone()}
        out = fmha_fwd(*fewer, **groups, block_table=it.table[:5])
        assert torch.equal(out, it.call()[0][: len(out)])


def test_compiled_and_traced(rng):
    it = Paged(rng, 16)
    names = ("cu_seqlens_q", "cu_seqlens_k", "block_table")
    tensors = tuple(it.groups[name] for name in names)
    results = torch.ops.jitfmha.fmha_fwd(
        *(it.q, it.k, it.v, None, "causal", (-1, -1), True, *tensors[:2]),
        *(None, None, None, None),
        block_table=tensors[2],
        num_splits=2,
    )
    assert is_same(results, it.call(mask=2, num_splits=2))


def cache_of(page_size: int, pages: int) -> dict[str, Any]:
    k = torch.zeros(pages, page_size, 1, 16)
    return {"q": torch.zeros(2, 1, 16), "k": k, "v": k, "cu_seqlens_q": prefix_sums([1, 1])}


TABLE = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        ({"block_table": TABLE - 1}, ValueError, ["block_table", "page -1", "3 pages"]),
        ({"block_table": TABLE + 3}, ValueError, ["block_table", "page 3", "3 pages"]),
        ({"block_table": TABLE + torch.tensor([0, 3]).int()}, ValueError, ["page 3"]),
        ({"block_table": TABLE.long()}, TypeError, ["block_table", "int64"]),
        ({"block_table": TABLE[0]}, ValueError, ["block_table", "(2,)"]),
        ({"block_table": TABLE[:1]}, ValueError, ["block_table", "(1, 2)", "2"]),
        ({"block_table": TABLE.T.contiguous().T}, ValueError, ["block_table", "contiguous"]),
        ({"block_table": TABLE[:, :1]}, ValueError, ["sequence 1", "7 keys", "4"]),
        ({"cu_seqlens_k": prefix_sums([3, 9])}, ValueError, ["sequence 1", "9 keys", "8"]),
        ({"block_table": [0]}, TypeError, ["block_table", "list"]),
        ({"v": torch.zeros(2, 4, 1, 16)}, ValueError, ["v has 2 pages", "3"]),
        ({"v": torch.zeros(3, 5, 1, 16)}, ValueError, ["v has seqlen 5", "4"]),
        ({"k": torch.zeros(3, 1, 16)}, ValueError, ["k", "(3, 1, 16)", "page_size"]),
        ({"cu_seqlens_k_padded": prefix_sums([4, 8])}, ValueError, ["cu_seqlens_k_padded"]),
        ({"cu_seqlens_q": None, "cu_seqlens_k": None}, ValueError, ["block_table", "cu_seqlens_k"]),
        (
            {"q": torch.zeros(2, 1, 16, requires_grad=True)},
            NotImplementedError,
            ["q requires grad", "block_table"],
        ),
    ],
)
def test_errors(changes, error, texts):
    given = cache_of(4, 3) | {"cu_seqlens_k": prefix_sums([3, 7]), "block_table": TABLE}
    with refused(error, *texts):
        fmha_fwd(**(given | changes))


# ---- AITER's functions ---------------------------------------------------------------------------


def aiter_options(**changes: Any) -> dict[str, Any]:
    return {
        "max_seqlen_q": max(LENGTHS_Q),
        "max_seqlen_k": max(LENGTHS_K),
        **PREFILL_OPTIONS,
    } | changes


def test_mha_varlen_fwd(rng):
    it = Paged(rng, 16)
    out, lse, _, _ = mha_varlen_fwd(
        *(it.q, it.k, it.v, it.cu_q, it.cu_k),
        min_seqlen_q=0,
        block_table=it.table,
        **aiter_options(),
    )
    it.check((out, lse), mask=2)


@pytest.mark.parametrize("padded", [False, True])
def test_min_seqlen_q_skips_short_sequences(rng, padded):
    it = Paged(rng, 16)
    padding = {"cu_seqlens_q_padded": it.cu_q} if padded else {}
    for least in (1, 2, 4, 10**12):
        lengths = [n if n > least else 0 for n in LENGTHS_Q]
        given = torch.full((len(it.q), HEADS_Q, HDIM_V), -7.0)
        calls = [
            mha_varlen_fwd(
                *(it.q, it.k, it.v, it.cu_q, it.cu_k),
                min_seqlen_q=least,
                block_table=it.table,
                out=out,
                **padding,
                **aiter_options(zero_tensors=zero),
            )
            for out, zero in ((None, False), (given.clone(), True), (given, False))
        ]
        for out, lse, *_ in calls[:2]:
            it.check((out, lse), lengths, mask=2)
        is_used = calls[0][1][0] > -torch.inf
        kept = torch.tensor([n > least for n in LENGTHS_Q]).repeat_interleave(
            torch.tensor(LENGTHS_Q)
        )
        assert (given[~kept] == -7).all()
        assert not is_used[~kept].any()


@pytest.mark.parametrize("can_be_read", [True, False])
def test_keys_of_lists_are_counted_where_nothing_can_be_read(monkeypatch, can_be_read):
    """As on a GPU; what an empty list says of its last page does not count."""
    monkeypatch.setattr(batch_prefill, "can_be_read", lambda _: can_be_read)
    last = torch.tensor([3, 9, 5], dtype=torch.int32)
    sums = batch_prefill._sums_of_lists(prefix_sums([2, 0, 1]), last, page_size=8)
    assert sums.tolist() == [0, 11, 11, 16]


@pytest.mark.parametrize("page_size", [1, 16])
def test_mha_batch_prefill(rng, page_size):
    it = Paged(rng, page_size)
    lengths = torch.tensor(LENGTHS_K, dtype=torch.int32)
    counts = (lengths + page_size - 1) // page_size
    lists = torch.cat([row[:n] for row, n in zip(it.table, counts.tolist(), strict=True)])
    indices = torch.cat([lists, torch.full((3,), 10**6, dtype=torch.int32)])
    last = (lengths - 1) % page_size + 1
    indptr = prefix_sums(counts.tolist())
    k, v = (it.k, it.v) if page_size > 1 else (it.k[:, 0], it.v[:, 0])
    out, lse, _, _ = mha_batch_prefill(
        *(it.q, k, v, it.cu_q, indptr, indices),
        kv_last_page_lens=last if page_size > 1 else None,
        **aiter_options(),
    )
    it.check((out, lse), mask=2)
    longest = max(LENGTHS_Q), max(LENGTHS_K)
    by_table = mha_batch_prefill_func(
        *(it.q, k, v, it.cu_q, indptr, indices, *longest),
        causal=True,
        return_lse=True,
        block_table=it.table,
        seqlen_k=lengths,
    )
    assert is_same(by_table, (out, lse))


@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        ({"kv_last_page_lens": None}, ValueError, ["kv_last_page_lens", "4 keys"]),
        ({"kv_last_page_lens": prefix_sums([5])}, ValueError, ["kv_last_page_lens is 0", "4 keys"]),
        ({"kv_indptr": prefix_sums([1, 4])}, ValueError, ["kv_indptr", "5", "2 entries"]),
        ({"kv_page_indices": TABLE[0] + 9}, ValueError, ["block_table", "page 9"]),
        ({"block_table": TABLE}, ValueError, ["block_table", "seqlen_k is missing"]),
        ({"kv_block_descale": TABLE}, ValueError, ["kv_block_descale", "2)"]),
        ({"k": torch.zeros(1, 1, 1, 4, 4)}, ValueError, ["v", "(num_pages", "16 bytes"]),
        ({"k": torch.zeros(1, 1)}, ValueError, ["k is", "five dimensions"]),
    ],
)
def test_mha_batch_prefill_errors(changes, error, texts):
    given = cache_of(4, 3) | aiter_options()
    given |= {"kv_indptr": prefix_sums([1, 1]), "kv_page_indices": TABLE[0]}
    given |= {"kv_last_page_lens": torch.tensor([4, 1], dtype=torch.int32)}
    with refused(error, *texts):
        mha_batch_prefill(**(given | changes))
