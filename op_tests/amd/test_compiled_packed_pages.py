"""AITER's packed pages in compiled kernels, on the emulator with its sanitizer."""

import pytest
import torch
from compiled_calls import (
    ARCHS,
    FP8_DTYPES,
    OTHER_DTYPES,
    assert_near,
    assert_nothing_is_spilled,
    check_pages,
    kernel_dtype,
    run,
)
from inputs import prefix_sums
from packed_pages import packed_keys, packed_values
from score_features import NO_MODIFIERS
from untyped import explain

from jitfmha import emulate
from jitfmha.kernels.compiled.traits import ForwardTraits, kernel_spec
from jitfmha.problem.float64_reference import attention_packed, unpaged

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.sample(
    ("arch", "dtype", "page_size", "features", "hdims"),
    [
        (arch, dtype, page_size, features, hdims)
        for arch in ARCHS
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8)
        for page_size in (16, 32, 64, 128, 256, 1024)
        for features in ((), ("bias", "alibi", "softcap", "dropout"), ("sink", "sink_tokens"))
        for hdims in ((48, 40), (64, 128), (128, 128), (256, 250), (576, 512))
    ],
    4,
)
def test_drawn_pages(rng, arch, dtype, page_size, features, hdims):
    """Beside what else a call has; of int8 also with scales of tokens."""
    check_pages(
        *(arch, rng, page_size, hdims),
        dtype=dtype,
        features=features,
        scales="each token" if dtype == torch.int8 and not features else "",
        is_packed=True,
    )


_KINDS = ("bf16", "fp16", "fp8", "int8", "bf16_int8kv", "bf16_fp8kv", "fp16_fp8kv")


@pytest.mark.sample(
    ("arch", "kind", "page_size", "hdims"),
    [
        (arch, kind, page_size, hdims)
        for arch in ARCHS
        for kind in _KINDS
        for page_size in (8, 16, 64, 1024)
        if page_size > 8 or kind in ("bf16", "fp16")
        for hdims in ((64, 64), (128, 128), (256, 256), (48, 37), (96, 192))
    ],
    4,
)
def test_few_rows(rng, arch, kind, page_size, hdims):
    lengths = [1, 3, 1, 2], [70, 33, 0, 129]
    check_lengths(rng, arch, kind, page_size, hdims, lengths, 12, "_decode")


@pytest.mark.sample(
    ("arch", "kind", "page_size", "hdims"),
    [
        (arch, kind, page_size, hdims)
        for arch in ARCHS
        for kind in _KINDS
        for page_size in (16, 48, 1024)
        for hdims in ((128, 128), (192, 128), (256, 256), (48, 37), (96, 192), (64, 321))
    ],
    3,
)
def test_many_rows(rng, arch, kind, page_size, hdims):
    """Waves load what one page has; keys end in every piece of 16 bytes and behind it."""
    lengths_k = [int(n) for n in torch.randint(1, 100, (5,), generator=rng)]
    lengths = [130, 200, 33, 129, 140], [*lengths_k[:4], 0]  # tiles of 128 rows are not full
    check_lengths(rng, arch, kind, page_size, hdims, lengths, 4, "wide_packed_pages")


def check_lengths(rng, arch, kind, page_size, hdims, lengths, heads_q, word):
    """Behind the last key a page holds NaN, where its numbers know it."""
    fp8 = FP8_DTYPES[arch]
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": fp8, "int8": torch.int8}
    dtype, dtype_kv = (dtypes[name] for name in (*kind.removesuffix("kv").split("_"), kind)[:2])
    lengths_q, lengths_k = lengths
    batch, heads_k = len(lengths_q), 2
    most = -(-max(lengths_k) // page_size)
    table = torch.randperm(batch * most, generator=rng).int().view(batch, most)
    q = numbers(rng, dtype, sum(lengths_q), heads_q, hdims[0])
    pages = []
    for hdim in hdims:
        x = numbers(rng, dtype_kv, batch * most, page_size, heads_k, hdim)
        for row, length in zip(table.tolist(), lengths_k, strict=True):
            for i, page in enumerate(row):
                if x.is_floating_point():
                    x[page, max(length - i * page_size, 0) :] = torch.nan
        pages.append(x)
    k, v = pages
    scale = {"int8": 1 / 64**2, "bf16_int8kv": 1 / 64}.get(kind, 1.0) * hdims[0] ** -0.5
    options = {"mask": 2, "softmax_scale": scale}
    groups = {"cu_seqlens_q": prefix_sums(lengths_q), "cu_seqlens_k": prefix_sums(lengths_k)}
    rows = [unpaged(x, table, lengths_k) for x in (k, v)]
    starts = (x.tolist()[:-1] for x in groups.values())
    expected = attention_packed(q, *rows, lengths_q, lengths_k, *starts, **options)
    given = packed_keys(k), packed_values(v)
    with emulate(arch):
        plan = explain(q, *given, block_table=table, **groups, **options).plan
    assert "packed_pages" in plan.kernel
    assert word in plan.kernel
    for num_splits in (1, 3):
        actual = run(
            *(arch, q, *given), block_table=table, num_splits=num_splits, **groups, **options
        )
        out_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        assert_near(actual, expected, q.float(), *(x.float() for x in rows), options, out_dtype)


@pytest.mark.sample(
    ("arch", "dtypes", "hdims", "is_masked", "lists_work"),
    [
        (arch, dtypes, hdims, is_masked, lists_work)
        for arch in ARCHS
        for dtypes in (*OTHER_DTYPES, ("bf16", "bf16"))
        if "fp32" not in dtypes
        for hdims in ((256, 256), (192, 128), (128, 128), (96, 96), (64, 64))
        for is_masked in (False, True)
        for lists_work in (False, True)
    ],
    1,
    is_fixed=True,
)
def test_nothing_is_spilled(arch, dtypes, hdims, is_masked, lists_work):
    dtype, kv_dtype = (kernel_dtype(arch, name) for name in dtypes)
    traits = ForwardTraits(
        *(arch, dtype, *hdims, "gm1", "rtne", is_masked, "wide_packed_pages", NO_MODIFIERS),
        kv_dtype=kv_dtype,
        has_column_major_v=True,
        lists_work=lists_work,
    )
    assert_nothing_is_spilled(kernel_spec(traits), traits.name, traits.combine_name)


def numbers(rng: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=rng, dtype=dtype)
    return torch.randn(shape, generator=rng).to(dtype)


@pytest.mark.sample("arch", ARCHS, 1)
def test_which_family_serves_them(arch):
    """The one whose kernels are compiled; explain says what others lack."""
    dtype = FP8_DTYPES[arch]
    q = torch.zeros(2, 4, 128).to(dtype)
    k = torch.zeros(2, 16, 2, 128).to(dtype)
    sums = torch.tensor([0, 1, 2], dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    groups = {"cu_seqlens_q": sums, "cu_seqlens_k": sums, "block_table": table}
    with emulate(arch):
        explanation = explain(q, packed_keys(k), packed_values(k), **groups)
    assert "packed_pages" in explanation.plan.kernel
    assert "packed pages of five dimensions" in str(explanation)
