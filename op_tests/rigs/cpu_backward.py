"""The rows of the CPU suite about gradients: speed, memory and accuracy of the backward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jitfmha.bench.report import Comparison, Progress, Report
from jitfmha.bench.timing import alternate
from jitfmha.call.interface import fmha_bwd, fmha_fwd
from jitfmha.problem.arguments import AttentionOptions
from jitfmha.problem.dtypes import DTYPE_NAMES

from .fresh_run import run_fresh
from .over_sdpa import Sizes, compare

_HEADS = 8
# Five products in place of two.
_BACKWARD_FLOPS = 2.5
# Only a wrong kernel gets here: the tests of op_tests are the strict ones.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_OVER_SDPA = (torch.float32, torch.bfloat16)
_Gradients = tuple[Tensor, ...]


def add_rows(report: Report, quick: bool, threads: int, progress: Progress) -> None:
    """Measure everything about the backward pass; ``quick`` takes fewer and shorter problems."""
    with torch.enable_grad():
        _over_sdpa(report, quick, progress)
        _accuracy(report, progress)
    _share_of_forward(report, quick, progress)
    _window(report, quick, progress)
    _memory(report, quick, threads, progress)


def _over_sdpa(report: Report, quick: bool, progress: Progress) -> None:
    seqlens = (1024,) if quick else (1024, 2048, 4096)
    speedups = []
    for dtype, hdim, seqlen, causal in product(_OVER_SDPA, (64, 128), seqlens, (False, True)):
        mask = "causal" if causal else "none"
        name = f"{DTYPE_NAMES[dtype]} hdim {hdim} seqlen {seqlen} {mask}, forward and backward"
        sizes = (1, seqlen, seqlen, _HEADS, _HEADS, hdim)
        seconds = 0.3 if quick else 1.0
        comparison = time_training_step(name, sizes, dtype, causal=causal, min_seconds=seconds)
        report.comparisons.append(comparison)
        speedups.append(comparison.speedup)
        progress(f"{comparison.what}: {comparison.speedup:.2f}x SDPA")
    cases = f"{len(speedups)} cases"
    what = "forward and backward over SDPA's"
    report.at_least(f"{what}, geometric mean of {cases}", geometric_mean(speedups), 1.3, "x")
    report.at_least(f"{what}, slowest of {cases}", min(speedups), 1.0, "x")


def time_training_step(
    name: str, sizes: Sizes, dtype: torch.dtype, *, causal: bool, min_seconds: float
) -> Comparison:
    """Forward and backward beside SDPA's. Raises ``RuntimeError`` where gradients differ."""
    batch, seqlen_q, seqlen_k, heads, _, hdim = sizes
    ours, theirs = training_steps(sizes, dtype, causal)
    error = _verified(name, ours(), [x.transpose(1, 2) for x in theirs()])
    times = alternate([ours, theirs], min_seconds=min_seconds, min_rounds=3)
    pairs = seqlen_q * (seqlen_q + 1) // 2 if causal else seqlen_q * seqlen_k
    return compare(name, times, (1 + _BACKWARD_FLOPS) * 4 * batch * heads * pairs * hdim, error)


def training_steps(
    sizes: Sizes, dtype: torch.dtype, causal: bool
) -> tuple[Callable[[], _Gradients], Callable[[], _Gradients]]:
    """Forward and backward of ours and of SDPA's, each in the layout that it likes best.

    There are as many heads of keys as of queries, and of a causal mask as many keys.
    """
    batch, seqlen_q, seqlen_k, heads, _, hdim = sizes
    lengths = (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    q, k, v, dout = (torch.randn(batch, n, heads, hdim).to(dtype) for n in lengths)
    by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v, dout)]
    inputs, inputs_by_head = (
        [x.clone().requires_grad_() for x in tensors[:3]] for tensors in ([q, k, v], by_head)
    )

    def ours() -> _Gradients:
        out = _fmha(inputs, causal)
        return torch.autograd.grad(out, inputs, dout)

    def theirs() -> _Gradients:
        out = _sdpa(inputs_by_head, causal)
        return torch.autograd.grad(out, inputs_by_head, by_head[3])

    return ours, theirs


def _fmha(inputs: Sequence[Tensor], causal: bool) -> Tensor:
    q, k, v = inputs
    return fmha_fwd(q, k, v, mask="causal" if causal else "none")


