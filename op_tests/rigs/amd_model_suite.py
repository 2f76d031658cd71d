"""The amd-model suite: AMD kernels by the emulator's cost model, and the launcher's cost.

Calls of `fmha_fwd` go the whole way to the emulator, which counts and times a sample of their
workgroups. Figures are the model's; `python -m jitfmha profile` prints what it assumes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

import torch

from jitfmha.amd import chips
from jitfmha.bench.report import Progress, Report
from jitfmha.emulator import DEVICES
from jitfmha.emulator.profile import LaunchProfile
from jitfmha.problem.arguments import AttentionOptions, Bf16Cvt
from jitfmha.problem.dtypes import FP8_NAMES
from jitfmha.problem.problem import BF16_CVTS

from . import (
    amd_model_choice,
    amd_model_compiled,
    amd_model_decode,
    amd_model_latent,
    amd_model_paged,
    amd_model_ragged,
    amd_model_ready,
    launcher_suite,
)
from .amd_model_order import GroupLaunch, in_flight, workgroups_in_order
from .modelled_call import ModelledCall, add_faults, estimate_of

# A launch of seven rounds on an MI300X: 2048 workgroups without a mask.
_BATCH, _HEADS, _SEQLEN, _HDIM = 4, 32, 4096, 128
# A causal launch has workgroups of 16 sizes: enough that those between are not guessed.
_SAMPLE = 80
_QUICK_SAMPLE = 4
# The bars' unit of work: 32 queries and 64 keys of one wave.
_QUERIES, _KEYS = 32, 64
_MATRIX_CYCLES = 2048
_VALU_CYCLES: dict[Bf16Cvt, int] = {"rtne": 2024, "rtna": 1900, "rtz": 1700}
_BUSY: dict[tuple[str, Bf16Cvt], int] = {
    ("gfx942", "rtz"): 75,
    ("gfx942", "rtne"): 65,
    ("gfx950", "rtne"): 60,
}
_CAUSAL = 0.56
# fp8 inputs over bf16 ones.
_FP8_OVER_BF16 = 0.7
# Of gm1: rows of a workgroup, which has a compute unit to itself; key heads where several query
# heads share one; pairs of a sequence and key head in flight, by the key heads.
_TILE_ROWS, _KEY_HEADS = 256, 8
_PAIRS = {_KEY_HEADS: 2.0, _HEADS: 8.0}


def run(quick: bool, progress: Progress) -> Report:
    """Model the launches; ``quick`` takes a smaller sample of each and fewer kernels."""
    report = Report(
        "amd-model",
        {
            "launch": f"batch {_BATCH}, heads {_HEADS}, seqlen {_SEQLEN}, hdim {_HDIM}, bf16",
            "extent": "quick: a smaller sample" if quick else "full",
        },
    )
    sample = _QUICK_SAMPLE if quick else _SAMPLE
    kinds: list[tuple[str, Bf16Cvt]] = [("gfx942", cvt) for cvt in BF16_CVTS]
    large = {
        (chip, cvt, mask): _large_call(chip, mask, sample, cvt).forward(progress)[0]
        for chip, cvt in [*kinds, ("gfx950", "rtne")]
        for mask in (0, 2)
    }
    _cycles(report, large)
    for (chip, cvt), bar in _BUSY.items():
        busy = 100 * estimate_of(large[chip, cvt, 0]).matrix_busy
        report.at_least(f"matrix units busy, {chip} {cvt}, whole launch", busy, bar, "%")
    for chip, cvt in _BUSY:
        plain, causal = (estimate_of(large[chip, cvt, mask]).seconds for mask in (0, 2))
        report.at_most(f"causal over unmasked time, {chip} {cvt}", causal / plain, _CAUSAL, "x")
    _fp8_over_bf16(report, large, sample, progress)
    _pairs_in_flight(report)
    _main_loops(report, quick, progress)
    amd_model_ready.add_rows(report, quick, progress)
    amd_model_compiled.add_rows(report, quick, progress)
    amd_model_decode.add_rows(report, quick, progress)
    amd_model_paged.add_rows(report, quick, progress)
    amd_model_latent.add_rows(report, quick, progress)
    amd_model_ragged.add_rows(report, quick, progress)
    amd_model_choice.add_rows(report, quick, progress)
    report.rows += launcher_suite.run(quick, progress).rows
    return report


def _fp8_over_bf16(
    report: Report,
    large: Mapping[tuple[str, Bf16Cvt, int], LaunchProfile],
    sample: int,
    progress: Progress,
) -> None:
    """The same launches with 8-bit inputs, by time."""
    for arch in get_args(chips.Arch):
        for mask in (0, 2):
            call = replace(_large_call(arch, mask, sample), dtype=_fp8_of(arch))
            (profile,) = call.forward(progress)
            seconds, of_bf16 = (
                estimate_of(x).seconds for x in (profile, large[arch, "rtne", mask])
            )
            what = f"fp8 over bf16 time, {arch} rtne, {'causal' if mask else 'no mask'}"
            report.at_most(what, seconds / of_bf16, _FP8_OVER_BF16, "x")


def _fp8_of(chip: str) -> torch.dtype:
    """The form of e4m3 that the chip's matrix units take."""
    arch = chip.partition("-")[0]
    assert chips.is_arch(arch)
    fp8 = chips.architecture(arch).fp8_dtype
    return next(dtype for dtype, name in FP8_NAMES.items() if name == fp8)


