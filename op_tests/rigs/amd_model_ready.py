"""The amd-model suite's rows of kernels that come ready, beside AITER's and beside each other.

AITER's are those of the tree that ``JITFMHA_HSA_DIR`` names; without one, their rows are left out.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from jitfmha.amd.tree import HSA_DIR
from jitfmha.bench.report import Progress, Report
from jitfmha.emulator.profile import LaunchProfile
from jitfmha.problem.arguments import AttentionOptions, Bf16Cvt

from .modelled_call import (
    Kernels,
    ModelledCall,
    check_kernels_of_aiter,
    estimate_of,
)

# Batch, heads of queries and of keys, and seqlen.
_GQA, _MHA = (8, 64, 8, 8192), (2, 24, 24, 16384)
_FORWARD: dict[tuple[str, Bf16Cvt], float] = {
    ("gfx942", "rtne"): 0.80,
    ("gfx942", "rtna"): 0.82,
    ("gfx942", "rtz"): 0.90,
    ("gfx950", "rtne"): 0.95,
}
_OTHER_HDIMS = (192, 128)
# moonmath-ai/amd-kernels, README.md: its own forward kernel with rtz on an MI300X, for _MHA.
_FASTEST_MI300X, _OVER_FASTEST = 11.39e-3, 0.97
# Without a mask workgroups have the same to do.
_SAMPLES = {0: 2, 2: 64}
_BACKWARD_SEQLENS = (4096, 8192)
_BACKWARD_HDIMS = {"gfx942": (64, 128, 192), "gfx950": (128,)}  # that have a bar
_BACKWARD = 1.0
# Deterministic workgroups take their tasks as they begin. So all of a small call are modelled.
_SMALL = (1, 8, 1, 2048)
_EVERY_WORKGROUP = 1 << 16
_DETERMINISTIC_HDIMS, _DETERMINISTIC = {"gfx942": (64, 128, 192), "gfx950": (64, 128)}, 1.25

T = TypeVar("T")


def _call(
    chip: str,
    problem: tuple[int, int, int, int],
    hdims: tuple[int, int],
    mask: int,
    bf16_cvt: Bf16Cvt,
) -> ModelledCall:
    options: AttentionOptions = {"mask": mask, "bf16_cvt": bf16_cvt}
    return ModelledCall(chip, hdims, problem, options, _SAMPLES[mask])


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Model the launches; ``quick`` takes one of each kind."""
    if os.environ.get(HSA_DIR):
        for call, bar in _first_of(_forward_calls(), quick):
            _add_forward_row(report, call, bar, progress)
        for call in _first_of(_backward_calls(), quick):
            _add_backward_row(report, call, progress)
    else:
        report.machine["AITER's kernels"] = f"their rows are left out: {HSA_DIR} is not set"
    for call in _first_of(_deterministic_calls(), quick):
        cycles, default = (_backward_cycles(call, progress, deterministic=x) for x in (True, False))
        what = f"deterministic over default backward cycles, ready kernels, {call}"
        report.at_most(what, cycles / default, _DETERMINISTIC, "x")
    if not quick:
        call = _call("gfx942", _MHA, (128, 128), 0, "rtz")
        what = f"modelled time over the fastest published one on an MI300X, {call}"
        seconds = _forward(call, "own", progress)
        report.at_most(what, seconds / _FASTEST_MI300X, _OVER_FASTEST, "x")


def _forward_calls() -> Iterator[tuple[ModelledCall, float]]:
    for (chip, bf16_cvt), bar in _FORWARD.items():
        for problem, mask in ((_GQA, 0), (_GQA, 2), (_MHA, 0)):
            yield _call(chip, problem, (128, 128), mask, bf16_cvt), bar
    for mask in (0, 2):
        yield _call("gfx950", _GQA, _OTHER_HDIMS, mask, "rtne"), _FORWARD["gfx950", "rtne"]


def _backward_calls() -> Iterator[ModelledCall]:
    for chip, hdims in _BACKWARD_HDIMS.items():
        for hdim in hdims:
            for seqlen in _BACKWARD_SEQLENS:
                for mask in (0, 2):
                    yield _call(chip, (*_GQA[:3], seqlen), (hdim, hdim), mask, "rtne")


def _deterministic_calls() -> Iterator[ModelledCall]:
    for chip, hdims in _DETERMINISTIC_HDIMS.items():
        for hdim in hdims:
            for mask in (0, 2):
                call = _call(chip, _SMALL, (hdim, hdim), mask, "rtne")
                yield replace(call, kernels="ready")


def _first_of(calls: Iterator[T], quick: bool) -> Iterator[T]:
    """All of them, or where it has to be quick the first one."""
    for call in calls:
        yield call
        if quick:
            return


def _add_forward_row(report: Report, call: ModelledCall, bar: float, progress: Progress) -> None:
    try:
        of_aiter = _forward(call, "named", progress)
    except NotImplementedError as error:
        progress(f"{call}: left out, because {error}")
        return
    ratio = _forward(call, "own", progress) / of_aiter
    report.at_most(f"own over AITER's time, {call}", ratio, bar, "x")


def _add_backward_row(report: Report, call: ModelledCall, progress: Progress) -> None:
    """Over the faster one of AITER's, which add dq up in 16 bits or in 32."""
    of_aiter = []
    for atomic_fp32 in (False, True):
        try:
            of_aiter.append(_backward(call, "named", progress, atomic_fp32=atomic_fp32))
        except NotImplementedError as error:
            progress(f"backward, {call}, atomic_fp32={atomic_fp32}: left out, because {error}")
    if of_aiter:
        ratio = _backward(call, "own", progress) / min(of_aiter)
        report.at_most(f"own over AITER's backward time, {call}", ratio, _BACKWARD, "x")


def _forward(call: ModelledCall, kernels: Kernels, progress: Progress) -> float:
    """Seconds that the model gives these kernels."""
    return _seconds(replace(call, kernels=kernels).forward(progress), kernels)


def _backward(
    call: ModelledCall, kernels: Kernels, progress: Progress, *, atomic_fp32: bool | None = None
) -> float:
    """The same of all launches of a backward pass."""
    profiles = replace(call, kernels=kernels).backward(progress, atomic_fp32=atomic_fp32)
    return _seconds(profiles, kernels)


def _backward_cycles(call: ModelledCall, progress: Progress, *, deterministic: bool) -> float:
    """Of our launches together, with what workgroups wait for each other."""
    profiles = replace(call, sample=_EVERY_WORKGROUP).backward(
        progress, deterministic=deterministic
    )
    return sum(estimate_of(profile).cycles for profile in profiles)


def _seconds(profiles: tuple[LaunchProfile, ...], kernels: Kernels) -> float:
    if kernels == "named":
        check_kernels_of_aiter(profiles)
    return sum(estimate_of(profile).seconds for profile in profiles)
