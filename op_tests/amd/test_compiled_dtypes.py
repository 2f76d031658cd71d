"""Compiled kernels for other inputs than bf16 and fp16 in rows, on the emulator with its sanitizer.

fp32, fp8, bf8, int8 in its three combinations, values whose keys lie side by side, and latents.
"""

import random
from itertools import product
from typing import Any, get_args

import pytest
import torch
from closeness import assert_close
from compiled_calls import (
    ARCHS,
    EIGHT_BITS,
    FP8_DTYPES,
    MODIFIERS,
    OTHER_DTYPES,
    assert_nothing_is_spilled,
    check,
    check_pages,
    check_tensors,
    column_major,
    draw_of_other_dtypes,
    eight_bit_dtype,
    kernel_dtype,
    run,
)
from descaled_calls import check_both_products, check_rounding_towards_zero, random_scales
from score_features import ALL_MODIFIERS, FEATURES, NO_MODIFIERS, Shape
from untyped import explain, mla_absorbed_fwd

from jitfmha import emulate
from jitfmha.kernels.compiled.traits import Access, ForwardTraits, kernel_spec
from jitfmha.problem.float64_reference import attention

_THOUSANDS = 4000


@pytest.mark.sample("number", range(_THOUSANDS), 2)
def test_drawn_calls(rng, number):
    check(
        draw_of_other_dtypes(random.Random(rng.initial_seed()), MODIFIERS[: number % 2 * 99]), rng
    )


@pytest.mark.sample(
    ("arch", "dtype", "seqlen_q"),
    list(product(ARCHS, EIGHT_BITS, (3, 70))),
    3,
)
def test_outputs_that_are_not_bf16(rng, arch, dtype, seqlen_q):
    """One of float32 is what those of 16 bits are rounded from, where the kernel is the same."""
    of_inputs = eight_bit_dtype(arch, dtype)
    q, k, v = (
        (torch.randn(1, n, 2, 128, generator=rng) * 20).to(of_inputs) for n in (seqlen_q, 90, 90)
    )
    # Ready kernels of fp8, which write bf16, would serve a call that leaves the splits open.
    options = {"softmax_scale": 0.001} | ({} if dtype == "fp8" else {"num_splits": 2})
    outs = [
        run(arch, q, k, v, out=torch.full(q.shape, 7.0, dtype=of_out), **options)[0]
        for of_out in (torch.float32, torch.float16, torch.bfloat16)
    ]
    exact, lse = attention(q, k, v, softmax_scale=0.001)
    for out in outs:
        assert_close((out.bfloat16(), lse.float()), (exact, lse), q, k, v, dtype=torch.bfloat16)
    if dtype != "fp8" and seqlen_q == 70:
        assert torch.equal(outs[0].half(), outs[1])
        assert torch.equal(outs[0].bfloat16(), outs[2])


@pytest.mark.sample("arch", ARCHS, 1)
def test_a_latent_of_8_bits_with_any_output(rng, arch):
    """Of fp8, by the kernel of latents."""
    q, k = (
        torch.randn(1, n, heads, 576, generator=rng).to(FP8_DTYPES[arch])
        for n, heads in ((2, 16), (40, 1))
    )
    v = k[..., :512]
    exact, lse = attention(q, k, v, softmax_scale=0.05)
    for of_out in (torch.bfloat16, torch.float16, torch.float32):
        given = torch.full((1, 2, 16, 512), 7.0, dtype=of_out)
        with emulate(arch):
            assert "_latent" in explain(q, k, v, out=given, softmax_scale=0.05).plan.kernel
        out, _ = run(arch, q, k, v, out=given, softmax_scale=0.05)
        result = out.bfloat16(), lse.float()
        assert_close(result, (exact, lse), q, k, v, 0.05, dtype=torch.bfloat16)


# ---- 8 bits --------------------------------------------------------------------------------------


