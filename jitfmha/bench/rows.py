"""The rows suite: softmax, RMSNorm and LayerNorm on the CPU beside torch's, with gradients, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..rows.interface import layer_norm, rms_norm, softmax
from .report import Progress, Report
from .sizes import Sizes
from .timing import machine_here

_SHAPES = ((16, 128), (512, 64), (1024, 1000), (4096, 128), (2048, 4096), (64, 131072))
_QUICK_SHAPES = ((512, 64), (512, 4096))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_MEAN, _LEAST_ANY = 1.2, 0.95
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.02}


def run(quick: bool, progress: Progress, sizes: Sizes | None = None) -> Report:
    """Measure with torch's threads; the bars are ratios of times to those of torch's functions.

    They are for the suite's own shapes: of given ``sizes`` there are figures alone.
    """
    report = Report("rows", machine_here())
    asked = Sizes(_QUICK_SHAPES if quick else _SHAPES) if sizes is None else sizes
    ratios: dict[str, list[float]] = {}
    dtypes = asked.torch_dtypes(_DTYPES[:2] if quick else _DTYPES)
    for shape, dtype in product(asked.shapes, dtypes):
        for what, moved, ours, theirs in _pairs(shape, dtype):
            name = f"{what}, {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
            for one, other in zip(ours(), theirs(), strict=True) if asked.device is None else ():
                bound = _TOLERANCE[dtype] * (1 + float(other.abs().max()))
                assert float((one - other).abs().max()) <= bound, name
            lasting = 0.1 if quick else 0.3
            measured = asked.measure(
                ours, theirs, seconds=lasting, compiles="gradients" not in what
            )
            ratios.setdefault(what, []).append(measured.ratio)
            report.figure(name, moved / measured.seconds / 1e9, f"GB/s, {measured.text}")
            progress(f"{name}: {measured.seconds * 1e6:.1f} us, {measured.text}")
    for what, each in ratios.items() if sizes is None else ():
        mean = geometric_mean(each)
        report.at_least(f"{what}: geometric mean over torch's", mean, _LEAST_MEAN, "x")
        report.at_least(f"{what}: lowest over torch's", min(each), _LEAST_ANY, "x")
    return report


_Results = Callable[[], tuple[Tensor, ...]]


def _pairs(
    shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[tuple[str, int, _Results, _Results]]:
    """What it is, the bytes that it reads and writes, and both ways to compute it."""
    x, residual, dout = (torch.randn(shape).to(dtype) for _ in range(3))
    weight, bias = (torch.randn(shape[1]).to(dtype) for _ in range(2))
    columns, size = (shape[1],), x.nbytes

    def with_sum() -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, columns, weight, 1e-6), total

    of_torch: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = {
        "softmax": (softmax, partial(functional.softmax, dim=-1), (x,)),
        "rms_norm": (
            partial(rms_norm, eps=1e-6),
            lambda x, w: functional.rms_norm(x, columns, w, 1e-6),
            (x, weight),
        ),
        "layer_norm": (
            layer_norm,
            lambda x, w, b: functional.layer_norm(x, columns, w, b),
            (x, weight, bias),
        ),
    }
    for name, (ours, theirs, given) in of_torch.items():
        yield name, 2 * size, partial(_alone, ours, given), partial(_alone, theirs, given)
        both = [partial(_gradients, function, given, dout) for function in (ours, theirs)]
        yield f"{name} with gradients", 5 * size, both[0], both[1]
    added: _Results = partial(rms_norm, x, weight, residual=residual)  # type: ignore[assignment]
    yield "rms_norm of a sum", 4 * size, added, with_sum


def _alone(function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (function(*given),)


def _gradients(
    function: Callable[..., Tensor], given: tuple[Tensor, ...], dout: Tensor
) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in given]
    return torch.autograd.grad(function(*leaves), leaves, dout)
