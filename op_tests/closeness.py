"""Results beside their float64 reference, within what rounding explains."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from untyped import fmha_fwd

from jitfmha.problem.float64_reference import Result, attention, rounding_of_forward


def assert_close(
    actual: Result,
    expected: Result,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    *,
    dropout_p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Out and lse, their shapes and dtypes.

    ``dtype`` is what the output has instead of q's dtype, where the inputs have 8 bits; q, k and v
    are what they stand for.
    """
    dtype = q.dtype if dtype is None else dtype
    assert (actual[0].dtype, actual[1].dtype) == (dtype, torch.float32)
    allowed = rounding_of_forward(
        *(q, k, v, expected[1]), softmax_scale=softmax_scale, dtype=dtype, dropout_p=dropout_p
    )
    for name, x, exact in zip(("out", "lse"), actual, expected, strict=True):
        assert x.shape == exact.shape, f"{name}: {tuple(x.shape)} != {tuple(exact.shape)}"
        assert not x.isnan().any(), f"{name} holds NaN"
        seen = exact.isfinite()
        assert torch.equal(x.isfinite(), seen), f"{name} is not -inf exactly where no key is seen"
        error = (x.double() - exact)[seen].abs()
        largest = error.max().item() if error.numel() else 0.0
        bound = allowed[name]
        assert largest <= bound, f"{name} is off by {largest:.3g}, allowed are {bound:.3g}"


def check(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """A call of ``fmha_fwd`` with its lse; ``out`` and ``num_splits`` change no result."""
    actual = fmha_fwd(q, k, v, return_lse=True, **options)
    of_result = {name: x for name, x in options.items() if name not in ("out", "num_splits")}
    scale, dropout_p = options.get("softmax_scale"), options.get("dropout_p", 0.0)
    expected = attention(q, k, v, **of_result)
    assert_close(actual, expected, q, k, v, scale, dropout_p=dropout_p)


def assert_as_close(actual: Result, other: Result, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Out and lse of the same call, summed up in another order.

    Each is within what rounding explains, so they are within twice that of each other.
    """
    allowed = rounding_of_forward(q, k, v, other[1], dtype=other[0].dtype)
    for name, x, y in zip(("out", "lse"), actual, other, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert torch.equal(x.isfinite(), y.isfinite()), f"{name} is not finite where the other is"
        error = (x.double() - y.double()).nan_to_num(0).abs().amax().item()
        assert error <= 2 * allowed[name], f"{name}: {error:.3g} apart, {allowed[name]:.3g}"


def is_same(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether they are as many, and the same to the last bit."""
    return len(results) == len(others) and all(map(torch.equal, results, others))
