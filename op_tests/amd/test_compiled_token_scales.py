"""Scales of tokens in compiled kernels, on the emulator with its sanitizer."""

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from compiled_calls import (
    ARCHS,
    FP8_DTYPES,
    MODIFIERS,
    OTHER_DTYPES,
    CompiledCall,
    assert_near,
    assert_nothing_is_spilled,
    check,
    check_pages,
    draw_of_other_dtypes,
    kernel_dtype,
    run,
)
from descaled_calls import scaled, scales_of_tokens
from inputs import prefix_sums
from score_features import ALL_MODIFIERS, NO_MODIFIERS
from untyped import explain

from jitfmha import emulate
from jitfmha.kernels.compiled.traits import Access, ForwardTraits, kernel_spec
from jitfmha.problem.float64_reference import attention, unpaged

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_THOUSAND = 1000


def drawn_call(drawn: random.Random, features: tuple[str, ...]) -> CompiledCall:
    while True:
        call = draw_of_other_dtypes(drawn, features)
        if call.kv_dtype in ("fp8", "int8"):
            order = drawn.randrange(1 << 32)
            num_splits = drawn.choice((0, 0, 1, 2, 3))
            return replace(call, scales="each token", num_splits=num_splits, random_order=order)


@pytest.mark.sample("number", range(_THOUSAND), 3)
def test_drawn_calls(rng, number):
    """In all modes and dtypes, with any head dimensions; test_compiled_decode.py has few rows."""
    check(drawn_call(random.Random(rng.initial_seed()), MODIFIERS[: number % 2 * 99]), rng)


@pytest.mark.sample(
    ("arch", "page_size", "is_v_column_major"),
    [
        (arch, page_size, is_v_column_major)
        for arch in ARCHS
        for page_size in (1, 6, 16, 32, 64, 128, 256, 1024)
        for is_v_column_major in (False, True)
    ],
    3,
)
def test_pages(rng, arch, page_size, is_v_column_major):
    check_pages(
        *(arch, rng, page_size, (24, 40)),
        dtype=torch.int8,
        scales="each token",
        is_v_column_major=is_v_column_major,
    )


@pytest.mark.sample("arch", ARCHS, 1)
@pytest.mark.parametrize("seqlen_q", [1, 90])
def test_wide_pages(rng, arch, seqlen_q):
    """Of 16 keys, several in each tile, for few rows and many.

    The first split ends with the last page: nothing lies behind that.
    """
    q = torch.randn(seqlen_q, 4, 64, generator=rng).bfloat16()
    k, v = (torch.randint(-128, 128, (9, 16, 2, 64), generator=rng).to(torch.int8) for _ in "kv")
    others = torch.randperm(8, generator=rng).int()
    table = torch.cat([others[:5], torch.tensor([8]).int(), others[5:]])[None]
    groups = {"cu_seqlens_q": prefix_sums([seqlen_q]), "cu_seqlens_k": prefix_sums([130])}
    scales = {f"{name}_descale": scales_of_tokens(rng, x) for name, x in (("k", k), ("v", v))}
    with emulate(arch):
        plan = explain(q, k, v, block_table=table, **groups, **scales).plan
    assert "wide_pages" in plan.kernel
    assert ("decode" in plan.kernel) == (seqlen_q == 1)
    actual = run(arch, q, k, v, block_table=table, num_splits=2, **groups, **scales)
    packed = [unpaged(x, table, [130])[None] for x in (k, v)]
    of_packed = {name: unpaged(x, table, [130])[None] for name, x in scales.items()}
    out, lse = attention(q[None], *packed, **of_packed)
    tensors = scaled((q[None], *packed), of_packed)
    assert_near(actual, (out[0], lse[0]), *tensors, {}, torch.bfloat16)


@pytest.mark.sample("arch", ARCHS, 1)
def test_scales_of_any_size(rng, arch):
    """Values as large and as small as bf16 has them: no probability leaves the range."""
    q = torch.randn(1, 3, 4, 64, generator=rng).to(FP8_DTYPES[arch])
    k, v = (torch.randn(1, 100, 2, 64, generator=rng).to(FP8_DTYPES[arch]) for _ in range(2))
    for size in (1e-30, 1e30):
        scale = scales_of_tokens(rng, v)
        out, _ = run(arch, q, k, v, v_descale=scale * size)
        expected, _ = attention(q, k, v, v_descale=scale)
        largest = expected.abs().max()
        assert ((out.double() / size - expected).abs() <= 0.02 * largest).all()


@pytest.mark.sample("arch", ARCHS, 1)
def test_who_serves_them(rng, arch):
    """Kernels that come ready and those of latents have one scale for all tokens of a head."""
    dtype = FP8_DTYPES[arch]
    q = torch.zeros(2, 300, 4, 128).to(dtype)
    k = torch.zeros(2, 300, 2, 128).to(dtype)
    options: dict[str, Any] = {"k_descale": torch.ones(2, 300, 2, 1)}
    with emulate(arch):
        assert explain(q, k, k, k_descale=torch.ones(1)).plan.family == "ready"
        explanation = explain(q, k, k, **options)
        assert explanation.plan.family == "compiled"
        assert "token_k" in explanation.plan.kernel
        assert "a scale of its own for each token" in str(explanation)
        latent = torch.zeros(2, 300, 1, 576).to(dtype)
        queries = torch.zeros(2, 1, 16, 576).to(dtype)
        values, of_values = latent[..., :512], {"v_descale": torch.ones(2, 300, 1, 1)}
        assert "latent" in explain(queries, latent, values).plan.kernel
        assert "latent" not in explain(queries, latent, values, **of_values).plan.kernel


@pytest.mark.sample(
    ("arch", "dtypes", "hdims", "access", "modifiers"),
    [
        (arch, dtypes, hdims, access, modifiers)
        for arch in ARCHS
        for dtypes in OTHER_DTYPES
        if "fp32" not in dtypes
        for hdims in ((256, 256), (192, 128), (128, 128), (96, 96), (64, 64))
        for access in get_args(Access)
        for modifiers in (NO_MODIFIERS, ALL_MODIFIERS)
        # Wide pages are for calls without biases and dropout.
        if "wide" not in access or modifiers == NO_MODIFIERS
    ],
    1,
    is_fixed=True,
)
def test_nothing_is_spilled(arch, dtypes, hdims, access, modifiers):
    dtype, kv_dtype = (kernel_dtype(arch, name) for name in dtypes)
    traits = ForwardTraits(
        *(arch, dtype, *hdims, "gm1", "rtne", True, access, modifiers),
        has_large_softcap=modifiers == ALL_MODIFIERS,
        kv_dtype=kv_dtype,
        has_token_k_descales=True,
        has_token_v_descales=True,
    )
    assert_nothing_is_spilled(kernel_spec(traits), traits.name)
