"""Whole launches: put together from timed workgroups, and from a sample of them."""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jitfmha
from jitfmha.amd import chips
from jitfmha.amd.clock import Clock
from jitfmha.emulator import DEVICES, Emulator
from jitfmha.emulator.estimate import Estimate, TimedWorkgroup, Timing, estimate_launch
from jitfmha.emulator.profile import LaunchProfile, profile_launch
from jitfmha.emulator.rates import ChipRates, rates_of_chip
from jitfmha.jit.toolchain.device_compiler import compile_hip

_PACKAGE = Path(jitfmha.__file__).parent
_SOURCED = (_PACKAGE / "emulator" / "rates.json", _PACKAGE / "amd" / "clocks.json")
_UNITS, _XCDS, _ENGINES, _CLOCK = 304, 8, 4, 2.1e9
# A cycle takes 0.34 ns, and 0.31 more where matrix units work all the time.
_CHIP = ChipRates(
    Clock(_CLOCK, ((0.5, 2.0e9), (0.9, 1.6e9)), activity=1.0, measured_on="none"),
    streaming=4e12,
    scatter=0.07,
)


def _estimate(
    grid: tuple[int, int, int],
    cycles: Callable[[int, int, int], int],
    *,
    sample: list[int] | None = None,
    xcds: int = _XCDS,
    workgroups_per_unit: int = 1,
    workgroups: int | None = None,
    matrix_busy: float = 0.5,
    memory_bytes: float = 0,
    lines_at_ends: float = 0,
) -> Estimate:
    total = grid[0] * grid[1] * grid[2]
    timed = []
    for number in range(total) if sample is None else sample:
        x, y, z = number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])
        measured = (workgroups_per_unit, cycles(x, y, z), matrix_busy)
        timing = Timing(*measured, 0.25, 0.0, 0.0, 0.0, lines_at_ends, {})
        timed.append(TimedWorkgroup(number, (x, y, z), 1000, timing, ""))
    estimate = estimate_launch(
        timed,
        grid=grid,
        workgroups=workgroups or total,
        compute_units=_UNITS,
        xcds=xcds,
        xcd_engines=_ENGINES,
        workgroups_per_unit=workgroups_per_unit,
        chip=_CHIP,
        line_bytes=128,
        memory_bytes=memory_bytes,
    )
    assert estimate is not None
    return estimate


def test_equal_workgroups_run_in_rounds():
    for workgroups, rounds in ((1, 1), (304, 1), (305, 2), (912, 3)):
        estimate = _estimate((workgroups, 1, 1), lambda x, y, z: 1000)
        assert (estimate.workgroups, estimate.rounds) == (workgroups, rounds)
        assert estimate.cycles == 1000 * rounds
        assert estimate.seconds == pytest.approx(1000 * rounds / estimate.clock)
        # Each keeps half of its unit's matrix units busy.
        assert estimate.matrix_busy == pytest.approx(0.5 * workgroups / (304 * rounds))
        assert estimate.vector_busy == pytest.approx(0.25 * workgroups / (304 * rounds))


def test_the_clock_falls_with_matrix_work():
    def clock_of_busy(busy: float) -> float:
        estimate = _estimate((304, 1, 1), lambda x, y, z: 1000, matrix_busy=busy)
        assert estimate.cycles == 1000
        assert estimate.seconds == pytest.approx(1000 / estimate.clock)
        return estimate.clock

    assert clock_of_busy(0.5) == pytest.approx(2.0e9)
    assert 1 / clock_of_busy(0.7) == pytest.approx((1 / 2.0e9 + 1 / 1.6e9) / 2)
    assert 1 / clock_of_busy(1.0) == pytest.approx(0.65625e-9)
    # Where power does not limit it, the chip runs at its peak.
    assert clock_of_busy(0.1) == clock_of_busy(0.0) == _CLOCK


def test_an_idle_part_of_the_chip_lets_the_rest_run_faster():
    full, quarter = (
        _estimate((units, 1, 1), lambda x, y, z: 1000, matrix_busy=0.9) for units in (304, 76)
    )
    assert full.cycles == quarter.cycles
    assert (full.clock, quarter.clock) == (pytest.approx(1.6e9), _CLOCK)


def test_what_hbm_moves_beside_no_matrix_work_takes_time_of_its_own():
    without, with_ends = (
        _estimate((304, 1, 1), lambda x, y, z: 1000, lines_at_ends=lines) for lines in (0, 100)
    )
    assert with_ends.ends_seconds == pytest.approx(304 * 100 * 128 / 4e12)
    assert with_ends.seconds == pytest.approx(without.seconds + with_ends.ends_seconds)
    assert (with_ends.cycles, with_ends.clock) == (without.cycles, without.clock)


