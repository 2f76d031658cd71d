"""NaN and infinity reach exactly the results that they should, and no others."""

from itertools import product
from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import DTYPES, random_qkv
from torch import Tensor
from untyped import fmha_bwd, fmha_fwd

from jitfmha import emulate
from jitfmha.planning.target import cpu_isas_here
from jitfmha.problem.float64_reference import attention

SEQLEN = 150
# What masks are made of that are added to scores; and the least number of the mask's dtype.
LEVELS = (-1e4, -1e9, -1e30, -torch.inf)
# Of the largest gradient: sums of rounded products.
TOLERANCE = {"fp32": 5e-6, "bf16": 2e-2, "fp16": 4e-3}
BIASES = [
    ("fp32", "fp32"),
    *((dtype, bias) for dtype in ("bf16", "fp16") for bias in (dtype, "fp32")),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_hidden_keys_have_no_influence(rng, bad, dtype):
    """Query i must not notice what keys behind it hold, not even in the same tile.

    Values are another matter: a probability of 0 times NaN is NaN, here as in torch.
    """
    q, k, v = random_qkv(rng, seqlen_q=SEQLEN, seqlen_k=SEQLEN, dtype=DTYPES[dtype])
    clean, clean_lse = fmha_fwd(q, k, v, mask="causal", return_lse=True)
    for first in (1, 16, 77, 149):
        bad_k = k.clone()
        bad_k[:, first:] = bad
        out, lse = fmha_fwd(q, bad_k, v, mask="causal", return_lse=True)
        assert torch.equal(out[:, :first], clean[:, :first])
        assert torch.equal(lse[..., :first], clean_lse[..., :first])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_left_of_the_window_have_no_influence(rng, dtype):
    q, k, v = random_qkv(rng, seqlen_q=SEQLEN, seqlen_k=SEQLEN, dtype=DTYPES[dtype])
    clean = fmha_fwd(q, k, v, window_size=(10, 20))
    for last in (0, 40, 120):
        bad_k = k.clone()
        bad_k[:, : last + 1] = torch.nan
        out = fmha_fwd(q, bad_k, v, window_size=(10, 20))
        assert torch.equal(out[:, last + 11 :], clean[:, last + 11 :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_without_keys_is_zero_whatever_the_values(rng, dtype):
    q, k, v = random_qkv(rng, seqlen_q=100, seqlen_k=30, dtype=DTYPES[dtype])
    out, lse = fmha_fwd(q, k, torch.full_like(v, torch.nan), mask="causal", return_lse=True)
    assert (out[:, :70] == 0).all()
    assert out[:, 70:].isnan().all()
    assert (lse[..., :70] == -torch.inf).all()
    assert lse[..., 70:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_nan_is_passed_on(rng, mask, dtype):
    """A NaN in q spoils its query, in k every query that sees the key, in v one column of them."""
    q, k, v = random_qkv(rng, seqlen_q=SEQLEN, seqlen_k=SEQLEN, dtype=DTYPES[dtype])
    for row in (0, 70, 149):
        sees_row = slice(0 if mask == "none" else row, None)
        bad = q.clone()
        bad[0, row, 1, 5] = torch.nan
        out, lse = fmha_fwd(bad, k, v, mask=mask, return_lse=True)
        assert out[0, row, 1].isnan().all()
        assert lse[0, 1, row].isnan()
        assert out.isnan().sum() == 64
        assert lse.isnan().sum() == 1
        bad = k.clone()
        bad[0, row, 1, 5] = torch.nan
        out, lse = fmha_fwd(q, bad, v, mask=mask, return_lse=True)
        assert out[0, sees_row, 1].isnan().all()
        assert lse[0, 1, sees_row].isnan().all()
        assert out.isnan().sum() == out[0, sees_row, 1].numel()
        bad = v.clone()
        bad[0, row, 1, 5] = torch.nan
        out, lse = fmha_fwd(q, k, bad, mask=mask, return_lse=True)
        assert out[0, sees_row, 1, 5].isnan().all()
        assert not out[0, :, 0].isnan().any()
        assert not out[1].isnan().any()
        assert out.isnan().any((0, 1, 2)).sum() == 1
        assert not lse.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 5), (1, 600)])
def test_nan_of_a_sink_is_passed_on(rng, seqlen_q, seqlen_k, dtype):
    """Also one with bits that would carry into the sign, if it were rounded as numbers are."""
    q, k, v = random_qkv(rng, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=DTYPES[dtype])
    bits = torch.full((q.shape[2],), 0x7FFFFFFF, dtype=torch.int32)
    bits[0] = 0
    out, lse = fmha_fwd(q, k, v, sink=bits.view(torch.float32), return_lse=True)
    assert out[:, :, 1:].isnan().all()
    assert lse[:, 1:].isnan().all()
    assert out[:, :, 0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_of_minus_infinity_hides_its_key(rng, dtype):
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype])
    q = q.abs() + 0.5
    hidden = k.clone()
    hidden[:, 20:] = -torch.inf
    out, lse = fmha_fwd(q, hidden, v, return_lse=True)
    expected, expected_lse = fmha_fwd(q, k[:, :20], v[:, :20], return_lse=True)
    assert torch.allclose(out.float(), expected.float(), atol=2e-2, rtol=0)
    assert torch.allclose(lse, expected_lse, atol=1e-2, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_values_are_passed_on(rng, dtype):
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype])
    v[:, 3] = torch.inf
    assert (fmha_fwd(q, k, v) == torch.inf).all()