@pytest.mark.sample(
    ("name", "hdim"),
    [("fp8", 24), ("bf8", 24), ("int8", 24), ("fp8", 128)],  # 128: ready
    2,
)
@pytest.mark.sample("arch", ARCHS, 1)
def test_every_8_bit_number(arch, name, hdim):
    """As torch converts it: as a value it comes out, as a key or a query it is the score."""
    dtype = eight_bit_dtype(arch, name)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes.view(dtype).float().isinf()] = 0  # which has no place in a softmax
    codes = codes.view(dtype)
    numbers = codes.float()
    v = codes.view(1, 1, 2, 128) if hdim == 128 else codes.view(1, 1, 1, 256)
    k = torch.zeros(1, 1, v.shape[2], hdim).to(dtype)
    for seqlen_q in (3, 33):  # of the decode kernel, and of the other
        out, _ = run(arch, k.expand(1, seqlen_q, -1, -1).contiguous(), k, v)
        expected = v.bfloat16().expand_as(out)
        torch.testing.assert_close(out, expected, atol=0, rtol=0, equal_nan=True)
    ones, coded = torch.zeros(2, 1, 1, 256, hdim)
    ones[..., 0], coded[..., 0] = 1, numbers
    for q, k in ((ones, coded), (coded, ones)):
        tensors = q.to(dtype), k.to(dtype), torch.zeros_like(k).to(dtype)
        _, lse = run(arch, *tensors, softmax_scale=1.0)
        atol = 2e-6 if hdim == 128 else 2e-7
        torch.testing.assert_close(lse[0, :, 0], numbers, atol=atol, rtol=2e-7, equal_nan=True)


@pytest.mark.sample("arch", ARCHS, 1)
def test_integer_dot_products_are_exact(rng, arch):
    """The score of a single key is its lse; the largest one is 2**23."""
    q, k = (torch.randint(-128, 128, (1, n, 3, 512), generator=rng).to(torch.int8) for n in (5, 1))
    q[:, :, 0], k[:, :, 0] = -128, -128
    _, lse = run(arch, q, k, torch.zeros(1, 1, 3, 8).to(torch.int8), softmax_scale=1.0)
    exact = torch.einsum("bihd,bjhd->bhi", q.long(), k.long())
    assert exact[0, 0, 0] == 2**23
    torch.testing.assert_close(lse.double(), exact.double(), atol=0, rtol=3e-7)


def test_scales_of_zero(rng):
    """Inputs that are all 0 may have them; what is hidden stays so."""
    q, k, v = (torch.randn(1, 40, 2, 24, generator=rng).to(torch.float8_e4m3fn) for _ in range(3))
    for name in ("q_descale", "k_descale", "v_descale"):
        options: dict[str, Any] = {name: torch.zeros(1, 2), "mask": 1}
        actual = run("gfx950", q, k, v, **options)
        tensors = (x.float() for x in (q, k, v))
        assert_close(actual, attention(q, k, v, **options), *tensors, dtype=torch.bfloat16)


@pytest.mark.sample(
    ("arch", "form", "feature"),
    [
        (arch, form, feature)
        for arch in ARCHS
        for form in ("one", "each sequence and key head", "each head")
        for feature in (None, "sink", "sink_tokens", "softcap")
    ],
    1,
)
def test_int8_probabilities(rng, arch, form, feature):
    """Of one tile of keys, where the reference knows every step, and of several."""
    heads_q, heads_k = 4, 2
    for seqlen_q, seqlen_k in ((33, 32), (1, 31), (40, 1), (3, 70), (3, 0)):
        shapes = (
            (2, seqlen_q, heads_q, 40),
            (2, seqlen_k, heads_k, 40),
            (2, seqlen_k, heads_k, 24),
        )
        q, k, v = (torch.randint(-128, 128, x, generator=rng).to(torch.int8) for x in shapes)
        scales = random_scales(rng, form, heads_q, heads_k)
        sizes = {"one": (1,), "each head": (heads_q,)}.get(form, (2, heads_k))
        scales["p_descale"] = torch.full(sizes, 1 / 127)
        shape = Shape(2, heads_q, seqlen_q, seqlen_k, torch.bfloat16, rng)
        options = {"mask": 2} if feature is None else FEATURES[feature](shape)
        actual = run(arch, q, k, v, **scales, **options)
        check_both_products(actual, (q, k, v), scales, seqlen_k <= 32, **options)


def test_int8_probabilities_are_rounded_towards_zero():
    check_rounding_towards_zero((24, 24), lambda *x, **options: run("gfx942", *x, **options)[0])


# ---- Values in columns ---------------------------------------------------------------------------


@pytest.mark.sample(
    ("arch", "dtype", "page_size"),
    [
        (arch, dtype, page_size)
        for arch in ARCHS
        for dtype in (torch.bfloat16, torch.float32, torch.int8)
        for page_size in (1, 6, 16, 300)
    ],
    1,
)
def test_column_major_values_in_pages(rng, arch, dtype, page_size):
    """Whole pages of them, and pages in which four keys are not side by side."""
    check_pages(arch, rng, page_size, (24, 40), dtype=dtype, is_v_column_major=True)


