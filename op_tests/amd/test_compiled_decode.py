"""Compiled kernels for few rows, as those of decoding are, on the emulator with its sanitizer."""

import random
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from compiled_calls import (
    ARCHS,
    FP8_DTYPES,
    SCALES,
    CompiledCall,
    assert_near,
    assert_nothing_is_spilled,
    check_call,
    draw,
    inputs_of,
    run,
)
from packed_pages import packed_keys, packed_values
from torch import Tensor
from untyped import explain

from jitfmha import emulate
from jitfmha.amd import chips
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.kernels.compiled.traits import Access, ForwardTraits, kernel_spec
from jitfmha.kernels.modifiers import ModifierTraits
from jitfmha.problem.float64_reference import attention, attention_packed, unpaged
from jitfmha.problem.score_features import AskedModifiers

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_THOUSAND = 1000
# Query heads and key heads, and queries: up to 64 rows of a tile, and several tiles.
HEADS = ((1, 1), (3, 3), (4, 2), (8, 1), (12, 4), (16, 1), (40, 2))
SEQLENS_Q = (1, 1, 1, 2, 3, 4, 8)
# Waves have tiles of 32 keys in turn.
SEQLENS_K = (0, 1, 31, 32, 33, 64, 100, 128, 129, 200, 300, 520)
HDIMS = (8, 24, 61, 64, 72, 96, 100, 128, 160, 192, 200, 255, 256)
# Of queries, and of keys with values.
DTYPES = (
    *(("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8"), ("int8", "int8")),
    *((dtype, kv_dtype) for dtype in ("bf16", "fp16") for kv_dtype in ("fp8", "int8")),
)
FEATURES = ("alibi", "softcap", "sink", "sink_tokens")
NUMBERS_OF_SPLITS = (0, 1, 2, 3, 7, 9, 14, 40)
PAGE_SIZES = (1, 6, 16, 32, 64, 128)
_MOST_ROWS = 128
# Query heads of a key head, and head dimensions, of which a wave has ever more.
_OF_COMBINING = ((1, 64), (3, 128), (20, 128), (2, 256), (40, 128), (40, 256))
# Head dimensions, and pages of fp8 keys, with whether they are packed.
_OF_EIGHT_WAVES = (
    *((64, 1, False), (128, 6, False), (64, 16, False)),
    *((40, 64, False), (128, 16, True)),
)


def kernel_of(arch: str, *tensors: Tensor, **options: Any) -> str:
    with emulate(arch):
        return str(explain(*tensors, **options).plan.kernel)


def is_paged_access(access: str) -> bool:
    return access in ("paged", "packed_pages", "wide_pages")


def decode_call(drawn: random.Random) -> CompiledCall:
    call = draw(drawn, FEATURES)
    dtype, kv_dtype = drawn.choice(DTYPES)
    has_8_bits = kv_dtype in ("fp8", "int8")
    lengths = [(drawn.choice(SEQLENS_Q), drawn.choice(SEQLENS_K)) for _ in range(3)]
    return replace(
        call,
        dtype=dtype,
        kv_dtype=kv_dtype,
        hdims=(drawn.choice(HDIMS), drawn.choice(HDIMS)),
        heads=drawn.choice(HEADS),
        lengths=tuple(lengths) if call.is_group else tuple(lengths[:1]) * 2,
        bf16_cvt=call.bf16_cvt if dtype == "bf16" and call.dtype == "bf16" else "rtne",
        scales=drawn.choice(("", *SCALES)) if has_8_bits else "",
        num_splits=drawn.choice(NUMBERS_OF_SPLITS),
        random_order=drawn.randrange(1 << 32),
    )