def test_a_bias_of_minus_infinity_hides_no_nan(rng):
    """As in torch, whose sum of both is NaN; a boolean bias hides it."""
    q, k, v = random_qkv(rng, batch=1, seqlen_q=40, seqlen_k=70)
    q, bias = q.abs(), torch.zeros(1, 2, 40, 70)
    bias[..., 10:30, 7] = -torch.inf
    for bad in (torch.nan, torch.inf, -torch.inf):
        k[:, 7] = bad
        for each in (bias, bias == 0):
            out, lse = fmha_fwd(q, k, v, bias=each, return_lse=True)
            expected, expected_lse = attention(q, k, v, bias=each)
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(lse.isnan(), expected_lse.isnan())


def huge_bias(rng: torch.Generator, level: float, shape: tuple[int, ...]) -> Tensor:
    """Rows that are hidden by ``level`` in turn as a whole, but for half of the keys, but for keys
    at half of the level, with noise on it, and not at all.
    """
    bias = torch.full(shape, level, dtype=torch.float64)
    is_seen = torch.rand(shape, generator=rng) < 0.5
    noise = torch.randn(shape, generator=rng)
    bias[..., 1::5, :] *= ~is_seen[..., 1::5, :] if level > -torch.inf else 1
    bias[..., 2::5, :] /= 1 + is_seen[..., 2::5, :].double()
    bias[..., 3::5, :] += noise[..., 3::5, :]
    bias[..., 4::5, :] = noise[..., 4::5, :]
    return bias


def rounded_sums(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """A float64 bias that makes float64 scores what float32 has for score and bias together."""
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * q.shape[-1] ** -0.5
    return (scores.float() + bias.float()).double() - scores


def check_huge_bias(
    rng: torch.Generator, dtype: str, of_bias: str, sizes: tuple[int, int], **options: Any
) -> None:
    """Out, lse and all gradients, also where nobody wants those of the hidden rows."""
    eps = torch.finfo(DTYPES[dtype]).eps
    least = torch.finfo(DTYPES[of_bias]).min
    for level in {max(level, least) if level > -torch.inf else level for level in LEVELS} | {least}:
        seqlen_q, seqlen_k = sizes
        named = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "hdim": 24}
        q, k, v = random_qkv(rng, dtype=DTYPES[dtype], **named)
        bias = huge_bias(rng, level, (1, 2, *sizes)).clamp(
            min=-torch.inf if level < least else least
        )
        bias = bias.to(DTYPES[of_bias])
        out, lse = fmha_fwd(q, k, v, bias=bias, return_lse=True, **options)
        dout = torch.randn(out.shape, generator=rng).to(out.dtype)
        dout[:, :, 1] *= (bias.amax(-1) > level / 2).movedim(1, 2)[..., 1, None]
        dbias = torch.full(bias.shape, torch.nan)
        gradients = fmha_bwd(dout, q, k, v, out, lse, bias=bias, dbias=dbias)

        leaves = [x.double().requires_grad_() for x in (q, k, v, rounded_sums(q, k, bias))]
        exact, exact_lse = attention(*leaves[:3], bias=leaves[3])
        expected = torch.autograd.grad((exact * dout.double()).sum(), leaves)
        # A sum that is near the middle of two numbers of float32 may be rounded to either.
        step = abs(level) * 2.0**-23 if abs(level) < 2**23 else 0.0
        seen = exact_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen)
        torch.testing.assert_close(lse[seen].double(), exact_lse[seen], rtol=1e-6, atol=eps)
        for actual, reference in zip((out, *gradients, dbias), (exact, *expected), strict=True):
            allowed = (TOLERANCE[dtype] + 4 * step) * max(1.0, reference.abs().max().item())
            error = (actual.double() - reference).abs()
            assert error.max().item() <= allowed, (level, error.max(), allowed)


@pytest.mark.sample(("dtype", "of_bias"), BIASES, 2)
def test_rows_whose_every_score_is_hugely_negative(rng, dtype, of_bias):
    for sizes in ((40, 70), (3, 290), (300, 150)):
        check_huge_bias(rng, dtype, of_bias, sizes)


@pytest.mark.sample(
    ("other_isa", "dtype", "of_bias"),
    [
        *((isa, *each) for isa in cpu_isas_here()[1:] for each in BIASES),
        *(("amx_emulated", "bf16", of_bias) for of_bias in ("bf16", "fp32")),
    ],
    1,
)
def test_rows_whose_every_score_is_hugely_negative_on_other_isas(rng, other_isa, dtype, of_bias):
    with fresh_calls(other_isa):
        test_rows_whose_every_score_is_hugely_negative(rng, dtype, of_bias)


@pytest.mark.sample(
    ("arch", "dtype", "of_bias"),
    [(a, *b) for a, b in product(("gfx942", "gfx950"), BIASES) if b[0] != "fp32"],
    1,
)
def test_rows_whose_every_score_is_hugely_negative_on_amd(rng, arch, dtype, of_bias):
    with emulate(arch, check=True) as run:
        check_huge_bias(rng, dtype, of_bias, (40, 70))
        check_huge_bias(rng, dtype, of_bias, (3, 290), num_splits=3)
        assert run.findings() == ()
