"""The suite of calls drawn at random on the CPU, beside SDPA's, with gradients, too."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import geometric_mean

import torch

from jitfmha.bench.report import Comparison, Progress, Report
from jitfmha.bench.timing import TOLERANCE, machine_here
from jitfmha.problem.dtypes import DTYPE_NAMES

from .cpu_backward import time_training_step
from .over_sdpa import Sizes, time_over_sdpa

_CALLS, _QUICK_CALLS = 60, 5
_FEW_THREADS = 2
_LEAST_MEAN, _LEAST_ANY = 1.3, 0.9
# Sizes are drawn again where a call would take longer: some 0.1 s on two cores.
_MOST_FLOPS = 4e10


@dataclass(frozen=True)
class DrawnCall:
    """One call, or a step of training; only of as many keys as queries it may be causal."""

    sizes: Sizes
    dtype: torch.dtype
    is_causal: bool
    is_training: bool

    def __str__(self) -> str:
        causal = " causal" if self.is_causal else ""
        training = ", forward and backward" if self.is_training else ""
        return f"{DTYPE_NAMES[self.dtype]} {self.sizes}{causal}{training}"


def run(quick: bool, progress: Progress, seed: int | None = None) -> Report:
    """Measure calls that ``seed`` draws, or a new one, with two threads and with all of torch's."""
    seed = Random().randrange(1 << 32) if seed is None else seed
    report = Report("cpu-drawn", {**machine_here(), "seed": str(seed)})
    calls = drawn_calls(seed, _QUICK_CALLS if quick else _CALLS)
    all_threads = torch.get_num_threads()
    try:
        for threads in sorted({min(_FEW_THREADS, all_threads), all_threads}):
            torch.set_num_threads(threads)
            speedups = []
            for number, call in enumerate(calls, 1):
                timed = _timed(f"{threads} threads, {call}", call, report, 0.1 if quick else 0.5)
                speedups.append(timed.speedup)
                progress(f"[{number}/{len(calls)}] {timed.what}: {timed.speedup:.2f}x SDPA")
            what = f"drawn calls over SDPA, {threads} threads"
            mean = geometric_mean(speedups)
            report.at_least(f"{what}, geometric mean of {len(calls)}", mean, _LEAST_MEAN, "x")
            report.at_least(f"{what}, slowest", min(speedups), _LEAST_ANY, "x")
    finally:
        torch.set_num_threads(all_threads)
    return report


def drawn_calls(seed: int, count: int) -> list[DrawnCall]:
    """``count`` calls; logarithms of lengths and numbers of heads are drawn evenly."""
    random = Random(seed)

    def between(least: int, most: int) -> int:
        return round(exp(random.uniform(log(least), log(most))))

    def sizes() -> Sizes:
        seqlen_q = between(50, 5000)
        seqlen_k = seqlen_q if random.random() < 0.5 else between(50, 5000)
        heads, hdim = between(1, 32), 8 * random.randint(4, 32)
        return random.randint(1, 4), seqlen_q, seqlen_k, heads, heads, hdim

    calls: list[DrawnCall] = []
    while len(calls) < count:
        of_call = batch, seqlen_q, seqlen_k, heads, _, hdim = sizes()
        if 4 * batch * seqlen_q * seqlen_k * heads * hdim > _MOST_FLOPS:
            continue
        dtype = random.choice(list(TOLERANCE))
        is_causal = seqlen_q == seqlen_k and random.random() < 0.5
        calls.append(DrawnCall(of_call, dtype, is_causal, random.random() < 0.3))
    return calls


def _timed(name: str, call: DrawnCall, report: Report, seconds: float) -> Comparison:
    if call.is_training:
        with torch.enable_grad():
            timed = time_training_step(
                name, call.sizes, call.dtype, causal=call.is_causal, min_seconds=seconds
            )
        report.comparisons.append(timed)
        return timed
    with torch.no_grad():
        timed, _ = time_over_sdpa(
            *(report, name, call.sizes, call.dtype), is_causal=call.is_causal, min_seconds=seconds
        )
    return timed
