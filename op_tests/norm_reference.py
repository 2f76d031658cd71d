"""The functions over rows in float64, and by how much a kernel's results may differ from them.

Bounds are those of float32 sums whose numbers are rounded 256 times at most, first order: kernels
add up parts of a row on their own. What each term is of stands beside it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT32 = 2.0**-24  # half a unit in the last place, relatively
_ROUNDING = {torch.float32: FLOAT32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_LEAST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}
_SUM = 256 * FLOAT32
# Of 2^x, by its polynomial.
_EXPONENT = {torch.float32: 2e-7, torch.bfloat16: 4e-6, torch.float16: 4e-6}
# Numbers of kernels below are 0.
_LEAST_POWER = 2.0**-99
# What cancels of a row's squares where one pass is enough.
_CANCELLED = 10
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
_FP8_STEP = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e4m3fnuz: 2.0**-10}


class Normal(NamedTuple):
    """What rows are in float64 when they are normalised, and how far a kernel's may be off."""

    values: Tensor
    factor: Tensor
    off: Tensor
    factor_off: float


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """By how much rounding to the dtype may change a number."""
    return x.abs() * _ROUNDING[dtype] + _LEAST[dtype]


def normal(kind: str, x: Tensor, eps: float) -> Normal:
    x = x.double()
    mean = x.mean(-1, keepdim=True) if kind == "layer_norm" else torch.zeros_like(x[..., :1])
    factor = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    values = (x - mean) * factor
    if kind == "rms_norm":
        return Normal(values, factor, values.abs() * _SUM, _SUM)
    spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    of_mean = _SUM * spread + 2 * FLOAT32 * (mean.abs() + x.abs())
    factor_off = _CANCELLED * _SUM
    return Normal(values, factor, factor * of_mean + factor_off * values.abs(), factor_off)


def forward(
    kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The result, and its bound before it is rounded to a dtype."""
    if kind == "softmax":
        row = x.double()
        out = row.softmax(-1)
        depth = row.amax(-1, keepdim=True) - row
        power_off = 2 * _EXPONENT[x.dtype] + 4 * FLOAT32 * depth
        of_sum = _SUM + (out * power_off).sum(-1, keepdim=True)
        return out, out * (power_off + of_sum) + _LEAST_POWER
    values, _, off, _ = normal(kind, x, eps)
    if weight is not None:
        values, off = values * weight.double(), off * weight.double().abs()
    if bias is not None:
        values = values + bias.double()
    return values, off + 4 * FLOAT32 * values.abs() + FLOAT32 * (0 if bias is None else bias.abs())


def check(actual: Tensor, expected: Tensor, off: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    difference = (actual.double() - expected).abs()
    bound = off + rounded(expected, dtype) * (1 + 2**-6)
    bound = bound + off * _ROUNDING[dtype]
    assert difference.isfinite().all()
    assert (difference <= bound).all(), f"{(difference / bound).max()} times the bound"


def check_quantised(actual: Tensor, scale: Tensor, expected: Tensor, off: Tensor) -> None:
    largest = LARGEST[actual.dtype]
    assert scale.dtype == torch.float32
    assert scale.shape == expected.shape[:-1]
    magnitude, most_off = expected.abs().amax(-1), off.amax(-1)
    scale_off = most_off / largest + 2 * FLOAT32 * magnitude / largest + 2.0**-125
    assert ((scale.double() - magnitude / largest).abs() <= scale_off).all()
    scale = scale.double()[..., None]
    half_step = scale / 2
    if actual.dtype != torch.int8:
        least = scale * _FP8_STEP[actual.dtype] / 2
        half_step = torch.maximum(expected.abs() * 2.0**-4, least)
    # A number that is off, or rounded on its way, may lie beyond the middle of a step.
    bound = half_step * (1 + 2**-4) * (1 + 8 * FLOAT32) + 2 * off + 2 * most_off[..., None]
    if actual.dtype == torch.int8:
        bound = half_step + (off + most_off[..., None]) * 2 + 4 * FLOAT32 * magnitude[..., None]
    difference = (actual.double() * scale - expected).abs()
    assert (difference <= bound).all(), f"{(difference / bound).max()} times the bound"


def check_not_finite(actual: Tensor, scale: Tensor, expected: Tensor) -> None:
    """That NaN stays NaN in fp8, and rows with NaN in int8, or with infinity, become NaN."""
    lost = expected.isinf()
    if actual.dtype == torch.int8:
        lost |= expected.isnan()
    lost = lost.any(-1, keepdim=True) | expected.isnan()
    assert torch.equal((actual.double() * scale.double()[..., None]).isnan(), lost)


class Gradients(NamedTuple):
    """Gradients in float64, each with its bound before it is rounded."""

    x: tuple[Tensor, Tensor]
    weight: tuple[Tensor, Tensor]
    bias: tuple[Tensor, Tensor]


def backward(
    kind: str, dout: Tensor, x: Tensor, weight: Tensor | None, eps: float, dsum: Tensor | None
) -> Gradients:
    """Of what ``x`` is to a backward pass; rows are all dimensions but the last."""
    dout = dout.double()
    if kind == "softmax":
        out = x.double()
        products = dout * out
        sum_off = _SUM * products.abs().sum(-1, keepdim=True)
        dx = out * (dout - products.sum(-1, keepdim=True))
        off = out.abs() * (sum_off + 4 * FLOAT32 * (dout.abs() + products.abs().sum(-1, True)))
        return Gradients(_plus(dx, off, dsum), (dx, off), (dx, off))
    own, factor, off, factor_off = normal(kind, x, eps)
    g = dout if weight is None else dout * weight.double()
    has_mean = kind == "layer_norm"
    of_g = g.mean(-1, keepdim=True) if has_mean else torch.zeros_like(g[..., :1])
    of_products = (g * own).mean(-1, keepdim=True)
    inner = g - of_g - own * of_products
    # What is subtracted may cancel, so that bounds are those of its terms.
    g_off = 2 * FLOAT32 * g.abs() + 2 * _SUM * g.abs().mean(-1, keepdim=True) * has_mean
    most = (g * own).abs().mean(-1, keepdim=True)
    products_off = (g.abs() * off).mean(-1, keepdim=True) + 2 * _SUM * most
    terms = g.abs() + of_g.abs() + own.abs() * most
    inner_off = g_off + off * most + (own.abs() + off) * products_off + 4 * FLOAT32 * terms
    dx, dx_off = factor * inner, factor * (inner_off + (factor_off + FLOAT32) * inner.abs())
    flat = [each.reshape(-1, each.shape[-1]) for each in (dout, own, off)]
    depth = (flat[0].shape[0] + 64) * FLOAT32  # additions that a number may go through
    dweight = (flat[0] * flat[1]).sum(0)
    dweight_off = (flat[0].abs() * flat[2]).sum(0) + depth * (flat[0] * flat[1]).abs().sum(0)
    dbias_off = depth * flat[0].abs().sum(0)
    return Gradients(_plus(dx, dx_off, dsum), (dweight, dweight_off), (flat[0].sum(0), dbias_off))


def _plus(dx: Tensor, off: Tensor, dsum: Tensor | None) -> tuple[Tensor, Tensor]:
    if dsum is None:
        return dx, off
    total = dx + dsum.double()
    return total, off + FLOAT32 * total.abs()
