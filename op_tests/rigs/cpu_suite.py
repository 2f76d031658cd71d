"""The CPU suite: every bar that the CPU kernel and the build cache are held to."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from statistics import geometric_mean, median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jitfmha.bench.report import Comparison, Progress, Report
from jitfmha.bench.timing import TOLERANCE, alternate
from jitfmha.call.detection import target_of
from jitfmha.call.interface import fmha_fwd
from jitfmha.problem.arguments import AttentionOptions, Options
from jitfmha.problem.dropout import new_rng_state
from jitfmha.problem.dtypes import DTYPE_NAMES

from . import cpu_backward, cpu_decode, decode_loop
from .first_call import FirstCall, first_call
from .over_sdpa import compare, time_over_sdpa, verified

_DEFAULT_THREADS = 2
# Of the geometric mean over SDPA. bf16 has a lower one: SDPA's is in tiles where the CPU has them.
_SPEED_BARS = {torch.float32: 1.3, torch.bfloat16: 1.2, torch.float16: 1.3}
_HEADS = 8
_SEED = 20260101


def run(quick: bool, progress: Progress, threads: int = _DEFAULT_THREADS) -> Report:
    """Measure with some threads; ``quick`` leaves out the long problems and repeats less."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(_SEED)
    report = Report("cpu", _machine(quick, threads))
    try:
        with torch.no_grad():
            _dense(report, quick, progress)
            _ragged(report, quick, progress)
            _score_features(report, quick, progress)
            _share_of_mm_peak(report, quick, progress)
            _first_calls(report, quick, threads, progress)
            _small_call(report, quick, progress)
            _decode_loop(report, quick, progress)
            cpu_decode.add_rows(report, quick, progress)
            cpu_backward.add_rows(report, quick, threads, progress)
        # Our own threads are part of it; what is above that competed with them.
        report.machine["load"] = f"{os.getloadavg()[0]:.1f} (1 minute average at the end)"
    finally:
        torch.set_num_threads(threads_before)
    return report


def _machine(quick: bool, threads: int) -> dict[str, str]:
    return {
        "target": str(target_of(torch.device("cpu"))),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(threads),
        "extent": "quick: fewer and shorter problems than the bars mean" if quick else "full",
    }


def _dense(report: Report, quick: bool, progress: Progress) -> None:
    seqlens = (512,) if quick else (512, 2048, 4096)
    cases = list(product(TOLERANCE, (64, 128), seqlens, (False, True)))
    speedups: dict[torch.dtype, list[float]] = {dtype: [] for dtype in _SPEED_BARS}
    for number, (dtype, hdim, seqlen, causal) in enumerate(cases, 1):
        name = f"{DTYPE_NAMES[dtype]} hdim {hdim} seqlen {seqlen} {'causal' if causal else 'full'}"
        sizes, seconds = (1, seqlen, seqlen, _HEADS, _HEADS, hdim), 0.3 if quick else 1.0
        comparison, _ = time_over_sdpa(
            report, name, sizes, dtype, is_causal=causal, min_seconds=seconds
        )
        speedups[dtype].append(comparison.speedup)
        progress(f"[{number}/{len(cases)}] {name}: {comparison.speedup:.2f}x SDPA")
    for dtype, bar in _SPEED_BARS.items():
        of_dtype = speedups[dtype]
        what = f"{DTYPE_NAMES[dtype]} speed over SDPA"
        mean = geometric_mean(of_dtype)
        report.at_least(f"{what}, geometric mean of {len(of_dtype)} cases", mean, bar, "x")
        report.at_least(f"{what}, slowest of {len(of_dtype)}", min(of_dtype), 1.0, "x")
    everything = [speedup for of_dtype in speedups.values() for speedup in of_dtype]
    what = f"speed over SDPA, geometric mean of {len(everything)} cases"
    report.at_least(what, geometric_mean(everything), 1.4, "x")


