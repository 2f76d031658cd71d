"""AITER's packed pages on the CPU: the same results as pages of rows, to rounding.

Few query rows are summed up in another order.
"""

from typing import Any

import pytest
import torch
from closeness import assert_as_close, is_same
from descaled_calls import scales_of_tokens
from fresh_calls import fresh_calls
from inputs import DTYPES, EIGHT_BITS, prefix_sums
from packed_pages import packed_keys, packed_values
from refusals import refused
from torch import Tensor
from untyped import explain, fmha_fwd

import jitfmha
from jitfmha.planning.target import cpu_isas_here

mha_batch_prefill_func: Any = jitfmha.aiter.mha_batch_prefill_func

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HEADS_Q, HEADS_K, HDIM, HDIM_V = 6, 3, 48, 21
LENGTHS_Q, LENGTHS_K = [1, 4, 40, 33, 0, 1], [300, 1, 127, 129, 40, 0]
KINDS = {
    **{name: (dtype, dtype) for name, dtype in (DTYPES | EIGHT_BITS).items()},
    **{
        f"{name}_{kv}kv": (dtype, dtype_kv)
        for name, dtype in DTYPES.items()
        for kv, dtype_kv in EIGHT_BITS.items()
    },
}
DRAWN_ISA = pytest.mark.sample("an_isa", list(cpu_isas_here()), 1, shared_by="packed pages")


class Paged:
    """Packed queries, and keys in pages of rows that several sequences use."""

    def __init__(
        self,
        rng: torch.Generator,
        kind: str,
        page_size: int,
        hdims: tuple[int, int] = (HDIM, HDIM_V),
    ) -> None:
        dtype, dtype_kv = KINDS[kind]
        most = -(-max(LENGTHS_K) // page_size)
        self.q = torch.randn(sum(LENGTHS_Q), HEADS_Q, hdims[0], generator=rng).to(dtype)
        self.k, self.v = (
            torch.randn(most + 3, page_size, HEADS_K, n, generator=rng).mul(2).to(dtype_kv)
            for n in hdims
        )
        shape = len(LENGTHS_K), most
        self.options: dict[str, Any] = {
            "block_table": torch.randint(most + 3, shape, generator=rng, dtype=torch.int32),
            "cu_seqlens_q": prefix_sums(LENGTHS_Q),
            "cu_seqlens_k": prefix_sums(LENGTHS_K),
        }

    def call(self, k: Tensor, v: Tensor, **options: Any) -> Any:
        return fmha_fwd(self.q, k, v, return_lse=True, **(self.options | options))

    def check(self, **options: Any) -> None:
        expected = self.call(self.k, self.v, **options)
        actual = self.call(packed_keys(self.k), packed_values(self.v), **options)
        self.assert_same(actual, expected, **options)

    def assert_same(self, actual: Any, expected: Any, **options: Any) -> None:
        scales = [options.get(f"{name}_descale", torch.ones(1)).amax() for name in "kv"]
        k, v = (x.float() * scale for x, scale in zip((self.k, self.v), scales, strict=True))
        assert_as_close(actual, expected, self.q.float(), k, v)


@pytest.mark.sample("kind", list(KINDS), 1)
@DRAWN_ISA
def test_the_same_as_rows(rng, an_isa, kind):
    """Queries are few and many; keys are split, or not, and have scales of tokens, or none."""
    with fresh_calls(an_isa):
        for page_size in (16, 64, 1024):
            it = Paged(rng, kind, page_size)
            for num_splits in (0, 3):
                it.check(mask=2, num_splits=num_splits)
        if it.k.dtype.itemsize == 1:
            scales = {
                f"{n}_descale": scales_of_tokens(rng, x) for n, x in (("k", it.k), ("v", it.v))
            }
            it.check(mask=2, **scales)


def test_pages_of_single_pieces(rng):
    """Of four keys of fp32."""
    it = Paged(rng, "fp32", 4)
    it.check(window_size=(60, 5), sink_size=3)


@pytest.mark.parametrize("page_size", [16, 128])
def test_in_the_tile_unit(rng, page_size):
    """Tiles of 64 keys and columns, whole and not, in two blocks of them."""
    with fresh_calls("amx_emulated"):
        it = Paged(rng, "bf16", page_size, (64, 200))
        it.check(window_size=(130, 0))


@pytest.mark.parametrize("isa", [None, "amx_emulated"])
@pytest.mark.sample("kind", ["fp32", "bf16"], 1)
def test_behind_the_last_key(rng, kind, isa):
    """What lies there counts for nothing: slots of a cache that nobody has written."""
    it = Paged(rng, kind, 16)
    it.options["block_table"] = torch.arange(6 * 19, dtype=torch.int32).view(6, 19)
    it.k, it.v = (
        torch.randn(6, 19 * 16, *x.shape[2:], generator=rng).to(x.dtype) for x in (it.k, it.v)
    )
    for x in (it.k, it.v):
        for n, length in enumerate(LENGTHS_K):
            x[n, length:] = torch.nan
    k, v = (x.view(-1, 16, *x.shape[2:]) for x in (it.k, it.v))
    with fresh_calls(isa):
        expected = it.call(k, v)
        actual = it.call(packed_keys(k), packed_values(v))
    it.k, it.v = k.nan_to_num(), v.nan_to_num()
    it.assert_same(actual, expected)


def test_layouts(rng):
    """Pages and heads may lie anywhere, as those of several layers do."""
    it = Paged(rng, "bf16", 16)
    k, v = packed_keys(it.k), packed_values(it.v)
    expected = it.call(k, v)
    k, v = (torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1] for x in (k, v))
    k = k.transpose(0, 1).contiguous().transpose(0, 1)
    assert is_same(it.call(k, v), expected)


