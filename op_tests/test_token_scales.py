"""Scales of tokens: each key and value of 8 bits has its own, on the CPU."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from descaled_calls import random_scales, scaled, scales_of_tokens
from fresh_calls import fresh_calls
from inputs import DTYPES, EIGHT_BITS, SIZES, prefix_sums, random_qkv
from packed_calls import PREFILL_OPTIONS, RAGGED, Sequences, packed
from refusals import refused
from score_features import FEATURES, Shape
from torch import Tensor
from untyped import explain, flash_attn_with_kvcache, fmha_bwd, fmha_fwd

import jitfmha
from jitfmha.planning.target import cpu_isas_here
from jitfmha.problem.float64_reference import attention, attention_packed, unpaged

mha_batch_prefill: Any = jitfmha.aiter.mha_batch_prefill

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HDIM, HDIM_V = 37, 21
# Of queries, and of keys and values.
KINDS = {
    **{name: (dtype, dtype) for name, dtype in EIGHT_BITS.items()},
    **{
        f"{name}_{kv}kv": (dtype, dtype_kv)
        for name, dtype in DTYPES.items()
        for kv, dtype_kv in EIGHT_BITS.items()
    },
}
A_KIND = pytest.mark.sample("kind", list(KINDS), 1, shared_by="token scales")
DRAWN_ISA = pytest.mark.sample("an_isa", list(cpu_isas_here()), 1, shared_by="token scales")


def as_kind(rng: torch.Generator, kind: str, *tensors: Tensor) -> list[Tensor]:
    """Random q, k and v of these shapes."""
    dtype, dtype_kv = KINDS[kind]
    return [
        torch.randint(-128, 128, x.shape, generator=rng, dtype=torch.int8)
        if each == torch.int8
        else torch.randn(x.shape, generator=rng).to(each)
        for x, each in zip(tensors, (dtype, dtype_kv, dtype_kv), strict=True)
    ]


def q_scale(kind: str) -> dict[str, Tensor]:
    """What makes normal numbers of int8 queries."""
    return {"q_descale": torch.full((1,), 1 / 64)} if kind == "int8" else {}


def out_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype


def check(actual: Any, expected: Any, tensors: list[Tensor], scales: dict[str, Tensor]) -> None:
    assert_close(actual, expected, *scaled(tuple(tensors), scales), dtype=out_dtype(tensors[0]))


@A_KIND
@DRAWN_ISA
@pytest.mark.parametrize("names", [("k",), ("v",), ("k", "v")])
def test_batch_mode(rng, an_isa, kind, names):
    """Few rows and many; the tensor beside has one for each head."""
    for sizes in (*SIZES, (1, 300, 4, 2), (5, 140, 4, 1)):
        tensors = as_kind(rng, kind, *random_qkv(rng, sizes, hdim=HDIM, hdim_v=HDIM_V))
        scales = random_scales(rng, "each head", *sizes[2:])
        scales = {f"{x}_descale": scales[f"{x}_descale"] for x in "kv"} | q_scale(kind)
        of = dict(zip("qkv", tensors, strict=True))
        scales |= {f"{name}_descale": scales_of_tokens(rng, of[name]) for name in names}
        with fresh_calls(an_isa):
            actual = fmha_fwd(*tensors, mask="causal", return_lse=True, **scales)
        check(actual, attention(*tensors, mask="causal", **scales), tensors, scales)


@A_KIND
@pytest.mark.parametrize("gap", [0, 3])
def test_group_mode(rng, kind, gap):
    """Of rows between sequences nobody looks at the scales."""
    call = packed(rng, *RAGGED, hdim=HDIM, hdim_v=HDIM_V)
    call.sequences = Sequences(RAGGED, gap)
    rows_q, rows_k = call.sequences.rows
    shapes = (rows_q, 4, HDIM), (rows_k, 2, HDIM), (rows_k, 2, HDIM_V)
    call.q, call.k, call.v = as_kind(rng, kind, *map(torch.empty, shapes))
    scales = {f"{n}_descale": scales_of_tokens(rng, x) for n, x in (("k", call.k), ("v", call.v))}
    for x in scales.values():
        x[~call.sequences.used_rows(1)] = torch.nan
    options = {"mask": "causal", **q_scale(kind), **scales}
    tensors = [call.q, call.k, call.v]
    expected = attention_packed(*tensors, *call.sequences.spans, **options)
    check(call.call(**options), expected, tensors, scales | q_scale(kind))


@pytest.mark.sample("page_size", [1, 7, 16, 128, 1024], 2)
@A_KIND
def test_pages(rng, kind, page_size):
    """With key splits, and sequences that share pages; tokens behind the end have scales of NaN."""
    lengths_q, lengths_k = [1, 4, 40, 0], [300, 33, 129, 20]
    most = -(-max(lengths_k) // page_size)
    table = torch.randint(most + 3, (4, most), generator=rng, dtype=torch.int32)
    shapes = (
        (sum(lengths_q), 4, HDIM),
        (most + 3, page_size, 2, HDIM),
        (most + 3, page_size, 2, HDIM_V),
    )
    q, k, v = as_kind(rng, kind, *map(torch.empty, shapes))
    scales = {f"{n}_descale": scales_of_tokens(rng, x) for n, x in (("k", k), ("v", v))}
    groups = {"cu_seqlens_q": prefix_sums(lengths_q), "cu_seqlens_k": prefix_sums(lengths_k)}
    packed_kv = [unpaged(x, table, lengths_k) for x in (k, v)]
    of_packed = {name: unpaged(x, table, lengths_k) for name, x in scales.items()}
    starts = (x.tolist()[:-1] for x in groups.values())
    options = {"mask": 2, **q_scale(kind)}
    expected = attention_packed(
        q, *packed_kv, lengths_q, lengths_k, *starts, **options, **of_packed
    )
    for num_splits in (0, 1, 3):
        actual = fmha_fwd(
            *(q, k, v),
            return_lse=True,
            block_table=table,
            num_splits=num_splits,
            **groups,
            **options,
            **scales,
        )
        check(actual, expected, [q, *packed_kv], of_packed | q_scale(kind))


@A_KIND
def test_with_all_features(rng, kind):
    """The scale of a key comes first, that of a value after the sum and dropout."""
    for sizes in ((1, 300, 4, 2), (70, 131, 4, 2)):
        tensors = as_kind(rng, kind, *random_qkv(rng, sizes, hdim=HDIM, hdim_v=HDIM_V))
        seqlen_q, seqlen_k, heads_q, _ = sizes
        shape = Shape(2, heads_q, seqlen_q, seqlen_k, torch.bfloat16, rng)
        options: dict[str, Any] = FEATURES["everything"](shape)
        options["bias"] = options["bias"].bfloat16().to(out_dtype(tensors[0]))
        of = zip("kv", tensors[1:], strict=True)
        scales = {f"{name}_descale": scales_of_tokens(rng, x) for name, x in of}
        scales |= q_scale(kind)
        actual = fmha_fwd(*tensors, return_lse=True, **options, **scales)
        expected = attention(*tensors, **options, **scales)
        assert_close(
            *(actual, expected, *scaled(tuple(tensors), scales)),
            dropout_p=options["dropout_p"],
            dtype=out_dtype(tensors[0]),
        )


def test_windows(rng):
    """Rows whose first key lies within a tile, and those of keys behind it."""
    tensors = as_kind(rng, "fp32_int8kv", *random_qkv(rng, (40, 400, 4, 2), hdim=HDIM))
    of = zip("kv", tensors[1:], strict=True)
    scales = {f"{name}_descale": scales_of_tokens(rng, x) for name, x in of}
    for options in ({"window_size": (30, 5)}, {"window_size": (30, 5), "sink_size": 3}):
        actual = fmha_fwd(*tensors, return_lse=True, **options, **scales)
        check(actual, attention(*tensors, **options, **scales), tensors, scales)


def test_strides(rng):
    """Those of k and of v differ, as do the orders of their dimensions."""
    tensors = as_kind(rng, "fp32_int8kv", *random_qkv(rng, (3, 150, 4, 2), hdim=HDIM))
    k_scale = scales_of_tokens(rng, tensors[1])
    for v_scale in (
        scales_of_tokens(rng, tensors[2]).contiguous(),
        k_scale[:, :1].expand_as(k_scale),
    ):
        scales = {"k_descale": k_scale, "v_descale": v_scale}
        actual = fmha_fwd(*tensors, return_lse=True, **scales)
        check(actual, attention(*tensors, **scales), tensors, scales)


def test_a_call_for_every_length(rng):
    """Lengths and strides of the scales are no part of a kind, and each call has its own."""
    q, k, v = as_kind(rng, "int8", *random_qkv(rng, (3, 200, 4, 2), hdim=HDIM, hdim_v=HDIM_V))
    scales = {f"{n}_descale": scales_of_tokens(rng, x) for n, x in (("k", k), ("v", v))}
    with fresh_calls() as target:
        for length in (200, 100, 33, 200):
            of_these = {name: x[:, :length] for name, x in scales.items()}
            for given in (of_these, {name: x.contiguous() for name, x in of_these.items()}):
                tensors = [q, k[:, :length], v[:, :length]]
                actual = fmha_fwd(*tensors, return_lse=True, softmax_scale=0.003, **given)
                expected = attention(*tensors, softmax_scale=0.003, **given)
                known = scaled(tuple(tensors), given)
                assert_close(actual, expected, *known, 0.003, dtype=torch.bfloat16)
        (calls,) = target.calls.values()
        assert len(calls.kinds) == 1


def test_the_same_scale_for_all_tokens(rng):
    """A scale that is expanded serves all; one of 0 makes scores, or the output, 0."""
    tensors = as_kind(rng, "fp8_e4m3fn", *random_qkv(rng, (40, 90, 4, 2), hdim=HDIM))
    scale = torch.rand(2, 2, generator=rng)
    for name in ("k_descale", "v_descale"):
        of_heads = fmha_fwd(*tensors, return_lse=True, **{name: scale})
        of_tokens = scale[:, None, :, None].expand(-1, 90, -1, 1)
        actual = fmha_fwd(*tensors, return_lse=True, **{name: of_tokens})
        expected = attention(*tensors, **{name: scale})
        for results in (of_heads, actual):
            check(results, expected, tensors, {name: scale})
        zeros = fmha_fwd(*tensors, return_lse=True, mask=2, **{name: of_tokens * 0})
        check(zeros, attention(*tensors, mask=2, **{name: scale * 0}), tensors, {name: scale * 0})


def test_under_torch_compile_and_vmap(rng):
    q, k, v = as_kind(rng, "fp32_int8kv", *random_qkv(rng))
    k_scale, v_scale = scales_of_tokens(rng, k), scales_of_tokens(rng, v)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*tensors: Tensor) -> Any:
        return fmha_fwd(*tensors[:3], k_descale=tensors[3], v_descale=tensors[4])

    expected = fmha_fwd(q, k, v, k_descale=k_scale, v_descale=v_scale)
    assert torch.equal(compiled(q, k, v, k_scale, v_scale), expected)

    def call(*tensors: Tensor) -> Any:
        return fmha_fwd(*tensors, k_descale=k_scale, v_descale=v_scale)

    both = [torch.stack([x, x.flip(1)]) for x in (q, k, v)]
    by_one = torch.stack([call(*(x[i] for x in both)) for i in range(2)])
    assert torch.equal(torch.vmap(call)(*both), by_one)


# ---- Other functions -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["rows", "apart", "batch", "left", "left apart", "pages"])
def test_kv_cache(rng, where):
    """However a cache lies, its scales lie likewise."""
    seqlens = torch.tensor([70, 33, 1], dtype=torch.int32)
    q, k, v = as_kind(
        rng, "fp32_int8kv", *map(torch.empty, ((3, 2, 4, 32), (3, 75, 2, 32), (3, 75, 2, 24)))
    )
    scales = {f"{n}_descale": scales_of_tokens(rng, x) for n, x in (("k", k), ("v", v))}
    if "apart" not in where:
        k, v = k[:, :70].contiguous(), v[:, :70].contiguous()
    k, v = k[:, :70], v[:, :70]
    scales = {name: x[:, :70] for name, x in scales.items()}
    options: dict[str, Any] = {}
    first = torch.zeros(3, dtype=torch.int32)
    if where == "batch":
        options["cache_batch_idx"] = torch.arange(3, dtype=torch.int32)
    if "left" in where:
        first = options["cache_leftpad"] = torch.tensor([3, 5, 0], dtype=torch.int32)
    if where == "pages":
        k, v = (x.unflatten(1, (7, 10)).flatten(0, 1) for x in (k, v))
        scales = {name: x.unflatten(1, (7, 10)).flatten(0, 1) for name, x in scales.items()}
        options["block_table"] = torch.arange(21, dtype=torch.int32).view(3, 7)
    out, lse = flash_attn_with_kvcache(
        *(q, k, v),
        cache_seqlens=seqlens,
        causal=True,
        return_softmax_lse=True,
        **options,
        **scales,
    )
    if where == "pages":
        whole = {"k": k, "v": v, **scales}
        k, v, *of_tokens = (x.unflatten(0, (3, 7)).flatten(1, 2) for x in whole.values())
        scales = dict(zip(scales, of_tokens, strict=True))
    for n, (start, end) in enumerate(zip(first.tolist(), seqlens.tolist(), strict=True)):
        one = [q[n, None], *(x[n, None, start:end] for x in (k, v))]
        of_one = {name: x[n, None, start:end] for name, x in scales.items()}
        expected = attention(*one, mask=2, **of_one)
        check((out[n, None], lse[n, None]), expected, one, of_one)


def test_scales_of_the_pages_of_aiter(rng):
    """One for keys and one for values of each page and head."""
    k, v = (torch.randint(-128, 128, (9, 16, 2, 32), generator=rng).to(torch.int8) for _ in "kv")
    q = torch.randn(5, 4, 32, generator=rng)
    of_pages = torch.rand(9, 2, 2, generator=rng) / 64
    pages = torch.tensor([3, 8, 0, 4], dtype=torch.int32)
    given: dict[str, Any] = {
        "cu_seqlens_q": prefix_sums([2, 3]),
        "kv_indptr": prefix_sums([3, 1]),
        "kv_page_indices": pages,
        "kv_last_page_lens": torch.tensor([5, 16], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 37,
        **PREFILL_OPTIONS,
    }
    out, lse, *_ = mha_batch_prefill(q, k, v, **given, kv_block_descale=of_pages)
    table = torch.tensor([[3, 8, 0], [4, 0, 0]], dtype=torch.int32)
    lengths = [37, 16]
    k_scale, v_scale = of_pages[:, None, :, None].expand(-1, 16, -1, 1, 2).unbind(-1)
    tensors = [unpaged(x, table, lengths) for x in (k, v, k_scale, v_scale)]
    scales = {"k_descale": tensors[2], "v_descale": tensors[3]}
    expected = attention_packed(q, *tensors[:2], [2, 3], lengths, [0, 2], [0, 37], mask=2, **scales)
    check((out, lse), expected, [q, *tensors[:2]], scales)
    for changes, words in (
        ({"kv_block_descale": of_pages[0]}, ["kv_block_descale", "(2, 2)", "(9, 2, 2)"]),
        ({"k_descale": torch.ones(1)}, ["k_descale", "kv_block_descale"]),
    ):
        with refused(ValueError, *words):
            mha_batch_prefill(q, k, v, **(given | {"kv_block_descale": of_pages} | changes))


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("k_descale", (2, 49, 2, 2), ["k_descale", "(2, 49, 2, 2)", "(2, 49, 2, 1)"]),
        ("k_descale", (2, 49, 1, 1), ["k_descale", "(2, 49, 1, 1)", "(2, 49, 2, 1)"]),
        ("v_descale", (2, 48, 2, 1), ["v_descale", "(2, 48, 2, 1)", "(2, 49, 2, 1)"]),
        ("v_descale", (2, 49, 2), ["v_descale", "(2, 49, 2)", "(2, 49, 2, 1)"]),
        ("q_descale", (2, 33, 4, 1), ["q_descale", "(2, 33, 4, 1)", "(4,)"]),
    ],
)
def test_shapes_that_none_has(rng, name, shape, words):
    tensors = as_kind(rng, "int8", *random_qkv(rng, heads_q=4, heads_k=2))
    good = {"k_descale": torch.ones(2, 49, 2, 1)}
    for function in (fmha_fwd, explain):
        function(*tensors, **good)
        with refused(ValueError, *words):
            function(*tensors, **{name: torch.ones(shape)})


def test_what_does_not_go_together(rng):
    q, k, v = as_kind(rng, "int8", *random_qkv(rng))
    of_tokens = torch.ones(2, 49, 2, 1)
    with refused(ValueError, "v_descale", "p_descale", "token"):
        fmha_fwd(q, k, v, v_descale=of_tokens, p_descale=torch.ones(1))
    fmha_fwd(q, k, v, k_descale=of_tokens, p_descale=torch.ones(1))
    with refused(TypeError, "k_descale", "float64"):
        fmha_fwd(q, k, v, k_descale=of_tokens.double())
    with refused(ValueError, "k_descale", "float32"):
        fmha_fwd(q.float(), k.float(), v.float(), k_descale=of_tokens)
    x = torch.randn(2, 49, 2, 16, generator=rng)
    with refused(ValueError, "v_descale", "float32"):
        fmha_bwd(x, x, x, x, x, torch.randn(2, 2, 49), v_descale=of_tokens)
    with refused(ValueError, "k_descale", "(2, 48, 2, 1)", "(2, 49, 2, 1)"):
        flash_attn_with_kvcache(q, k, v, k_descale=torch.ones(2, 48, 2, 1))