def test_a_launch_takes_at_least_as_long_as_hbm_does():
    without, hidden, bound = (
        _estimate((304, 1, 1), lambda x, y, z: 1000, memory_bytes=size) for size in (0, 4e5, 4e7)
    )
    assert hidden.memory_seconds == pytest.approx(1e-7)
    assert hidden.seconds == without.seconds
    assert bound.seconds == bound.memory_seconds == pytest.approx(1e-5)
    assert without.cycles == hidden.cycles == bound.cycles


def test_an_estimate_says_how_uncertain_it_is():
    assert _estimate((1, 1, 1), lambda x, y, z: 1000).uncertainty == 0.07


@pytest.mark.parametrize("chip", chips.chips(), ids=str)
def test_every_chip_with_a_clock_has_rates(chip):
    if chip.peak_clock_mhz is None:
        with pytest.raises(ValueError, match=f"{chip} has no modelled times"):
            rates_of_chip(chip.name)
        return
    rates = rates_of_chip(chip.name)
    clock = rates.clock
    assert clock.at(0.0) == pytest.approx(clock.peak) == chip.peak_clock_mhz * 1e6
    assert clock.at(1.0) < clock.at(0.7) < clock.peak
    assert 0 < rates.scatter < 0.2
    # A busier chip gets more matrix work done.
    work = [busy / 20 * clock.at(busy / 20) for busy in range(21)]
    assert work == sorted(set(work))
    more = replace(clock, activity=2 * clock.activity)
    assert more.at(0.4) == pytest.approx(clock.at(0.8))
    assert rates.streaming == chip.streaming_gb_s * 1e9


@pytest.mark.parametrize("file", _SOURCED, ids=lambda path: path.name)
def test_each_rate_has_a_source(file):
    file = json.loads(file.read_text(encoding="utf-8"))
    sourced = {name for names in file["sources"] for name in names.split(", ")}
    kinds = file.keys() - {"sources"}
    assert sourced == {name for kind in kinds for each in file[kind].values() for name in each}


