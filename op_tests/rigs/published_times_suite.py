"""The published-times suite: what others measured, over what the cost model says of their kernels.

Calls run AITER's code objects, of the tree that ``JITFMHA_HSA_DIR`` names, on the emulator. Half of
one source is what the model's constants are fitted to (``emulator/rates.json``); bars are for the
other points.
"""

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jitfmha.amd.tree import HSA_DIR
from jitfmha.bench.report import Progress, Report, SuiteNotAvailable
from jitfmha.emulator.profile import LaunchProfile
from jitfmha.kernels.ready.key_split import LAUNCH_GAP_SECONDS
from jitfmha.problem.arguments import AttentionOptions, Bf16Cvt
from jitfmha.problem.problem import BF16_CVTS

from . import published_decode
from .modelled_call import ModelledCall, check_kernels_of_aiter, estimate_of

_FILE = Path(__file__).with_name("published_times.json")
_KINDS = {"forward": None, "backward, 16-bit sums": False, "backward, 32-bit sums": True}
_CHIPS = {"MI300X": "gfx942", "MI355X": "gfx950"}  # the emulator's devices
# Which corner the diagonal starts or ends in makes no difference where seqlens are alike, but to
# which kernels there are.
_CAUSAL, _CAUSAL_BACKWARD = 2, {"MI300X": 1, "MI355X": 2}
# Rows of queries that a modelled call has at most; longer launches are like it.
_ROWS = 1 << 18
_MEAN, _SPREAD = 5.0, 10.0
_DECODE_MEAN = 10.0
_QUICK_SEQLEN = 2048


@dataclass(frozen=True)
class Point:
    """One published figure.

    Attributes:
        source: where it stands.
        what: which kernels.
        chip: that they ran on, as "MI300X".
        batch, heads_q, heads_k, seqlen: of the problem.
        hdims: of q and k, and of v.
        is_causal: whether there is a mask.
        bf16_cvt: how bf16 is rounded, on chips where kernels differ in it.
        seconds: measured.
        is_fitted: the model's constants were fitted to it.
        atomic_fp32: of backward: whether dq is added up in float32; None: forward.
    """

    source: str
    what: str
    chip: str
    batch: int
    heads_q: int
    heads_k: int
    seqlen: int
    hdims: tuple[int, int]
    is_causal: bool
    bf16_cvt: Bf16Cvt
    seconds: float
    is_fitted: bool
    atomic_fp32: bool | None = None

    def __str__(self) -> str:
        heads = f"{self.heads_q}/{self.heads_k}"
        mask = "causal" if self.is_causal else "no mask"
        shape = f"({self.batch}, {heads}, {self.seqlen}) {self.hdims[0]}x{self.hdims[1]}"
        return f"{self.source}, {self.chip} {self.what} {self.bf16_cvt}, {shape}, {mask}"


def points() -> tuple[Point, ...]:
    """All published figures; of AITER's table every second line is fitted to, the first too."""
    file = json.loads(_FILE.read_text(encoding="utf-8"))
    return (
        *_aiter_readme(file["aiter_readme"]["rows"]),
        *_moonmath(file["moonmath"]["rows"]),
        *_aiter_192x128(file["aiter_192x128"]["rows"]),
    )


def _aiter_readme(rows: list[list[Any]]) -> Iterator[Point]:
    for line, (batch, heads_q, heads_k, seqlen, is_causal, *figures) in enumerate(rows):
        flop = 4 * batch * heads_q * seqlen**2 * 128 / (1 + is_causal)
        of_kinds = zip(figures[::2], figures[1::2], strict=True)
        for (what, atomic_fp32), of_chips in zip(_KINDS.items(), of_kinds, strict=True):
            flop_of_kind = flop if atomic_fp32 is None else 2.5 * flop
            for chip, figure in zip(_CHIPS, of_chips, strict=True):
                yield Point(
                    *("AITER's README", what, chip, batch, heads_q, heads_k, seqlen, (128, 128)),
                    *(bool(is_causal), "rtz", flop_of_kind / (figure * 1e12), line % 2 == 0),
                    atomic_fp32,
                )


def _moonmath(rows: list[list[Any]]) -> Iterator[Point]:
    for batch, heads, seqlen, *figures in rows:
        for bf16_cvt, milliseconds in zip(BF16_CVTS, figures, strict=True):
            yield Point(
                *("moonmath-ai", "forward", "MI300X", batch, heads, heads, seqlen, (128, 128)),
                *(False, bf16_cvt, milliseconds / 1e3, False),
            )


def _aiter_192x128(rows: list[list[Any]]) -> Iterator[Point]:
    hdims = 192, 128
    for batch, heads_q, heads_k, seqlen, *figures in rows:
        for is_causal, figure in zip((False, True), figures, strict=True):
            flop = 2 * batch * heads_q * seqlen**2 * sum(hdims) / (1 + is_causal)
            source = "AITER's pull request 3390"
            yield Point(
                *(source, "forward", "MI355X", batch, heads_q, heads_k, seqlen, hdims),
                *(is_causal, "rtne", flop / (figure * 1e12), False),
            )