def test_rows_and_columns_in_turn(rng):
    """They are calls of two kinds, of which each finds its own kernel again."""
    q, k, v = (torch.randn(1, 35, 2, 24, generator=rng).half() for _ in range(3))
    for values in (column_major(v), v, column_major(v), v):
        check_tensors("gfx942", q, k, values)


# ---- Latent attention ----------------------------------------------------------------------------


@pytest.mark.sample(
    ("arch", "dtype"), [(a, d) for a in ARCHS for d in (torch.bfloat16, torch.float16)], 1
)
def test_latent_attention(rng, arch, dtype):
    """Decoding and forward, with room for more keys; 5 heads of 13 queries take three waves."""
    rank, scale = 512, 192**-0.5
    cache = torch.randn(2, 80, 576, generator=rng).to(dtype)
    latent = cache[:, :70]
    keys = latent[:, :, None]
    for seqlen_q, heads, num_splits in ((1, 5, 2), (13, 5, 2), (3, 1, 0)):
        q = torch.randn(2, seqlen_q, heads, 576, generator=rng).to(dtype)
        with emulate(arch, check=True) as emulated:
            actual = mla_absorbed_fwd(
                *(q, latent, rank),
                softmax_scale=scale,
                mask="causal",
                return_lse=True,
                num_splits=num_splits,
            )
            assert emulated.findings() == ()
        values = keys[..., :rank]
        expected = attention(q, keys, values, softmax_scale=scale, mask=2)
        assert_close(actual, expected, q, keys, values, scale)


# ---- Plans ---------------------------------------------------------------------------------------


@pytest.mark.sample(
    ("arch", "dtypes", "hdims", "access", "modifiers", "is_v_column_major"),
    [
        (arch, dtypes, hdims, access, modifiers, is_v_column_major)
        for arch in ARCHS
        for dtypes in (*OTHER_DTYPES, ("bf16", "bf16"))
        for hdims in (
            *((576, 512), (576, 571), (256, 256), (255, 251)),
            *((192, 128), (96, 96), (64, 64)),
        )
        for access in get_args(Access)
        # Wide rows of fp32 are streamed, by lanes that have rows of several pages.
        if access != "wide_pages" or dtypes[0] != "fp32" or hdims[0] <= 256
        # Nor are those of fp32 in packed ones.
        if access != "wide_packed_pages" or dtypes[0] != "fp32"
        for modifiers in (NO_MODIFIERS, ALL_MODIFIERS)
        # Wide pages are for calls without biases and dropout.
        if "wide" not in access or modifiers == NO_MODIFIERS
        # Of fp32 with every feature at once some kernels spill.
        if "fp32" not in dtypes or modifiers == NO_MODIFIERS
        # Of odd heads in small pages so much is loaded that the compiler unrolls no loop of it.
        if access != "paged" or hdims != (255, 251) or "fp32" not in dtypes
        for is_v_column_major in (False, True)
        if "packed" not in access or is_v_column_major
    ],
    1,
    is_fixed=True,
)
def test_nothing_is_spilled(arch, dtypes, hdims, access, modifiers, is_v_column_major):
    """With the widest queries a pair may go to accumulation registers, which counts as spilled."""
    dtype, kv_dtype = (kernel_dtype(arch, name) for name in dtypes)
    traits = ForwardTraits(
        *(arch, dtype, *hdims, "gm1", "rtne", True, access, modifiers),
        has_large_softcap=modifiers == ALL_MODIFIERS,
        kv_dtype=kv_dtype,
        has_descales=kv_dtype not in ("bf16", "fp32"),
        has_int8_probabilities=dtype == "int8",
        has_column_major_v=is_v_column_major,
    )
    most = 2 if hdims[0] > 256 else 0
    assert_nothing_is_spilled(kernel_spec(traits), traits.name, most_vector_registers=most)


def test_kernels_are_named_by_what_they_are_for():
    q, k = torch.zeros(1, 4, 1, 24).bfloat16(), torch.zeros(1, 4, 1, 24, dtype=torch.int8)
    with emulate("gfx942"):
        plan = explain(q, k, column_major(k), k_descale=torch.ones(1)).plan
    assert plan.kernel == (
        "fmha_fwd_compiled_hd24x24_bf16_rtne_int8kv_descales_column_major_v_gm0_gfx942"
    )