def test_workgroups_that_share_a_unit_share_its_work():
    estimate = _estimate((1216, 1, 1), lambda x, y, z: 1000, workgroups_per_unit=2)
    assert (estimate.rounds, estimate.cycles) == (2, 2000)
    assert estimate.matrix_busy == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("workgroups", "cycles", "xcds", "least", "most"),
    [
        # The long ones first: the short ones fill up. The long ones last: everybody waits for them.
        (608, lambda x: 1000 if x < 304 else 500, 8, 1500, 1500),
        (912, lambda x: 3000 if x >= 608 else 1000, 8, 5000, 5000),
        # A unit that is free takes the next one: two rounds of 900 cycles would be 1800.
        (608, lambda x: 900 if x // 32 % 2 else 100, 8, 1000, 1799),
        # All long ones are the first chiplet's: its 38 units need two rounds of them.
        (608, lambda x: 1000 if x % 8 == 0 else 10, 8, 2000, 2000),
        # Of four chiplets each has twice as many units for them, of every engine.
        (608, lambda x: 1000 if x % 32 in (0, 4, 8, 12) else 10, 4, 1001, 1999),
        # All long ones are one engine's: of its ten units each has one, of nine one has two.
        (304, lambda x: 1000 if x // 8 % 4 == 0 else 10, 8, 1000, 1000),
        (608, lambda x: 1000 if x // 8 % 38 % 4 == 0 else 10, 8, 2000, 2000),
        (608, lambda x: 1000 if x // 8 % 38 % 4 == 0 and x < 304 else 10, 8, 1010, 1010),
    ],
)
def test_the_order_of_the_launch_and_chiplets_count(workgroups, cycles, xcds, least, most):
    estimate = _estimate((workgroups, 1, 1), lambda x, y, z: cycles(x), xcds=xcds)
    assert least <= estimate.cycles <= most


def _sample_of(profiler: Emulator, grid: tuple[int, int, int], most: int) -> list[int]:
    """The numbers that the emulator would time."""
    source = 'extern "C" __global__ void nothing() {}'
    module = profiler.load_module(compile_hip(source, "gfx942"), DEVICES["gfx942"])
    function = profiler.function(module, "nothing")
    taken = profile_launch(
        profiler, function, grid, (64, 1, 1), b"", sample=most, run_sample_only=True
    )
    profiler.unload_module(module)
    return [timed.number for timed in taken.timed]


@pytest.mark.parametrize("grid", [(16, 64, 1), (64, 24, 2), (8, 3, 50), (5000, 1, 1)])
def test_a_sample_predicts_what_the_place_decides(profiler, grid):
    def causal(x: int, y: int, z: int) -> int:
        return 2000 + 300 * x + 10 * z

    sample = _sample_of(profiler, grid, 32)
    assert len(sample) == 32
    assert sample == sorted(set(sample))
    estimate = _estimate(grid, causal, sample=sample)
    whole = _estimate(grid, causal)
    assert estimate.cycles == pytest.approx(whole.cycles, rel=1e-6)
    assert estimate.matrix_busy == pytest.approx(whole.matrix_busy, rel=1e-6)
    assert "predicted from their place" in estimate.basis
    assert "off by 0.0%" in estimate.basis


@pytest.mark.parametrize("grid", [(16, 49, 1), (8, 129, 1), (4, 65, 2)])
def test_every_second_workgroup_of_a_line_may_take_less(profiler, grid):
    def in_part(x: int, y: int, z: int) -> int:
        return 1000 + 150 * (y % 2)

    sample = _sample_of(profiler, grid, 32)
    estimate, whole = _estimate(grid, in_part, sample=sample), _estimate(grid, in_part)
    assert "predicted from their place" in estimate.basis
    # Of a line that meets even ones alone, all would count as 1000.
    assert estimate.matrix_busy * estimate.cycles == pytest.approx(
        whole.matrix_busy * whole.cycles, rel=0.03
    )


def test_a_sample_stands_for_all_where_the_place_says_nothing(profiler, seed):
    grid = (50, 40, 5)
    numbers = random.Random(seed)
    cycles = {n: numbers.choice([1000, 3000]) for n in range(10_000)}

    def of_place(x: int, y: int, z: int) -> int:
        return cycles[x + 50 * (y + 40 * z)]

    sample = _sample_of(profiler, grid, 64)
    estimate = _estimate(grid, of_place, sample=sample)
    assert "does not say what they take" in estimate.basis
    assert estimate.cycles == pytest.approx(_estimate(grid, of_place).cycles, rel=0.4)


def test_assumed_workgroups_are_like_the_launched_ones():
    estimate = _estimate((4, 1, 1), lambda x, y, z: 1000, workgroups=3040)
    assert (estimate.workgroups, estimate.cycles) == (3040, 10_000)
    assert "stand for all" in estimate.basis


# ---- A kernel ------------------------------------------------------------------------------------

# Query tile x of a causal mask sees x + 1 key tiles.
_CAUSAL = """
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))
void causal(float* out) {
  const int tile = __builtin_amdgcn_workgroup_id_x();
  f32x16 sums = {};
  f16x4 a = {(_Float16)__builtin_amdgcn_workitem_id_x()};
  for (int i = 0; i <= tile; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      sums = __builtin_amdgcn_mfma_f32_32x32x8f16(a, a, sums, 0, 0, 0);
    asm volatile("" : "+v"(a));
  }
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += sums[i];
  const int workgroup = tile + 40 * __builtin_amdgcn_workgroup_id_y();
  out[256 * workgroup + __builtin_amdgcn_workitem_id_x()] = sum;
}
"""


def _causal(profiler: Emulator, arch: str, *, sample: int, run_sample_only: bool) -> LaunchProfile:
    out = np.zeros(256 * 40 * 12, np.float32)
    module = profiler.load_module(compile_hip(_CAUSAL, arch), DEVICES[arch])
    try:
        return profile_launch(
            profiler,
            profiler.function(module, "causal"),
            (40, 12, 1),
            (256, 1, 1),
            struct.pack("<Q", out.ctypes.data),
            memory=[(out.ctypes.data, out.nbytes)],
            sample=sample,
            run_sample_only=run_sample_only,
            looked_at=39,
        )
    finally:
        profiler.unload_module(module)


def test_a_causal_kernel_by_a_sample(profiler, arch):
    whole = _causal(profiler, arch, sample=1000, run_sample_only=False)
    part = _causal(profiler, arch, sample=24, run_sample_only=True)
    assert (whole.selected_workgroups, part.selected_workgroups) == (480, 24)
    assert (whole.ended_workgroups, part.ended_workgroups) == (480, 24)
    (loop,), (loop_of_part,) = whole.main_loops, part.main_loops
    # Exact, whatever ran: 8 products of 8 passes of 4 cycles.
    assert loop.matrix_cycles == loop_of_part.matrix_cycles == 256
    assert loop.valu_cycles == loop_of_part.valu_cycles
    assert loop.work.scratch_bytes == loop.work.lds_conflict_cycles == 0
    assert loop.iterations == 12 * 4 * sum(range(1, 41))
    estimates = whole.estimate(), part.estimate()
    assert estimates[0] is not None
    assert estimates[1] is not None
    assert estimates[1].cycles == pytest.approx(estimates[0].cycles, rel=0.02)
    assert estimates[1].matrix_busy == pytest.approx(estimates[0].matrix_busy, rel=0.02)
    assert 0 < estimates[0].matrix_busy < 1
    assert "Only a sample of 24 workgroups ran" in str(part)
    assert "busy over the whole launch" in str(part)
    assert f"main loop {loop.first}: an iteration of a wave has 256 matrix cycles" in str(part)
    assert "0 LDS conflict cycles, 0 bytes of scratch" in str(part)


def test_a_sample_of_none(profiler):
    with pytest.raises(ValueError, match="sample is 0"):
        _causal(profiler, "gfx942", sample=0, run_sample_only=True)