def run(quick: bool, progress: Progress) -> Report:
    """Model all points; ``quick`` takes those with short sequences.

    Raises:
        SuiteNotAvailable: ``JITFMHA_HSA_DIR`` is not set.
    """
    tree = os.environ.get(HSA_DIR, "")
    if not tree:
        raise SuiteNotAvailable(
            f"{HSA_DIR} is not set; it has to name AITER's tree of code objects, whose times are "
            "published"
        )
    report = Report(
        "published-times",
        {HSA_DIR: tree, "extent": "quick: only short sequences" if quick else "full"},
    )
    ratios: dict[tuple[str, str, bool], list[float]] = {}
    left_out = 0
    for point in points():
        if quick and point.seqlen > _QUICK_SEQLEN:
            continue
        try:
            ratio = modelled_seconds(point) / point.seconds
        except NotImplementedError as error:
            progress(f"{point}: left out, because {error}")
            left_out += 1
            continue
        progress(f"{point}{', fitted' if point.is_fitted else ''}: {ratio:.3f}")
        ratios.setdefault((point.source, point.chip, point.is_fitted), []).append(ratio)
    report.machine["left out"] = f"{left_out} points whose kernels are refused"
    _add_decode_row(report, Path(tree), progress)
    for (source, chip, is_fitted), of_group in sorted(ratios.items()):
        mean = statistics.fmean(of_group)
        spread = 100 * statistics.pstdev(of_group)
        what = f"{source}, {chip}, {len(of_group)} points"
        if is_fitted:
            report.machine[f"{what} that are fitted"] = f"{mean:.3f}, spread {spread:.1f} %"
            continue
        off = f"mean of modelled over published time less 1, {what} that are not fitted"
        report.at_most(off, 100 * abs(mean - 1), _MEAN, "%")
        report.at_most(f"spread of modelled over published time, {what}", spread, _SPREAD, "%")
    return report


def _add_decode_row(report: Report, tree: Path, progress: Progress) -> None:
    ratios = []
    for point in published_decode.points():
        try:
            ratios.append(published_decode.modelled_seconds(point, tree) / point.seconds)
        except FileNotFoundError as error:
            progress(f"{point}: left out, because {error}")
            continue
        progress(f"{point}: {ratios[-1]:.3f}")
    if ratios:
        what = f"AITER's decode, {len(ratios)} points"
        mean, spread = statistics.fmean(ratios), 100 * statistics.pstdev(ratios)
        off = f"mean of modelled over published time less 1, {what} that are not fitted"
        report.at_most(off, 100 * abs(mean - 1), _DECODE_MEAN, "%")
        report.machine[f"spread of {what}"] = f"{spread:.1f} %"


def modelled_seconds(point: Point) -> float:
    """Of all launches of the call, each with the gap before it.

    Raises:
        NotServedError: the tree's kernel is missing, or refused because of a known fault.
    """
    heads_of_group = point.heads_q // point.heads_k
    groups = point.batch * point.heads_k
    modelled_groups = min(groups, max(1, _ROWS // (heads_of_group * point.seqlen)))
    profiles = _profiles(
        point.chip,
        point.hdims,
        (modelled_groups * heads_of_group, modelled_groups),
        point.seqlen,
        point.is_causal,
        point.bf16_cvt,
        point.atomic_fp32,
    )
    check_kernels_of_aiter(profiles)
    # What was measured are calls that follow one another on a stream, from event to event.
    return sum(
        LAUNCH_GAP_SECONDS
        + estimate_of(
            replace(profile, workgroups=profile.launched_workgroups * groups // modelled_groups)
        ).seconds
        for profile in profiles
    )


@cache
def _profiles(
    chip: str,
    hdims: tuple[int, int],
    heads: tuple[int, int],
    seqlen: int,
    is_causal: bool,
    bf16_cvt: Bf16Cvt,
    atomic_fp32: bool | None,
) -> tuple[LaunchProfile, ...]:
    """Of a call with one sequence and ``heads`` of queries and keys: others do the same.

    Workgroups of one launch are alike, so that one of them is enough.
    """
    is_forward = atomic_fp32 is None
    causal = _CAUSAL if is_forward else _CAUSAL_BACKWARD[chip]
    options: AttentionOptions = {"bf16_cvt": bf16_cvt, "mask": causal if is_causal else 0}
    problem = (1, *heads, seqlen)
    call = ModelledCall(_CHIPS[chip], hdims, problem, options, 1, kernels="named")
    return call.forward(_ignore) if is_forward else call.backward(_ignore, atomic_fp32=atomic_fp32)


def _ignore(_: str) -> None:
    """Profiles of a group are no result of their own."""
