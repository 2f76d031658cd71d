"""The rows of the CPU suite about decoding and small calls."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..call.interface import fmha_fwd
from ..problem.dtypes import DTYPE_NAMES
from .over_sdpa import TOLERANCE, compare, verified
from .report import Comparison, Progress, Report
from .timing import Timings, alternate

# batch, seqlen_q, seqlen_k, heads_q, heads_k, hdim
_Sizes = tuple[int, int, int, int, int, int]
_DECODING: tuple[_Sizes, ...] = ((8, 1, 4096, 32, 8, 128), (1, 1, 32768, 32, 8, 128))
_SMALL: tuple[_Sizes, ...] = ((1, 128, 128, 8, 8, 64), (8, 64, 64, 12, 12, 32))


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Measure decoding and small calls; ``quick`` takes shorter caches and repeats less."""
    for sizes, dtype in product(_DECODING, (torch.bfloat16, torch.float16)):
        _decoding(report, _shorter(sizes) if quick else sizes, dtype, quick, progress)
    for sizes, dtype in product(_SMALL, TOLERANCE):
        _small(report, sizes, dtype, quick, progress)


def _shorter(sizes: _Sizes) -> _Sizes:
    batch, seqlen_q, seqlen_k, *others = sizes
    return (batch, seqlen_q, seqlen_k // 8, *others)  # type: ignore[return-value]


def _decoding(
    report: Report, sizes: _Sizes, dtype: torch.dtype, quick: bool, progress: Progress
) -> None:
    qkv, by_head = _tensors(sizes, dtype)
    words = [x.view(torch.int64).flatten() for x in qkv[1:]]
    name = f"decode {DTYPE_NAMES[dtype]} {sizes}"
    times = alternate(
        [
            lambda: fmha_fwd(*qkv),
            lambda: scaled_dot_product_attention(*by_head, enable_gqa=True),
            lambda: [x.sum() for x in words],
        ],
        min_seconds=0.5 if quick else 3.0,
        min_rounds=5,
    )
    comparison = _comparison(name, sizes, qkv, by_head, times)
    report.comparisons.append(comparison)
    read = sum(x.nbytes for x in words)
    share = 100 * times.ratio(2, 0)
    progress(
        f"{name}: {read / times.best(0) / 1e9:.1f} GB/s of K and V, {share:.0f} % of a parallel "
        f"read, {comparison.speedup:.2f}x SDPA"
    )
    report.at_least(f"{name}, share of a parallel read of K and V", share, 70.0, "%")
    report.at_least(f"{name}, speed over SDPA", comparison.speedup, 1.5, "x")


def _small(
    report: Report, sizes: _Sizes, dtype: torch.dtype, quick: bool, progress: Progress
) -> None:
    qkv, by_head = _tensors(sizes, dtype)
    name = f"small call {DTYPE_NAMES[dtype]} {sizes}"
    times = alternate(
        [lambda: fmha_fwd(*qkv), lambda: scaled_dot_product_attention(*by_head)],
        min_seconds=0.3 if quick else 2.0,
        min_rounds=5,
        calls=50,
    )
    comparison = _comparison(name, sizes, qkv, by_head, times)
    report.comparisons.append(comparison)
    progress(f"{name}: {comparison.seconds * 1e6:.0f} us, {comparison.speedup:.2f}x SDPA")
    report.at_least(f"{name}, speed over SDPA", comparison.speedup, 1.0, "x")


_Tensors = tuple[Tensor, Tensor, Tensor]


def _tensors(sizes: _Sizes, dtype: torch.dtype) -> tuple[_Tensors, _Tensors]:
    """q, k and v in the layouts that ours and that SDPA likes best."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, hdim = sizes
    q = torch.randn(batch, seqlen_q, heads_q, hdim).to(dtype)
    k, v = (torch.randn(batch, seqlen_k, heads_k, hdim).to(dtype) for _ in range(2))
    by_head = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))
    return (q, k, v), by_head  # type: ignore[return-value]


def _comparison(
    name: str, sizes: _Sizes, qkv: _Tensors, by_head: _Tensors, times: Timings
) -> Comparison:
    """Raises ``RuntimeError`` where the results do not belong together."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, hdim = sizes
    expected = scaled_dot_product_attention(*by_head, enable_gqa=heads_q != heads_k)
    out = fmha_fwd(*qkv)
    error = verified(name, out, expected.transpose(1, 2))
    return compare(name, times, 4 * batch * heads_q * seqlen_q * seqlen_k * hdim, error)
