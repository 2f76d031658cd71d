"""What the rows of the CPU suite that time us beside PyTorch's SDPA have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jitfmha.bench.report import Comparison, Report
from jitfmha.bench.timing import TOLERANCE, Timings, alternate
from jitfmha.call.interface import fmha_fwd

Sizes = tuple[int, int, int, int, int, int]
"""batch, seqlen_q, seqlen_k, heads_q, heads_k, hdim."""


def verified(what: str, ours: Tensor, theirs: Tensor) -> float:
    """The largest difference. Raises ``RuntimeError`` where the results do not belong together."""
    error = (ours.float() - theirs.float()).abs().max().item()
    tolerance = TOLERANCE[ours.dtype]
    if not error <= tolerance:
        raise RuntimeError(f"{what}: the result differs from SDPA's by {error}, over {tolerance}")
    return error


def compare(
    what: str, times: Timings, flops: float, error: float, *, against: str = "SDPA", other: int = 1
) -> Comparison:
    """Our function, the first that was timed, with the function ``other``."""
    return Comparison(
        what=what,
        against=against,
        seconds=times.median(0),
        against_seconds=times.median(other),
        speedup=times.ratio(other, 0),
        gflops=flops / times.median(0) / 1e9,
        error=error,
    )


def time_over_sdpa(
    report: Report,
    what: str,
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    is_causal: bool = False,
    min_seconds: float,
    min_rounds: int = 5,
    calls: int = 1,
    beside: Callable[[Tensor, Tensor], object] | None = None,
) -> tuple[Comparison, Timings]:
    """Time a call beside SDPA's as :func:`alternate` does, each in the layout that it likes best.

    ``is_causal`` is of as many queries as keys; ``beside`` is another function, of k and v, that is
    timed along. Raises ``RuntimeError`` where the results do not belong together.
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_k, hdim = sizes
    q = torch.randn(batch, seqlen_q, heads_q, hdim).to(dtype)
    k, v = (torch.randn(batch, seqlen_k, heads_k, hdim).to(dtype) for _ in range(2))
    qt, kt, vt = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    options: dict[str, Any] = {"mask": "causal"} if is_causal else {}
    sdpa_options: dict[str, Any] = {"is_causal": True} if is_causal else {}
    if heads_q != heads_k:
        sdpa_options["enable_gqa"] = True
    ours = partial(fmha_fwd, q, k, v, **options)
    theirs: Callable[[], Tensor] = partial(scaled_dot_product_attention, qt, kt, vt, **sdpa_options)
    error = verified(what, ours(), theirs().transpose(1, 2))
    functions: list[Callable[[], object]] = [ours, theirs]
    if beside is not None:
        functions.append(lambda: beside(k, v))
    times = alternate(functions, min_seconds=min_seconds, min_rounds=min_rounds, calls=calls)
    pairs = seqlen_q * (seqlen_q + 1) // 2 if is_causal else seqlen_q * seqlen_k
    comparison = compare(what, times, 4 * batch * heads_q * pairs * hdim, error)
    report.comparisons.append(comparison)
    return comparison, times
