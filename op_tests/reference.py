"""Attention in float64 from the written definitions; shares nothing with the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor]  # out, lse


def visible(
    seqlen_q: int, seqlen_k: int, mask: int | str = 0, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Which key each query sees, as booleans ``(seqlen_q, seqlen_k)``."""
    i = torch.arange(seqlen_q)[:, None]
    j = torch.arange(seqlen_k)[None, :]
    everything = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if isinstance(mask, str) and ":" in mask:
        form, numbers = mask.split(":")
        first, second = (int(number) for number in numbers.split(","))
        if form == "g":
            return (i - first < j) & (j < i + second)
        mask = {"t": 1, "b": 2}[form]
        window_size = (first, second)
    left, right = window_size
    diagonal = i if mask == 1 else i + seqlen_k - seqlen_q
    if mask in (0, "none"):
        keep_left = everything if left == -1 else j >= diagonal - left
        keep_right = everything if right == -1 else j <= diagonal + right
        return keep_left & keep_right
    assert mask in (1, 2, "causal")
    keep_left = everything if left == -1 else j >= diagonal - left
    return keep_left & (j <= diagonal + (0 if right == -1 else right))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = (-1, -1),
) -> Result:
    """Out ``(b, sq, hq, hdim_v)`` and lse ``(b, hq, sq)`` of gm0 inputs, all scores at once."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = q.shape[2] // max(k.shape[2], 1)
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    see = visible(q.shape[1], k.shape[1], mask, window_size)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores.masked_fill(~see, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # A query that sees nothing has an lse of -inf, from which no probability can be made.
    probability = torch.exp(scores - lse[..., None]).masked_fill(~see, 0)
    return torch.einsum("bhij,bjhd->bihd", probability, v), lse


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    *,
    softmax_scale: float | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = (-1, -1),
) -> Result:
    """Out ``(total_q, hq, hdim_v)`` and lse ``(hq, total_q)`` of gm1 inputs, one by one.

    Rows that belong to no sequence are 0, and -inf in the lse.
    """
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    for sq, sk, start_q, start_k in zip(lengths_q, lengths_k, starts_q, starts_k, strict=True):
        rows, keys = slice(start_q, start_q + sq), slice(start_k, start_k + sk)
        out_one, lse_one = attention(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            softmax_scale=softmax_scale,
            mask=mask,
            window_size=window_size,
        )
        out[rows], lse[:, rows] = out_one[0], lse_one[0]
    return out, lse


def assert_close(
    actual: Result,
    expected: Result,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
) -> None:
    """Compare within what rounding explains.

    Out is a mean of rows of v, so its error is at most v's largest value times the rounding of the
    probabilities and of the result, plus what the rounding of the scores to float32 does to the
    probabilities. |score| is at most softmax_scale * |q| * |k|.
    """
    out, lse = actual
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert out.shape == expected[0].shape, f"{tuple(out.shape)} != {tuple(expected[0].shape)}"
    assert lse.shape == expected[1].shape, f"{tuple(lse.shape)} != {tuple(expected[1].shape)}"
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    largest_score = scale * _largest_norm(q) * _largest_norm(k)
    eps, eps32 = torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps
    score_error = 4 * eps32 * (1 + largest_score)
    largest_v = v.double().abs().max().item() if v.numel() else 0.0
    _assert_within(out, expected[0], largest_v * (2 * eps + 2 * score_error), "out")
    seen = expected[1] > -torch.inf
    assert torch.equal(lse == -torch.inf, ~seen), "lse is not -inf exactly where no key is seen"
    lse_rounding = 4 * eps32 * (1 + largest_score + _logarithm(k.shape[-3]))
    # 16-bit kernels may sum probabilities that are rounded like those they multiply v with.
    probability_rounding = eps if q.dtype != torch.float32 else 0.0
    _assert_within(
        lse[seen], expected[1][seen], lse_rounding + probability_rounding + score_error, "lse"
    )


def _assert_within(actual: Tensor, expected: Tensor, bound: float, name: str) -> None:
    error = (actual.double() - expected).abs()
    assert not error.isnan().any(), f"{name} holds NaN"
    largest = error.max().item() if error.numel() else 0.0
    assert largest <= bound, f"{name} is off by {largest:.3g}, allowed are {bound:.3g}"


def _largest_norm(x: Tensor) -> float:
    return x.double().norm(dim=-1).max().item() if x.numel() else 0.0


def _logarithm(n: int) -> float:
    return torch.tensor(float(max(n, 1))).log().item()
