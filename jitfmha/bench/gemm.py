"""The gemm suite: matmul on the CPU beside torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional

from ..gemm.interface import matmul
from ..problem.torch_parts import int8_product
from .report import Progress, Report
from .timing import alternate, beside_torch, compiled_side, machine_here

# m, n, k.
_SHAPES = (
    *((1, 4096, 4096), (16, 4096, 4096)),
    *((512, 512, 512), (1000, 1000, 1000), (2048, 2048, 2048)),
)
_QUICK_SHAPES = ((16, 1024, 1024), (256, 256, 256))
_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.int8
_LEAST_MEAN = 0.95


def run(
    quick: bool,
    progress: Progress,
    given: Sequence[tuple[int, ...]] = (),
    *,
    compiled: bool = False,
) -> Report:
    """Measure with torch's threads; the bars are ratios of times to those of torch's functions.

    They are for the suite's own shapes: of ``given`` ones, m, n and k, there are figures, where
    asked for also beside torch's functions ``compiled`` by ``torch.compile``.
    """
    report = Report("gemm", machine_here())
    ratios: dict[str, list[float]] = {}
    for (m, n, k), dtype in product(given or (_QUICK_SHAPES if quick else _SHAPES), _DTYPES):
        ours, theirs = _pair(m, n, k, dtype)
        one, other = ours(), theirs()
        bound = 0.05 * (1 + float(other.float().abs().max()))
        assert float((one.float() - other.float()).abs().max()) <= bound, f"{m} x {n} x {k} {dtype}"
        sides = [ours, theirs, *compiled_side(theirs, compiled)]
        times = alternate(sides, min_seconds=0.1 if quick else 0.3, calls=4)
        kind = str(dtype).removeprefix("torch.")
        ratios.setdefault(kind, []).append(times.ratio(1, 0))
        moved = (m * k + k * n) * dtype.itemsize + one.nbytes
        seconds = times.best(0)
        name = f"{m} x {n} x {k} {kind}"
        text = f"GFLOP/s, {moved / seconds / 1e9:.1f} GB/s, {beside_torch(times)}"
        report.figure(name, 2 * m * n * k / seconds / 1e9, text)
        progress(f"{name}: {beside_torch(times)}")
    for kind, each in () if given else ratios.items():
        mean = geometric_mean(each)
        report.at_least(f"{kind}: geometric mean over torch's", mean, _LEAST_MEAN, "x")
    return report


def _pair(
    m: int, n: int, k: int, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """With weights ``(n, k)`` and a bias, as layers have them; int8 without one."""
    if dtype == torch.int8:
        x, weight = (torch.randint(-9, 10, size, dtype=dtype) for size in ((m, k), (n, k)))
        return partial(matmul, x, weight.mT), partial(int8_product, x, weight.mT)
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((m, k), (n, k), (n,)))
    return partial(matmul, x, weight.mT, bias=bias), partial(functional.linear, x, weight, bias)
