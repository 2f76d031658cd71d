"""NaN and infinity reach exactly the results that they should, and no others."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, random_qkv
from untyped import fmha_fwd

SEQLEN = 150


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_hidden_keys_have_no_influence(rng: torch.Generator, bad: float, dtype: str) -> None:
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
def test_keys_left_of_the_window_have_no_influence(rng: torch.Generator, dtype: str) -> None:
    q, k, v = random_qkv(rng, seqlen_q=SEQLEN, seqlen_k=SEQLEN, dtype=DTYPES[dtype])
    clean = fmha_fwd(q, k, v, window_size=(10, 20))
    for last in (0, 40, 120):
        bad_k = k.clone()
        bad_k[:, : last + 1] = torch.nan
        out = fmha_fwd(q, bad_k, v, window_size=(10, 20))
        assert torch.equal(out[:, last + 11 :], clean[:, last + 11 :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_without_keys_is_zero_whatever_the_values(rng: torch.Generator, dtype: str) -> None:
    q, k, v = random_qkv(rng, seqlen_q=100, seqlen_k=30, dtype=DTYPES[dtype])
    out, lse = fmha_fwd(q, k, torch.full_like(v, torch.nan), mask="causal", return_lse=True)
    assert (out[:, :70] == 0).all()
    assert out[:, 70:].isnan().all()
    assert (lse[..., :70] == -torch.inf).all()
    assert lse[..., 70:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_nan_is_passed_on(rng: torch.Generator, mask: str, dtype: str) -> None:
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
def test_a_score_of_minus_infinity_hides_its_key(rng: torch.Generator, dtype: str) -> None:
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype])
    q = q.abs() + 0.5
    hidden = k.clone()
    hidden[:, 20:] = -torch.inf
    out, lse = fmha_fwd(q, hidden, v, return_lse=True)
    expected, expected_lse = fmha_fwd(q, k[:, :20], v[:, :20], return_lse=True)
    assert torch.allclose(out.float(), expected.float(), atol=2e-2, rtol=0)
    assert torch.allclose(lse, expected_lse, atol=1e-2, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_values_are_passed_on(rng: torch.Generator, dtype: str) -> None:
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype])
    v[:, 3] = torch.inf
    assert (fmha_fwd(q, k, v) == torch.inf).all()
