"""The rows of the CPU suite about decoding and small calls."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ..problem.dtypes import DTYPE_NAMES
from .over_sdpa import TOLERANCE, Sizes, time_over_sdpa
from .report import Progress, Report

_DECODING: tuple[Sizes, ...] = ((8, 1, 4096, 32, 8, 128), (1, 1, 32768, 32, 8, 128))
_SMALL: tuple[Sizes, ...] = ((1, 128, 128, 8, 8, 64), (8, 64, 64, 12, 12, 32))


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Measure decoding and small calls; ``quick`` takes shorter caches and repeats less."""
    for (batch, rows, keys, *others), dtype in product(_DECODING, (torch.bfloat16, torch.float16)):
        sizes = (batch, rows, keys // 8 if quick else keys, *others)
        _decoding(report, sizes, dtype, quick, progress)  # type: ignore[arg-type]
    for sizes, dtype in product(_SMALL, TOLERANCE):
        name = f"small call {DTYPE_NAMES[dtype]} {sizes}"
        seconds = 0.3 if quick else 2.0
        timed, _ = time_over_sdpa(report, name, sizes, dtype, min_seconds=seconds, calls=50)
        progress(f"{name}: {timed.seconds * 1e6:.0f} us, {timed.speedup:.2f}x SDPA")
        report.at_least(f"{name}, speed over SDPA", timed.speedup, 1.0, "x")


def _decoding(
    report: Report, sizes: Sizes, dtype: torch.dtype, quick: bool, progress: Progress
) -> None:
    def read(k: Tensor, v: Tensor) -> None:
        for x in (k, v):
            x.view(torch.int64).flatten().sum()

    name = f"decode {DTYPE_NAMES[dtype]} {sizes}"
    seconds = 0.5 if quick else 3.0
    timed, times = time_over_sdpa(report, name, sizes, dtype, min_seconds=seconds, beside=read)
    batch, _, seqlen_k, _, heads_k, hdim = sizes
    moved = 2 * batch * seqlen_k * heads_k * hdim * dtype.itemsize
    share = 100 * times.ratio(2, 0)
    progress(
        f"{name}: {moved / times.best(0) / 1e9:.1f} GB/s of K and V, {share:.0f} % of a parallel "
        f"read, {timed.speedup:.2f}x SDPA"
    )
    report.at_least(f"{name}, share of a parallel read of K and V", share, 70.0, "%")
    report.at_least(f"{name}, speed over SDPA", timed.speedup, 1.5, "x")
