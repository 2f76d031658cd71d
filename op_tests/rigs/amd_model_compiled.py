"""The amd-model suite's rows of kernels that are compiled for a call."""

from dataclasses import replace

import torch

from jitfmha.bench.report import Progress, Report
from jitfmha.emulator.estimate import Estimate
from jitfmha.emulator.profile import LaunchProfile
from jitfmha.problem.arguments import AttentionOptions
from jitfmha.problem.dropout import new_rng_state

from .modelled_call import ModelledCall, add_faults, estimate_of, matrix_busy

_BATCH, _HEADS, _SEQLEN = 4, 32, 4096
_HDIMS = (96, 64, 128, 192, 256)
_READY_HDIMS = (64, 128)  # that ready kernels serve too
_OVER_READY = 1.3
_BUSY = {"gfx942": 50, "gfx950": 45}
_BACKWARD_HDIMS, _BACKWARD_BUSY = (64, 128), 40
_FEATURES_HDIM, _FEATURES_SEQLEN = 96, 2048
_FEATURE = 1.35
_WINDOW, _WINDOW_SEQLEN, _WINDOW_GAIN = 256, 8192, 8.0
_SAMPLE, _QUICK_SAMPLE = 12, 4
_BACKWARD_SAMPLE = 2  # all workgroups have the same to do


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Model the launches; ``quick`` takes a smaller sample of each, and fewer of them."""
    sample = _QUICK_SAMPLE if quick else _SAMPLE
    modelled: list[LaunchProfile] = []

    def estimate(chip: str, hdim: int, seqlen: int, options: AttentionOptions) -> Estimate:
        """Of the launch of a compiled kernel."""
        problem = (_BATCH, _HEADS, _HEADS, seqlen)
        call = ModelledCall(chip, (hdim, hdim), problem, options, sample, kernels="compiled")
        profile = call.forward(progress)[0]
        modelled.append(profile)
        return estimate_of(profile)

    for chip, bar in _BUSY.items():
        for hdim in _HDIMS[:1] if quick else _HDIMS:
            compiled = estimate(chip, hdim, _SEQLEN, {})
            what = f"matrix units busy, compiled kernel, {chip} hdim {hdim}, whole launch"
            report.at_least(what, 100 * compiled.matrix_busy, bar, "%")
            if hdim in _READY_HDIMS:
                problem = (_BATCH, _HEADS, _HEADS, _SEQLEN)
                call = ModelledCall(chip, (hdim, hdim), problem, {}, sample, kernels="ready")
                ready = estimate_of(call.forward(progress)[0])
                what = f"modelled time of the compiled kernel over ready, {chip} hdim {hdim}"
                report.at_most(what, compiled.seconds / ready.seconds, _OVER_READY, "x")
    for chip in _BUSY:
        for hdim in _BACKWARD_HDIMS[:1] if quick else _BACKWARD_HDIMS:
            problem = (_BATCH, _HEADS, _HEADS, _SEQLEN)
            call = ModelledCall(chip, (hdim, hdim), problem, {}, _BACKWARD_SAMPLE)
            profiles = replace(call, kernels="compiled").backward(progress)
            modelled += profiles
            what = f"matrix units busy, compiled backward, {chip} hdim {hdim}, whole launches"
            report.at_least(what, 100 * matrix_busy(profiles), _BACKWARD_BUSY, "%")
    for chip in () if quick else _BUSY:
        plain = estimate(chip, _FEATURES_HDIM, _FEATURES_SEQLEN, {})
        for name, options in _features().items():
            with_feature = estimate(chip, _FEATURES_HDIM, _FEATURES_SEQLEN, options)
            what = f"{name}, time over the plain call's, compiled kernel, {chip}"
            report.at_most(what, with_feature.seconds / plain.seconds, _FEATURE, "x")
        plain = estimate(chip, _FEATURES_HDIM, _WINDOW_SEQLEN, {})
        window: AttentionOptions = {"window_size": (_WINDOW // 2, _WINDOW // 2 - 1)}
        windowed = estimate(chip, _FEATURES_HDIM, _WINDOW_SEQLEN, window)
        what = f"window {_WINDOW} at seqlen {_WINDOW_SEQLEN} over no window, compiled, {chip}"
        report.at_least(what, plain.seconds / windowed.seconds, _WINDOW_GAIN, "x")
    add_faults(report, ", compiled", modelled)


def _features() -> dict[str, AttentionOptions]:
    seqlen = _FEATURES_SEQLEN
    return {
        # Zeros, which no memory is touched for: what they are changes no cost.
        "bias": {"bias": torch.zeros(1, _HEADS, seqlen, seqlen, dtype=torch.bfloat16)},
        "ALiBi": {"alibi_slopes": torch.logspace(-1, -8, _HEADS, base=2)},
        "soft cap": {"logit_softcap": 30.0},
        "dropout": {"dropout_p": 0.1, "rng_state": new_rng_state()},
    }