def ragged_lengths() -> list[int]:
    """Those of the batch of sequences that are timed packed."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(64, 2049, (14,), generator=generator).tolist()
    return [2048, *drawn, 64]


def _ragged(report: Report, quick: bool, progress: Progress) -> None:
    lengths = ragged_lengths()
    kinds = list(product((torch.float32, torch.bfloat16), (64, 128)))
    per_sequence, padded = [], []
    for dtype, hdim in kinds[:1] if quick else kinds:
        name = f"{DTYPE_NAMES[dtype]} hdim {hdim} ragged batch of {len(lengths)}"
        timed = time_ragged(name, lengths, dtype, hdim, min_seconds=0.0 if quick else 4.0)
        report.comparisons.extend(timed)
        per_sequence.append(timed[0].speedup)
        padded.append(timed[1].speedup)
        progress(f"{name}: {per_sequence[-1]:.2f}x SDPA per sequence, {padded[-1]:.2f}x padded")
    among = f"slowest of {len(per_sequence)}"
    report.at_least(f"ragged batch over SDPA per sequence, {among}", min(per_sequence), 1.4, "x")
    report.at_least(f"ragged batch over SDPA on a padded batch, {among}", min(padded), 2.5, "x")


def time_ragged(
    name: str, lengths: list[int], dtype: torch.dtype, hdim: int, min_seconds: float
) -> list[Comparison]:
    """Time packed sequences beside SDPA of one after the other, and beside SDPA of them padded."""
    prefix_sums = list(accumulate(lengths, initial=0))
    spans = list(pairwise(prefix_sums))
    cu_seqlens = torch.tensor(prefix_sums, dtype=torch.int32)
    q, k, v = (torch.randn(prefix_sums[-1], _HEADS, hdim).to(dtype) for _ in range(3))
    # The padded side gets its padded tensors and the mask for nothing.
    shape = (len(lengths), _HEADS, max(lengths), hdim)
    qp, kp, vp = (torch.zeros(shape, dtype=dtype) for _ in range(3))
    seen = torch.zeros(len(lengths), 1, 1, max(lengths), dtype=torch.bool)
    for i, (start, end) in enumerate(spans):
        seen[i, ..., : end - start] = True
        for batch, packed in ((qp, q), (kp, k), (vp, v)):
            batch[i, :, : end - start] = packed[start:end].transpose(0, 1)

    packing: Options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    packing["max_seqlen_q"] = packing["max_seqlen_k"] = max(lengths)

    # Each side returns a new tensor, which is a part of the cost where it is large.
    def ours() -> Tensor:
        return fmha_fwd(q, k, v, **packing)

    def looped() -> Tensor:
        packed_out = torch.empty_like(q)
        for start, end in spans:
            qt, kt, vt = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            packed_out[start:end] = scaled_dot_product_attention(qt, kt, vt)[0].transpose(0, 1)
        return packed_out

    def on_padded() -> Tensor:
        return scaled_dot_product_attention(qp, kp, vp, attn_mask=seen)

    out = ours()
    error = verified(name, out, looped())
    unpadded = torch.cat(
        [x[:, :n].transpose(0, 1) for x, n in zip(on_padded(), lengths, strict=True)]
    )
    padded_error = verified(name, out, unpadded)
    times = alternate([ours, looped, on_padded], min_seconds=min_seconds)
    flops = _flops(sum(length * length for length in lengths), hdim)
    return [
        compare(name, times, flops, error, against="SDPA per sequence"),
        compare(name, times, flops, padded_error, against="SDPA padded", other=2),
    ]


def _score_features(report: Report, quick: bool, progress: Progress) -> None:
    seqlen = 512 if quick else 2048
    rng_state = new_rng_state()
    ratios: dict[str, list[float]] = {}
    for dtype, hdim in product((torch.float32, torch.bfloat16), (64, 128)):
        q, k, v = (torch.randn(1, seqlen, _HEADS, hdim).to(dtype) for _ in range(3))
        features: dict[str, AttentionOptions] = {
            "bias": {"bias": torch.randn(1, _HEADS, seqlen, seqlen).to(dtype)},
            "ALiBi": {"alibi_slopes": torch.logspace(-1, -_HEADS, _HEADS, base=2)},
            "soft cap": {"logit_softcap": 30.0},
            "dropout": {"dropout_p": 0.1, "rng_state": rng_state},
        }

        def attend(
            options: AttentionOptions, q: Tensor = q, k: Tensor = k, v: Tensor = v
        ) -> Tensor:
            return fmha_fwd(q, k, v, **options)

        calls: list[AttentionOptions] = [{}, *features.values()]
        functions = [lambda options=options: attend(options) for options in calls]
        times = alternate(functions, min_seconds=0.0 if quick else 3.0)
        for i, name in enumerate(features, 1):
            ratios.setdefault(name, []).append(times.ratio(i, 0))
    for name, of_kinds in ratios.items():
        progress(f"{name}: at most {max(of_kinds):.2f}x the plain call")
        what = f"{name}, time over the plain call's, slowest of {len(of_kinds)}"
        report.at_most(what, max(of_kinds), 1.35, "x")


def _share_of_mm_peak(report: Report, quick: bool, progress: Progress) -> None:
    seqlen, hdim = 4096, 128
    q, k, v = (torch.randn(1, seqlen, _HEADS, hdim) for _ in range(3))
    sizes = (1024, 2048) if quick else (1024, 2048, 4096)
    factors = [(torch.randn(n, n), torch.randn(n, n)) for n in sizes]
    functions: list[Callable[[], object]] = [lambda: fmha_fwd(q, k, v)]
    functions += [lambda a=a, b=b: torch.mm(a, b) for a, b in factors]  # type: ignore[misc]
    times = alternate(functions, min_seconds=0.0 if quick else 8.0)
    # A peak that a busy machine hid would flatter the share, so torch.mm gets more tries alone.
    alone = alternate(functions[1:], min_seconds=0.5 if quick else 4.0)
    peak = max(2 * n**3 / min(times.best(i + 1), alone.best(i)) for i, n in enumerate(sizes))
    reached = _flops(seqlen * seqlen, hdim) / times.best(0)
    progress(f"fp32 torch.mm peak {peak / 1e9:.0f} GFLOP/s, attention {reached / 1e9:.0f} GFLOP/s")
    what = f"share of the float32 torch.mm peak ({peak / 1e9:.0f} GFLOP/s), seqlen 4096, hdim 128"
    report.at_least(what, 100 * reached / peak, 75.0, "%")


def _first_calls(report: Report, quick: bool, threads: int, progress: Progress) -> None:
    kinds = [("float32", "gm0"), ("bfloat16", "gm1"), ("float16", "gm0"), ("bfloat16", "gm0")]
    cold: list[FirstCall] = []
    warm: list[FirstCall] = []
    for dtype, mode in kinds[-1:] if quick else kinds:
        with tempfile.TemporaryDirectory(prefix="jitfmha-bench-") as cache_dir:
            cold.append(first_call(cache_dir, dtype=dtype, mode=mode, threads=threads))  # type: ignore[arg-type]
            progress(f"first call, empty cache, {dtype} {mode}: {cold[-1].call_seconds:.2f} s")
            warm += [
                first_call(cache_dir, dtype=dtype, mode=mode, threads=threads)  # type: ignore[arg-type]
                for _ in range(2)
            ]
    slowest = max(process.call_seconds for process in cold)
    first = median(process.call_seconds for process in warm)
    imported = median(process.import_seconds for process in warm)
    progress(f"first call, full cache, {len(warm)} processes: {first * 1e3:.1f} ms")
    kind = f"slowest of {len(cold)}"
    report.at_most(f"first call with an empty cache, {kind}", slowest, 4.0, "s")
    kind = f"median of {len(warm)}"
    report.at_most(f"first call of a process with a full cache, {kind}", 1e3 * first, 60.0, "ms")
    report.at_most(f"import jitfmha after import torch, {kind}", 1e3 * imported, 30.0, "ms")


def _small_call(report: Report, quick: bool, progress: Progress) -> None:
    name, seconds = "fp32 (1, 1, 16, 64)", 0.5 if quick else 3.0
    timed, times = time_over_sdpa(
        *(report, name, (1, 16, 16, 1, 1, 64), torch.float32),
        min_seconds=seconds,
        min_rounds=3,
        calls=1000,
    )
    progress(f"{name}: {timed.seconds * 1e6:.2f} us, SDPA {timed.against_seconds * 1e6:.2f} us")
    report.at_most("steady call on (1, 1, 16, 64), time over SDPA's", times.ratio(0, 1), 1.0, "x")


def _decode_loop(report: Report, quick: bool, progress: Progress) -> None:
    q, k, v = decode_loop.tensors(torch.float32, heads=2, hdim=64)
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(qt, kt, vt).transpose(1, 2)
    verified("the longest step of a decode loop", fmha_fwd(q, k, v), expected)
    seconds = 0.5 if quick else 3.0
    decode_loop.add_row(report, "CPU, (1,1,2,64)", (q, k, v), seconds, progress)


def _flops(pairs: int, hdim: int) -> int:
    """Two products of two operations for each (query, key) pair that the mask leaves."""
    return 4 * _HEADS * pairs * hdim