def _pairs_in_flight(report: Report) -> None:
    """What shares an XCD's L2 cache in gm1: as few sequences and key heads as fill its units."""
    device = chips.chip("MI300X")
    lengths = [(_SEQLEN, _SEQLEN)] * _BATCH
    for heads_k in (_KEY_HEADS, _HEADS):
        launch = GroupLaunch(
            *(lengths, _HEADS, heads_k, _TILE_ROWS, True, device.xcds, device.compute_units)
        )
        pairs = in_flight(launch, workgroups_in_order(launch)).mean_pairs
        what = (
            f"sequences and key heads that an XCD is at work on, gm1, {heads_k} key heads, causal"
        )
        report.at_most(what, pairs, _PAIRS[heads_k], "on average")


def _cycles(report: Report, large: dict[tuple[str, Bf16Cvt, int], LaunchProfile]) -> None:
    """Cycles of one wave for 32 queries and 64 keys: of an iteration, which is just that."""
    for cvt in BF16_CVTS:
        loop = max(large["gfx942", cvt, 0].main_loops, key=lambda loop: loop.work.matrix)
        # A product of 32 x 32 x 8 takes 32 cycles, and both of attention's products are as large.
        products = 2 * (_QUERIES * _KEYS * _HDIM) // (32 * 32 * 8)
        of_unit = products / loop.work.matrix * loop.iterations
        for what, cycles, bar in (
            ("MFMA", loop.matrix_cycles, _MATRIX_CYCLES),
            ("VALU", loop.valu_cycles, _VALU_CYCLES[cvt]),
        ):
            where = f"one wave, {_QUERIES} queries x {_KEYS} keys, gfx942 {cvt}"
            report.at_most(f"{what} cycles, {where}", cycles * of_unit, bar, "cycles")


def _main_loops(report: Report, quick: bool, progress: Progress) -> None:
    """What must not be in any main loop, of each kind of kernel."""
    calls = (replace(call, problem=(1, 2, 2, 1024), kernels="ready") for call in _kernels(quick))
    add_faults(report, ", ready", [profile for call in calls for profile in call.forward(progress)])


def _kernels(quick: bool) -> Iterator[ModelledCall]:
    kinds = (
        *((torch.bfloat16, hdims) for hdims in ((128, 128), (64, 64), (192, 128))),
        *((torch.float16, hdims) for hdims in ((128, 128), (64, 64))),
    )
    for chip in DEVICES:
        of_chip = kinds[:1] if quick else (*kinds, (_fp8_of(chip), (128, 128)))
        for dtype, hdims in of_chip:
            for mask in (0, 2):
                yield replace(_large_call(chip, mask, None), dtype=dtype, hdims=hdims)


def _large_call(
    chip: str, mask: int, sample: int | None, bf16_cvt: Bf16Cvt = "rtne"
) -> ModelledCall:
    options: AttentionOptions = {"mask": mask, "bf16_cvt": bf16_cvt}
    problem = (_BATCH, _HEADS, _HEADS, _SEQLEN)
    return ModelledCall(chip, (_HDIM, _HDIM), problem, options, sample)
