"""The rows of the CPU suite about decoding and small calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from jitfmha.bench.report import Progress, Report
from jitfmha.bench.timing import TOLERANCE, Timings, alternate
from jitfmha.call.interface import fmha_fwd
from jitfmha.problem.dtypes import DTYPE_NAMES
from jitfmha.problem.packed_pages import as_packed

from .over_sdpa import Sizes, time_over_sdpa, verified

_PAGE_SIZE = 128
_DECODING: tuple[Sizes, ...] = (
    *((1, 1, 4096, 32, 8, 128), (8, 1, 4096, 32, 8, 128)),
    (1, 1, 32768, 32, 8, 128),
)
_SMALL: tuple[Sizes, ...] = ((1, 128, 128, 8, 8, 64), (8, 64, 64, 12, 12, 32))


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Measure decoding and small calls; ``quick`` takes shorter caches and repeats less."""
    for (batch, rows, keys, *others), dtype in product(_DECODING, (torch.bfloat16, torch.float16)):
        sizes = (batch, rows, keys // 8 if quick else keys, *others)
        _decoding(report, sizes, dtype, quick, progress)  # type: ignore[arg-type]
        _in_packed_pages(report, sizes, dtype, quick, progress)  # type: ignore[arg-type]
    for sizes, dtype in product(_SMALL, TOLERANCE):
        name = f"small call {DTYPE_NAMES[dtype]} {sizes}"
        seconds = 0.3 if quick else 2.0
        timed, _ = time_over_sdpa(report, name, sizes, dtype, min_seconds=seconds, calls=50)
        progress(f"{name}: {timed.seconds * 1e6:.0f} us, {timed.speedup:.2f}x SDPA")
        report.at_least(f"{name}, speed over SDPA", timed.speedup, 1.0, "x")


def _decoding(
    report: Report, sizes: Sizes, dtype: torch.dtype, quick: bool, progress: Progress
) -> None:
    name = f"decode {DTYPE_NAMES[dtype]} {sizes}"
    seconds = 0.5 if quick else 3.0
    timed, times = time_over_sdpa(report, name, sizes, dtype, min_seconds=seconds, beside=_read)
    share = _share_of_read(report, name, sizes, dtype, times)
    progress(f"{name}: {share}, {timed.speedup:.2f}x SDPA")
    report.at_least(f"{name}, speed over SDPA", timed.speedup, 1.5, "x")


def _in_packed_pages(
    report: Report, sizes: Sizes, dtype: torch.dtype, quick: bool, progress: Progress
) -> None:
    batch, rows, keys, heads_q, heads_k, hdim = sizes
    q = torch.randn(batch, rows, heads_q, hdim).to(dtype)
    k, v = (torch.randn(batch, keys, heads_k, hdim).to(dtype) for _ in range(2))
    k_pages, v_pages = (
        as_packed(side, x.view(-1, _PAGE_SIZE, heads_k, hdim)) for side, x in (("k", k), ("v", v))
    )
    table = torch.arange(len(k_pages), dtype=torch.int32).view(batch, -1)
    sums_q, sums_k = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (rows, keys))

    def packed() -> Tensor:
        return fmha_fwd(
            *(q.flatten(0, 1), k_pages, v_pages),
            cu_seqlens_q=sums_q,
            cu_seqlens_k=sums_k,
            max_seqlen_q=rows,
            block_table=table,
        )

    def plain() -> Tensor:
        return fmha_fwd(q, k, v)

    name = f"decode in packed pages {DTYPE_NAMES[dtype]} {sizes}"
    verified(name, packed(), plain().flatten(0, 1))
    functions: list[Callable[[], object]] = [packed, plain, lambda: _read(k_pages, v_pages)]
    times = alternate(functions, min_seconds=0.5 if quick else 3.0, min_rounds=5)
    share, over_plain = _share_of_read(report, name, sizes, dtype, times), times.ratio(1, 0)
    progress(f"{name}: {share}, {over_plain:.2f}x plain memory")
    report.at_least(f"{name}, speed over plain memory", over_plain, 1.0, "x")


def _read(k: Tensor, v: Tensor) -> None:
    for x in (k, v):
        x.view(torch.int64).flatten().sum()


def _share_of_read(
    report: Report, name: str, sizes: Sizes, dtype: torch.dtype, times: Timings
) -> str:
    """Hold the first function to the third, a parallel read of K and V, and say how fast it is."""
    batch, _, seqlen_k, _, heads_k, hdim = sizes
    moved = 2 * batch * seqlen_k * heads_k * hdim * dtype.itemsize
    share = 100 * times.ratio(2, 0)
    report.at_least(f"{name}, share of a parallel read of K and V", share, 70.0, "%")
    return f"{moved / times.best(0) / 1e9:.1f} GB/s of K and V, {share:.0f} % of a parallel read"