def test_new_lengths_of_a_kind(rng):
    """Calls of other queries are looked up; pages of rows beside them are another kind."""
    it = Paged(rng, "bf16", 16)
    k, v = packed_keys(it.k), packed_values(it.v)
    with fresh_calls() as target:
        for rows in (79, 46, 79):
            sums = it.options["cu_seqlens_q"].clamp(max=rows)
            options = it.options | {"cu_seqlens_q": sums, "return_lse": True}
            expected = fmha_fwd(it.q[:rows], it.k, it.v, **options)
            actual = fmha_fwd(it.q[:rows], k, v, **options)
            it.assert_same(actual, expected)
        (calls,) = target.calls.values()
        assert len(calls.kinds) == 2


def test_under_torch_compile(rng):
    it = Paged(rng, "bf16", 16)
    k, v = packed_keys(it.k), packed_values(it.v)
    compiled = torch.compile(it.call, fullgraph=True, backend="aot_eager")
    assert is_same(compiled(k, v), it.call(k, v))


def test_function_of_aiter(rng):
    it = Paged(rng, "bf16", 16)
    indptr = prefix_sums([0, 0])
    options = {
        "kv_indptr": indptr,
        "kv_page_indices": indptr,
        "max_seqlen_q": max(LENGTHS_Q),
        "max_seqlen_k": max(LENGTHS_K),
        "cu_seqlens_q": it.options["cu_seqlens_q"],
        "block_table": it.options["block_table"],
        "seqlen_k": torch.tensor(LENGTHS_K, dtype=torch.int32),
        "causal": True,
    }
    k, v = packed_keys(it.k), packed_values(it.v)
    actual = mha_batch_prefill_func(it.q, k, v, **options)
    assert torch.equal(actual, it.call(k, v, mask=2)[0])


GOOD = {"k": (2, 3, 6, 16, 8), "v": (2, 3, 2, 21, 8)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": (2, 3, 12, 16, 4)}, ["k has shape", "(2, 3, 12, 16, 4)", "8 of torch.bfloat16"]),
        ({"v": (2, 3, 4, 21, 4)}, ["v has shape", "page_size / x", "8 of torch.bfloat16"]),
        ({"v": (2, 16, 3, 21)}, ["v has shape", "(2, 16, 3, 21)", "page_size / x"]),
        ({"k": (2, 16, 3, 48)}, ["k has shape", "(2, 16, 3, 48)", "hdim / x"]),
        ({"k": (2, 3, 5, 16, 8)}, ["k has hdim 40", "48"]),
        ({"v": (2, 2, 2, 21, 8)}, ["v has 2 heads", "3"]),
        ({"v": (2, 3, 3, 21, 8)}, ["v has seqlen 24", "16"]),
        ({"v": (3, 3, 2, 21, 8)}, ["v has 3 pages", "2"]),
        ({"k": (2, 3, 6, 0, 8), "v": (2, 3, 0, 21, 8)}, ["k has shape", "at least one key"]),
    ],
)
def test_shapes_that_are_refused(changes, words):
    q = torch.zeros(2, 6, 48).bfloat16()
    sums = prefix_sums([1, 1])
    table = torch.zeros(2, 1, dtype=torch.int32)
    given = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "block_table": table}
    shapes = GOOD | changes
    k, v = (torch.zeros(shapes[name]).bfloat16() for name in "kv")
    for function in (fmha_fwd, explain):
        function(q, *(torch.zeros(GOOD[name]).bfloat16() for name in "kv"), **given)
        with refused(ValueError, *words):
            function(q, k, v, **given)


def test_strides_that_are_refused():
    q, sums = torch.zeros(2, 6, 48).bfloat16(), prefix_sums([1, 1])
    given = {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
    k, v = (torch.zeros(GOOD[name]).bfloat16() for name in "kv")
    table = torch.zeros(2, 1, dtype=torch.int32)
    for name, x in (("k", k), ("v", v)):
        for dim in (2, 3, 4):
            spread = torch.stack([x, x], dim + 1).select(dim + 1, 0)
            with refused(ValueError, f"{name} has strides", "contiguous"):
                fmha_fwd(q, **({"k": k, "v": v} | {name: spread}), block_table=table, **given)
    with refused(ValueError, "k has shape", "cu_seqlens"):
        fmha_fwd(q, k, v, **given)
    with refused(ValueError, "block_table names page 2", "2 pages"):
        fmha_fwd(q, k, v, block_table=table + 2, **given)
