"""The gemm suite: matmul on the CPU beside torch's functions, or by the cost model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional

from ..gemm.interface import matmul
from ..gemm.problem import FLOATS, FP8, OUT_DTYPES
from ..problem.torch_parts import int8_product
from .report import Progress, Report
from .sizes import Sizes
from .timing import machine_here

# m, n, k.
_SHAPES = (
    *((1, 4096, 4096), (16, 4096, 4096)),
    *((512, 512, 512), (1000, 1000, 1000), (2048, 2048, 2048)),
)
_QUICK_SHAPES = ((16, 1024, 1024), (256, 256, 256))
_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.int8
_LEAST_MEAN = 0.95


def run(quick: bool, progress: Progress, sizes: Sizes | None = None) -> Report:
    """Measure with torch's threads; the bars are ratios of times to those of torch's functions.

    They are for the suite's own shapes: of given ``sizes`` there are figures alone.
    """
    report = Report("gemm", machine_here())
    asked = Sizes(_QUICK_SHAPES if quick else _SHAPES) if sizes is None else sizes
    ratios: dict[str, list[float]] = {}
    dtypes = asked.torch_dtypes(_DTYPES)
    for (m, n, k), dtype, layout in product(asked.shapes, dtypes, asked.layouts):
        ours, theirs = _pair(m, n, k, dtype, layout)
        name = f"{m} x {n} x {k} {str(dtype).removeprefix('torch.')} {layout}"
        if asked.device is None:
            one, other = ours().float(), theirs().float()
            assert float((one - other).abs().max()) <= 0.05 * (1 + float(other.abs().max())), name
        measured = asked.measure(ours, theirs, seconds=0.1 if quick else 0.3)
        ratios.setdefault(str(dtype), []).append(measured.ratio)
        of_out = OUT_DTYPES[dtype][0].itemsize
        moved = (m * k + k * n) * dtype.itemsize + m * n * of_out
        speed, gbytes = 2 * m * n * k / measured.seconds, moved / measured.seconds / 1e9
        unit, of_unit = ("TFLOP/s", 1e12) if speed >= 1e13 else ("GFLOP/s", 1e9)
        text = f"{unit}, {gbytes:.1f} GB/s, {measured.text}"
        report.figure(name, speed / of_unit, text)
        progress(f"{name}: {measured.seconds * 1e6:.1f} us, {measured.text}")
    for dtype_name, each in ratios.items() if sizes is None else ():
        what = f"{dtype_name.removeprefix('torch.')}: geometric mean over torch's"
        report.at_least(what, geometric_mean(each), _LEAST_MEAN, "x")
    return report


def _pair(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Of floats with a bias, as layers have it; those of 8 bits torch multiplies as float32."""
    a, b = (
        _matrix(rows, columns, dtype, is_transposed=side == "t")
        for rows, columns, side in ((m, k, layout[0]), (k, n, layout[1]))
    )
    if dtype == torch.int8:
        return partial(matmul, a, b), partial(int8_product, a, b)
    if dtype not in FLOATS:
        as_floats = torch.float32 if dtype in FP8 else dtype
        return partial(matmul, a, b), lambda: a.to(as_floats) @ b.to(as_floats)
    bias = torch.randn(n).to(dtype)
    return partial(matmul, a, b, bias=bias), partial(functional.linear, a, b.mT, bias)


def _matrix(rows: int, columns: int, dtype: torch.dtype, *, is_transposed: bool) -> Tensor:
    shape = (columns, rows) if is_transposed else (rows, columns)
    is_float = dtype.is_floating_point
    x = torch.randn(shape).to(dtype) if is_float else torch.randint(-9, 10, shape, dtype=dtype)
    return x.mT if is_transposed else x