def _sdpa(inputs: Sequence[Tensor], causal: bool) -> Tensor:
    q, k, v = inputs
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _share_of_forward(report: Report, quick: bool, progress: Progress) -> None:
    seqlen, hdim = (1024 if quick else 4096), 128
    q, k, v, dout = (torch.randn(1, seqlen, _HEADS, hdim) for _ in range(4))
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    times = alternate(
        [lambda: fmha_fwd(q, k, v, return_lse=True), lambda: fmha_bwd(dout, q, k, v, out, lse)],
        min_seconds=0.5 if quick else 6.0,
    )
    share = 100 * _BACKWARD_FLOPS * times.ratio(0, 1)
    progress(f"backward alone: {share:.0f} % of forward's GFLOP/s")
    what = f"backward alone, share of forward's GFLOP/s, fp32, seqlen {seqlen}, hdim {hdim}"
    report.at_least(what, share, 80.0, "%")


def _window(report: Report, quick: bool, progress: Progress) -> None:
    seqlen, window = (2048, 64) if quick else (8192, 256)
    q, k, v = (torch.randn(1, seqlen, _HEADS, 64) for _ in range(3))

    def step(left: int) -> _Gradients:
        options: AttentionOptions = {"mask": "causal", "window_size": (left, -1)}
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
        return fmha_bwd(out, q, k, v, out, lse, **options)

    times = alternate([lambda: step(-1), lambda: step(window)], min_seconds=0.0 if quick else 4.0)
    progress(f"window {window} at seqlen {seqlen}: {times.ratio(0, 1):.1f}x")
    what = f"causal window {window} at seqlen {seqlen} over no window, forward and backward"
    report.at_least(what, times.ratio(0, 1), 8.0, "x")


def _accuracy(report: Report, progress: Progress) -> None:
    worst = 0.0
    for dtype, causal in product((*_TOLERANCE, torch.float16), (False, True)):
        q, k, v, dout = (torch.randn(2, 2, 512, 64).to(dtype) for _ in range(4))
        by_head = [x.requires_grad_() for x in (q, k, v)]
        by_query = [x.detach().transpose(1, 2).requires_grad_() for x in by_head]
        exact = [x.detach().double().requires_grad_() for x in by_head]
        reference = torch.autograd.grad(_sdpa(exact, causal), exact, dout.double())
        theirs = torch.autograd.grad(_sdpa(by_head, causal), by_head, dout)
        out = _fmha(by_query, causal)
        ours = torch.autograd.grad(out, by_query, dout.transpose(1, 2))
        for x, y, wanted in zip(ours, theirs, reference, strict=True):
            worst = max(worst, _error(x.transpose(1, 2), wanted) / _error(y, wanted))
    progress(f"error of gradients: at most {worst:.2f}x SDPA's")
    report.at_most("error of gradients over SDPA's in the same dtype, largest", worst, 2.0, "x")


# What is resident before the step stays out of its peak.
_PROCESS = """
import sys, torch
from jitfmha import fmha_fwd
seqlen, heads, hdim, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
def status(name):
    # Not getrusage: a process inherits its largest resident set from the one that started it.
    (line,) = (x for x in open("/proc/self/status") if x.startswith(name + ":"))
    return int(line.split()[1]) << 10
def step(seqlen):
    q, k, v, dout = (
        torch.randn(1, seqlen, heads, hdim, dtype=torch.bfloat16).requires_grad_(i < 3)
        for i in range(4)
    )
    before = status("VmRSS")
    out = fmha_fwd(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    written = sum(x.nbytes for x in (out, *gradients))
    return status("VmHWM") - before - written, written + sum(x.nbytes for x in (q, k, v, dout))
step(64)
print(*step(seqlen))
"""


def _memory(report: Report, quick: bool, threads: int, progress: Progress) -> None:
    if sys.platform != "linux":
        return  # nothing says what is resident
    seqlen, heads, hdim = (4096 if quick else 16384), 4, 128
    process = run_fresh(
        *(_PROCESS, str(seqlen), str(heads), str(hdim), str(threads)),
        failure="the process that measures memory failed",
        timeout=600.0,
    )
    beyond, tensors = map(int, process.stdout.split())
    allowed = 0.05 * tensors / 2**20 + 64
    progress(f"memory at seqlen {seqlen}: {beyond / 2**20:.1f} MiB, allowed are {allowed:.1f}")
    what = f"memory of forward and backward beyond their tensors, bf16, seqlen {seqlen}"
    report.at_most(what, beyond / 2**20, allowed, "MiB")


def _error(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).abs().max() / reference.abs().max()).item()


def _verified(what: str, ours: _Gradients, theirs: list[Tensor]) -> float:
    """The largest difference. Raises ``RuntimeError`` where the results do not belong together."""
    errors = [_error(x, y.double()) for x, y in zip(ours, theirs, strict=True)]
    tolerance = _TOLERANCE[ours[0].dtype]
    if not max(errors) <= tolerance:
        raise RuntimeError(f"{what}: gradients differ from SDPA's by {errors}, over {tolerance}")
    return max((x - y).abs().max().item() for x, y in zip(ours, theirs, strict=True))