def in_pages(
    rng: torch.Generator, rows: Tensor, lengths: list[int], table: Tensor, page_size: int
) -> Tensor:
    """Pages with the packed ``rows`` of sequences, and something else in what they leave."""
    pages = rows.new_empty(int(table.max()) + 1, page_size, *rows.shape[1:])
    pages.copy_(torch.randint(-9, 9, pages.shape, generator=rng))
    for of_sequence, of_table in zip(rows.split(lengths), table, strict=True):
        for part, page in zip(of_sequence.split(page_size), of_table.tolist(), strict=False):
            pages[page, : len(part)] = part
    return pages


@pytest.mark.sample("number", range(_THOUSAND), 3)
def test_drawn_calls(rng, number):
    """In all modes, with keys that are split or not, with and without what modifies scores.

    Two of each kernel, with other keys.
    """
    drawn = random.Random(rng.initial_seed())
    call = decode_call(drawn)
    page_size = drawn.choice(PAGE_SIZES) if call.is_group and drawn.random() < 0.6 else None
    if page_size is not None:
        call = replace(call, gap=0)
    check_drawn_call(rng, call, page_size)
    lengths = [(queries, drawn.choice(SEQLENS_K)) for queries, _ in call.lengths]
    call = replace(
        call,
        lengths=tuple(lengths) if call.is_group else tuple(lengths[:1]) * 2,
        num_splits=drawn.choice(NUMBERS_OF_SPLITS),
        random_order=drawn.randrange(1 << 32),
    )
    check_drawn_call(rng, call, page_size)


