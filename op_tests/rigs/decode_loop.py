"""A decode loop, in which every call has one key more than the call before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from jitfmha.bench.report import Progress, Report
from jitfmha.bench.timing import alternate
from jitfmha.call.interface import fmha_fwd

_BAR = 1.5  # the loop's time over that of the same call repeated
_LENGTHS = range(512, 1024)
_MEAN_LENGTH = sum(_LENGTHS) // len(_LENGTHS)

# The first n rows of a tensor (1, rows, heads, hdim), as a model may keep its keys and values.
KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slices of a cache": lambda x, n: x[:, :n],
    "contiguous tensors": lambda x, n: x.flatten()[: n * x[0, 0].numel()].view(1, n, *x.shape[2:]),
}


def tensors(dtype: torch.dtype, heads: int, hdim: int) -> tuple[Tensor, Tensor, Tensor]:
    """One query, and keys and values of which a step takes the first rows."""
    rows = (1, _LENGTHS[-1], _LENGTHS[-1])
    q, k, v = (torch.randn(1, n, heads, hdim).to(dtype) for n in rows)
    return q, k, v


def add_row(
    report: Report,
    where: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    min_seconds: float,
    progress: Progress,
) -> None:
    """Measure both kinds of tensors, and hold the worse one against the bar."""
    ratios = []
    scales = distinct_scales(qkv[0].shape[-1])
    for kind in KINDS:
        ratios.append(loop_over_repeated(*qkv, kind, scales, min_seconds))
        progress(f"one key more each call, {kind}: {ratios[-1]:.2f}x the same call repeated")
    what = f"a loop in which every call has one key more, {where}, over the same call repeated"
    report.at_most(what, max(ratios), _BAR, "x")


def distinct_scales(hdim: int) -> Iterator[float]:
    """Scales of which no two are equal, all of them close to that of ``hdim``."""
    return (hdim**-0.5 * (1 + 1e-6 * i) for i in count())


def loop_over_repeated(
    q: Tensor, k: Tensor, v: Tensor, kind: str, scales: Iterator[float], min_seconds: float
) -> float:
    """The time of the loop over that of as many equal calls with as many keys in the mean.

    Neither side pays for taking its rows. Each round takes a scale of its own from ``scales``, so
    that nothing that one loop leaves behind for its lengths serves the next; one call with that
    scale comes before.
    """
    steps = [(KINDS[kind](k, n), KINDS[kind](v, n)) for n in _LENGTHS]
    k_mean, v_mean = (KINDS[kind](x, _MEAN_LENGTH) for x in (k, v))
    scale = 0.0

    def change_scale() -> None:
        nonlocal scale
        scale = next(scales)
        fmha_fwd(q, k_mean, v_mean, softmax_scale=scale)

    def loop() -> None:
        for k_step, v_step in steps:
            fmha_fwd(q, k_step, v_step, softmax_scale=scale)

    def repeated() -> None:
        for _ in steps:
            fmha_fwd(q, k_mean, v_mean, softmax_scale=scale)

    times = alternate(
        [loop, repeated], min_seconds=min_seconds, min_rounds=5, before_round=change_scale
    )
    return times.ratio(0, 1)
