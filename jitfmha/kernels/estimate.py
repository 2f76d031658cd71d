"""What a forward launch takes on a chip, estimated for any lengths: what families are chosen by.

    seconds = max(memory, compute + what waves wait for memory) + what combining splits takes

Workgroups take the cycles that ``cycles.csv`` has; rounds of them, on the units of each XCD, make
the cycles of the launch. The clock falls as matrix units are busier: power limits it, so that the
time goes with all cycles and, with another factor, with those of the matrix units. Memory moves q,
k, v and the output once, at the speed at which streaming reads: workgroups that read the same keys
run side by side on an XCD, whose L2 has them, or find them in the Infinity Cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..amd.chips import Arch, Chip, architecture, chip
from ..amd.clock import clock_of
from ..amd.clock_speed import ClockSpeed
from ..amd.manifest import KernelRow
from ..planning.target import AmdTarget
from ..problem.dtypes import BF8_NAMES, FP8_NAMES
from ..problem.mask import Mask
from ..problem.problem import Problem, element_bytes
from .cycles import CyclesOf, Part, kernel_cycles
from .launch_estimate import (
    Band,
    EstimatedCall,
    EstimatedKernel,
    ForwardEstimate,
    KernelCycles,
    Lengths,
    Machine,
    lengths_of_packs,
)


def band_of(mask: Mask) -> Band:
    """What a mask lets queries see."""
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    return Band(mask.top_left, left, right)


def lengths_of(problem: Problem) -> Sequence[Lengths]:
    """How long the sequences of a call may be."""
    queries, keys = (-1 if told is None else told for told in problem.unevenness)
    return lengths_of_packs(problem.packs, queries, keys, problem.seqlen_q, problem.seqlen_k)


def with_speeds(known: Chip) -> Chip:
    """The chip, or one of its architecture whose speeds are published."""
    if known.streaming_gb_s is None or known.peak_clock_mhz is None:
        return chip(known.architecture.unlisted_chip)
    return known


def streaming_of(known: Chip) -> float:
    """Bytes a second that a kernel which only reads gets out of all of a chip's HBM."""
    gb_s = with_speeds(known).streaming_gb_s
    assert gb_s is not None
    return gb_s * 1e9


def clock_speed_of(known: Chip) -> ClockSpeed:
    """What limits a chip's clock."""
    return clock_of(with_speeds(known).name).speed


def machine_of(target: AmdTarget) -> Machine:
    """What decides about times on a GPU."""
    # A partition has its share of the chip's memory.
    share = target.compute_units / target.chip.compute_units
    return Machine(
        target.arch,
        target.compute_units,
        max(round(target.chip.xcds * share), 1),
        architecture(target.arch).xcd_engines,
        streaming_of(target.chip) * share,
        clock_speed_of(target.chip),
    )


def estimated_call(problem: Problem) -> EstimatedCall:
    """What estimates know of calls that differ from a problem in lengths only."""
    bytes_of = element_bytes(problem)
    return EstimatedCall(
        *(problem.batch, problem.heads_q, problem.heads_k, problem.hdim_q, problem.hdim_v),
        *(bytes_of.q, bytes_of.kv, bytes_of.out),
        problem.is_fp8,
        problem.dtype == "fp32",
        problem.mode == "gm1",
        band_of(problem.mask),
        problem.modifiers.sink_size,
        lengths_of(problem),
    )


def forward_estimate(
    problem: Problem,
    target: AmdTarget,
    kernels: CyclesOf,
    row: KernelRow,
    slices: int,
    part: Part = "forward",
    *,
    is_shared: bool = False,
) -> ForwardEstimate:
    """What calls take with a kernel that makes the output in ``slices``; ``row`` describes it.

    The work ``is_shared`` among persistent workgroups, all of which have as much of it.
    """
    kernel = EstimatedKernel(
        slices,
        problem.gqa if row.stacks_heads else 1,
        kernels == "compiled",
        part == "decode",
        is_shared,
    )
    measured = measured_cycles(problem, target.arch, kernels, part, slices)
    return ForwardEstimate.of(machine_of(target), estimated_call(problem), kernel, row, measured)


def measured_cycles(
    problem: Problem, arch: Arch, kernels: CyclesOf, part: Part, slices: int
) -> tuple[KernelCycles, ...]:
    """What was measured of kernels for such calls, by the rows of their workgroups."""
    hdims = problem.hdim_q, -(-problem.hdim_v // slices)
    dtype = measured_dtype(problem.dtype, problem.kv_dtype, part)
    return kernel_cycles(arch, kernels, part, dtype, hdims, not problem.mask.is_none)


def measured_dtype(dtype: str, kv_dtype: str, part: Part) -> str:
    """The data type of which `cycles.csv` has the cycles of such calls, or about the same."""
    fp8 = FP8_NAMES.values()
    if dtype in fp8 or (kv_dtype in fp8 and part == "decode"):
        return "fp8"
    # Products take 16 bits in place of the 8 in memory, as those of integers do.
    is_widened = kv_dtype != dtype and dtype != "fp32"
    return "int8" if is_widened or dtype in BF8_NAMES.values() else dtype