def check_drawn_call(rng: torch.Generator, call: CompiledCall, page_size: int | None) -> None:
    given = inputs_of(call, rng)
    q, k, v = given.q, given.k, given.v
    more = given.sequences | {"bf16_cvt": call.bf16_cvt, "num_splits": call.num_splits}
    keys = k, v
    if page_size is not None:
        lengths = [pair[1] for pair in call.lengths]
        most = -(-max(*lengths, 1) // page_size)
        table = torch.randperm(len(lengths) * most, generator=rng).view(-1, most).int()
        keys = k, v = (in_pages(rng, x, lengths, table, page_size) for x in keys)
        more["block_table"] = table
        if call.scales == "each token":
            names = ("k_descale", "v_descale")
            more |= {x: in_pages(rng, given.options[x], lengths, table, page_size) for x in names}
    # Nobody tells how long the sequences of a pack are: they count as equally long.
    queries = -(-q.shape[-3] // (len(call.lengths) if call.is_group else 1))
    rows = queries * call.heads[0] // call.heads[1]
    if rows <= _MOST_ROWS and all(x.numel() for x in (q, k, v)):
        assert "_decode" in kernel_of(call.arch, q, k, v, **(given.options | more))
    out = None if call.is_group and call.gap else given.out
    actual = run(
        *(call.arch, q, k, v), out=out, random_order=call.random_order, **(given.options | more)
    )
    check_call(call, given, actual)


@pytest.mark.parametrize(("heads", "hdim"), [(16, 64), (40, 72)])
@pytest.mark.sample("arch", ARCHS, 1)
def test_hidden_values_and_later_maxima(rng, arch, heads, hdim):
    """Rows that see nothing are 0 beside values of NaN, and scores that grow rescale the output.

    They grow within a wave, from wave to wave and from split to split.
    """
    q = torch.randn(1, 3, heads, hdim, generator=rng).bfloat16()
    v = torch.randn(1, 545, 1, hdim, generator=rng).bfloat16()
    k = torch.full((1, 545, 1, hdim), 1.0).bfloat16()
    k[:, 64:] += q[:, :1, :1]
    k[:, 256:] += q[:, :1, :1] * 8
    k[:, 544:] += q[:, :1, :1] * 64
    for options in ({"num_splits": 1}, {"num_splits": 3}):
        assert_near(run(arch, q, k, v, **options), attention(q, k, v), q, k, v, {})
        blind = torch.full((1, 2, 1, hdim), torch.nan).bfloat16()
        blind[:, 0] = 1
        out, lse = run(arch, q, blind, blind, mask=2, **options)
        assert out[:, 0].eq(0).all()
        assert lse[..., 0].eq(-torch.inf).all()


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.sample("arch", ARCHS, 1)
def test_scores_of_some_rows_grow(rng, arch, block):
    """Of a wave's blocks of rows one is rescaled where its scores alone grow."""
    q, k, v = (
        torch.randn(1, n, h, 72, generator=rng).bfloat16() for n, h in ((3, 40), (545, 1), (545, 1))
    )
    q[..., 0] = k[..., 0] = 0
    q.flatten(1, 2)[:, 16 * block : 16 * block + 2, 0] = 16
    k[:, 256:, :, 0] = 128  # beyond what float32 has room for, were the maximum the same
    assert_near(run(arch, q, k, v, num_splits=1), attention(q, k, v), q, k, v, {})


@pytest.mark.sample(
    ("arch", "heads", "hdim"), [(arch, *kind) for arch in ARCHS for kind in _OF_COMBINING], 1
)
@pytest.mark.parametrize("num_splits", [2, 7, 12, 16, 22, 40, 70])
def test_splits_that_waves_combine(rng, arch, heads, hdim, num_splits):
    """Splits that a wave combines alone, or waves together; scores grow far below 0.

    Together, waves have some that come at once, or more. How many come at once depends on how much
    of the output a wave has.
    """
    q = torch.randn(1, 1, heads, hdim, generator=rng).bfloat16()
    v = torch.randn(1, 32 * num_splits, 1, hdim, generator=rng).bfloat16()
    growth = torch.linspace(-64, -32, v.shape[1]).view(1, -1, 1, 1)
    of_first = q[:, :, :1]
    k = (of_first * growth * hdim**0.5 * 8 / of_first.float().square().sum()).bfloat16()
    actual = run(arch, q, k, v, num_splits=num_splits)
    assert_near(actual, attention(q, k, v), q, k, v, {})


@pytest.mark.sample(("arch", "is_packed"), [(arch, packs) for arch in ARCHS for packs in (0, 1)], 2)
def test_integers_among_values(rng, arch, is_packed):
    """All there are, beside scores that grow."""
    q = torch.randn(1, 4, 64, generator=rng).bfloat16()
    table, options = torch.randperm(12, generator=rng).view(1, -1).int(), {"softmax_scale": 1 / 32}
    keys = torch.arange(384).view(table.numel(), 32, 1, 1)
    k = (q[:, :1] * keys / 10).round().clamp(-128, 127).char()
    v = torch.randint(-128, 128, k.shape, generator=rng, dtype=torch.int8)
    v[..., :16] = -128
    rows = [unpaged(x, table, [384]) for x in (k, v)]
    expected = attention_packed(q, *rows, [1], [384], [0], [0], **options)
    groups = {"cu_seqlens_q": torch.tensor([0, 1]).int(), "max_seqlen_q": 1}
    groups |= {"cu_seqlens_k": torch.tensor([0, 384]).int(), "block_table": table}
    pages = (packed_keys(k), packed_values(v)) if is_packed else (k, v)
    for num_splits in (1, 2):
        actual = run(arch, q, *pages, num_splits=num_splits, **groups, **options)
        rows32 = (x.float() for x in rows)
        assert_near(actual, expected, q.float(), *rows32, options, torch.bfloat16)


@pytest.mark.sample("arch", ARCHS, 1)
@pytest.mark.parametrize("exponent", [-110, -30, 30, 90])
def test_queries_of_any_size_beside_integers(rng, arch, exponent):
    """Of bf16, which has more exponents than what products with integers take."""
    q = torch.randn(1, 3, 8, 72, generator=rng).bfloat16()
    q[..., 5] *= 2**-12
    k, v = (torch.randint(-128, 128, (1, 200, 2, 72), generator=rng).char() for _ in range(2))
    options = {"softmax_scale": 2**-6}
    scaled = {"softmax_scale": 2.0 ** (-6 - exponent)}
    actual = run(arch, (q.float() * 2.0**exponent).bfloat16(), k, v, **scaled)
    expected = attention(q, k, v, **options)
    assert_near(actual, expected, *(x.float() for x in (q, k, v)), options, torch.bfloat16)


@pytest.mark.sample("arch", ARCHS, 1)
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_one_split_depends_on_nothing_else(rng, arch, page_size):
    """Neither on the order of waves nor on the sequences beside one's own, to the last bit."""
    lengths, batch = [200, 333, 70], 3
    q = torch.randn(batch, 8, 64, generator=rng).bfloat16()
    k, v = (torch.randn(sum(lengths), 2, 64, generator=rng).bfloat16() for _ in range(2))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()

    def decoded(first: int, last: int, order: int | None) -> tuple[Tensor, Tensor]:
        rows = slice(int(ends[first]), int(ends[last]))
        keys, more = [k[rows], v[rows]], {}
        if page_size:
            of_these = lengths[first:last]
            most = -(-max(of_these) // page_size)
            table = torch.randperm(len(of_these) * most).view(-1, most).int()
            keys = [in_pages(rng, x, of_these, table, page_size) for x in keys]
            more = {"block_table": table, "max_seqlen_k": max(of_these)}
        groups = {
            "cu_seqlens_q": torch.arange(last - first + 1).int(),
            "cu_seqlens_k": ends[first : last + 1] - ends[first],
        }
        more |= {"num_splits": 1, "random_order": order, "max_seqlen_q": 1}
        return run(arch, q[first:last], *keys, **groups, **more)

    together = decoded(0, batch, None)
    spans = [1] * batch, lengths, list(range(batch)), ends[:-1].tolist()
    assert_near(together, attention_packed(q, k, v, *spans), q, k, v, {})
    out = together[0]
    assert out.equal(decoded(0, batch, 1)[0])
    for i in range(batch):
        assert out[i : i + 1].equal(decoded(i, i + 1, i + 2)[0])


@pytest.mark.sample("arch", ARCHS, 1)
@pytest.mark.sample("kind", ["fp8", "int8"], 1)
@pytest.mark.parametrize(("page_size", "hdim"), [(None, 64), (1, 64), (16, 64), (32, 64), (1, 96)])
def test_places_of_8_bit_keys(rng, arch, kind, page_size, hdim):
    """Waves go through more tiles of keys than lanes look up at once, each in another page."""
    lengths = [4500, 133]
    q = torch.randn(2, 4, hdim, generator=rng).bfloat16()
    k, v = (
        torch.randint(-128, 128, (sum(lengths), 1, hdim), generator=rng).to(
            torch.int8 if kind == "int8" else FP8_DTYPES[arch]
        )
        for _ in range(2)
    )
    ends_q, ends_k = (torch.tensor([0, *side]).cumsum(0).int() for side in ([1, 1], lengths))
    more = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": 1, "num_splits": 1}
    scale = torch.full((1,), 2**-6)
    scales = {"k_descale": scale, "v_descale": scale}
    spans = [1, 1], lengths, [0, 1], ends_k[:-1].tolist()
    keys = [k, v]
    descaled = k.float() * scale, v.float() * scale
    expected = attention_packed(q, *descaled, *spans)
    if page_size:
        most = -(-max(lengths) // page_size)
        table = torch.randperm(len(lengths) * most, generator=rng).view(-1, most).int()
        keys = [in_pages(rng, x, lengths, table, page_size) for x in keys]
        more |= {"block_table": table, "max_seqlen_k": max(lengths)}
    assert_near(run(arch, q, *keys, **scales, **more), expected, q, *descaled, {})


@pytest.mark.sample(
    ("chip", "dtype", "hdim", "page_size", "is_packed"),
    [
        *(("gfx942-mi308", "fp8", *kind) for kind in _OF_EIGHT_WAVES),
        *(("gfx950", "fp8", *kind) for kind in _OF_EIGHT_WAVES),
        *(("gfx942-mi308", "int8", 128, *pages) for pages in ((1, False), (32, True))),
        ("gfx942-mi308", "int8", 64, 16, False),
        *(("gfx950", "int8", hdim, 16, False) for hdim in (64, 72, 128)),
        ("gfx950", "int8", 128, 32, True),
    ],
    2,
)
def test_eight_waves(rng, chip, dtype, hdim, page_size, is_packed):
    """Where each has a workgroup on a unit of its own."""
    arch, units = chip.partition("-")[0], chips.chip(VIRTUAL_NODE[chip]).compute_units
    heads_k, fp8 = 8, FP8_DTYPES[arch]
    batch = units // heads_k // 2
    lengths = [[0, 33, 300, 641][i % 4] for i in range(batch)]
    most = -(-max(lengths) // page_size)
    table = torch.randperm(batch * most, generator=rng).view(-1, most).int()
    q = torch.randn(batch, 2 * heads_k, hdim, generator=rng)
    k, v = (torch.randn(batch * most, page_size, heads_k, hdim, generator=rng) for _ in range(2))
    if dtype == "fp8":
        q, k, v = (x.to(fp8) for x in (q, k, v))
    else:
        q, k, v = q.bfloat16(), *((16 * x).round().clamp(-128, 127).char() for x in (k, v))
    options = {"softmax_scale": hdim**-0.5 * (1 if dtype == "fp8" else 1 / 16)}
    groups = {
        "cu_seqlens_q": torch.arange(batch + 1).int(),
        "cu_seqlens_k": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_seqlen_q": 1,
        "block_table": table,
    }
    rows = [unpaged(x, table, lengths) for x in (k, v)]
    starts = groups["cu_seqlens_k"][:-1].tolist()
    spans = [1] * batch, lengths, list(range(batch)), starts
    expected = attention_packed(q, *rows, *spans, **options)
    keys = (packed_keys(k), packed_values(v)) if is_packed else (k, v)
    assert "_decode1_waves8_" in kernel_of(chip, q, *keys, **groups, **options)
    for num_splits in (0, 2):
        actual = run(chip, q, *keys, num_splits=num_splits, **groups, **options)
        rows32 = (x.float() for x in rows)
        assert_near(actual, expected, q.float(), *rows32, options, torch.bfloat16)


@pytest.mark.sample(
    (
        "arch",
        "dtypes",
        "hdim",
        "blocks",
        "waves",
        "access",
        "is_masked",
        "has_features",
        "has_tokens",
    ),
    [
        (arch, dtypes, hdim, blocks, waves, access, is_masked, has_features, has_tokens)
        for arch in ARCHS
        for dtypes in DTYPES
        for hdim in (24, 61, 64, 128, 256)
        for blocks in (1, 2, 4)
        if blocks * hdim <= 512
        for waves in (
            (4, 8) if blocks == 1 and "8" in dtypes[1] and hdim in (24, 64, 128) else (4,)
        )
        for access in get_args(Access)
        if access != "wide_packed_pages" and (access != "packed_pages" or hdim % 16 == 0)
        if waves == 4 or is_paged_access(access) or (dtypes[1] == "int8" and hdim <= 64)
        for is_masked in (False, True)
        for has_features in (False, True)
        for has_tokens in ((False, True) if "8" in dtypes[1] else (False,))
    ],
    3,
    is_fixed=True,
)
def test_nothing_is_spilled(
    arch, dtypes, hdim, blocks, waves, access, is_masked, has_features, has_tokens
):
    fp8 = str(FP8_DTYPES[arch]).removeprefix("torch.").replace("float8", "fp8")
    dtype, kv_dtype = (fp8 if name == "fp8" else name for name in dtypes)
    asked = AskedModifiers()
    if has_features:
        asked = AskedModifiers(None, alibi_slopes=True, logit_softcap=30.0, sink=True, sink_size=4)
    traits = ForwardTraits(
        *(arch, dtype, hdim, hdim, "gm1", "rtne", is_masked, access),
        ModifierTraits("compiled", asked),
        kv_dtype=kv_dtype,
        has_descales="8" in kv_dtype,
        has_token_k_descales=has_tokens,
        has_token_v_descales=has_tokens,
        stacks_heads=True,
        decode_blocks=blocks,
        decode_waves=waves,
    )
    assert_nothing_is_spilled(kernel_spec(traits), traits.name, traits.combine_name)


def test_which_calls_are_meant(rng):
    """Of up to 16 queries and 128 rows; with a bias, dropout or float32 none are.

    Where units would be idle, two workgroups have more than 32 rows.
    """
    arch = "gfx942"
    units = chips.chip(VIRTUAL_NODE[arch]).compute_units

    def kernel(
        queries: int,
        heads: int,
        hdim: int = 72,
        dtype: torch.dtype = torch.half,
        batch: int = 1,
        **more,
    ):
        q = torch.randn(1, queries, heads, hdim, generator=rng).to(dtype).expand(batch, -1, -1, -1)
        k = torch.randn(1, 70, 1, hdim, generator=rng).to(dtype).expand(batch, -1, -1, -1)
        return kernel_of(arch, q, k, k, **more)

    of_few = ((1, 1), (16, 1), (17, 2), (32, 2), (33, 2), (64, 2), (65, 4), (128, 4))
    of_many = ((16, 1), (17, 2), (32, 2), (33, 4), (128, 4))
    for batch, expected in ((units // 2, of_few), (units // 2 + 1, of_many)):
        for rows, blocks in expected:
            assert f"_decode{blocks}_" in kernel(1, rows, batch=batch)
    assert "_decode4_" in kernel(16, 8)
    assert "_decode2_" in kernel(1, 128, 256)
    for other in (
        kernel(1, 129),
        kernel(9, 15),
        kernel(17, 1),
        kernel(1, 8, dtype=torch.float32),
        kernel(1, 8, bias=torch.zeros(1, 1, 1, 70)),
        kernel(1, 8, dropout_p=0.5),
        kernel(1, 8, 264),
    ):
        assert "_decode" not in other


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("heads", [8, 64])
def test_calls_that_stream_are_meant(arch, heads):
    """Half of the units are enough: they compute while keys come."""
    q, k = torch.zeros(2, 1, 1, 1, 128).bfloat16()
    q, k = q.expand(16, 1, heads, 128), k.expand(16, 4096, 8, 128)
    assert "_decode1_" in kernel_of(arch, q, k, k)


@pytest.mark.sample("arch", ARCHS, 1)
def test_a_batch_of_many_lengths_has_a_long_one(rng, arch):
    """One of its sequences has more queries than rows of a tile: several tiles of few rows."""
    lengths = [1, 70, 1, 3, 0, 1, 2, 1], [300, 70, 33, 0, 20, 64, 65, 129]
    ends_q, ends_k = (torch.tensor([0, *side]).cumsum(0) for side in lengths)
    q = torch.randn(int(ends_q[-1]), 4, 128, generator=rng).bfloat16()
    k, v = (torch.randn(int(ends_k[-1]), 2, 128, generator=rng).bfloat16() for _ in range(2))
    groups = {"cu_seqlens_q": ends_q.int(), "cu_seqlens_k": ends_k.int()}
    assert "_decode2_" in kernel_of(arch, q, k, v, mask=2, **groups)
    spans = {"lengths_q": lengths[0], "lengths_k": lengths[1]}
    starts = {"starts_q": ends_q[:-1].tolist(), "starts_k": ends_k[:-1].tolist()}
    expected = partial(attention_packed, **spans, **starts)(q, k, v, mask=2)
    for num_splits in (1, 3):
        actual = run(arch, q, k, v, mask=2, num_splits=num_splits, **groups)
        assert_near(actual, expected, q, k, v, {"mask": 2})
