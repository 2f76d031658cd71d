"""What a kernel's launches cost: the emulator's library in its `profile` variant.

Counts are exact. Times are those of a model: an in-order replay of one workgroup's instructions
against the published rates (csrc_templates/emulator/profile_timing.cpp), which `LaunchProfile`
prints together with what it assumes.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

__all__ = [
    "SUSTAINED_CLOCK",
    "Conflict",
    "Estimate",
    "LaunchProfile",
    "Loop",
    "Occupancy",
    "Timing",
    "Unit",
    "Work",
    "set_profile_options",
    "take_profiles",
]

Unit = Literal[
    "salu",
    "branch",
    "message",
    "waitcnt",
    "barrier",
    "smem",
    "valu",
    "transcendental",
    "mfma",
    "lds",
    "vmem_load",
    "vmem_store",
    "vmem_atomic",
]
_UNITS: tuple[Unit, ...] = get_args(Unit)
_SIMDS = 4
_MOST_STEPS = 50_000_000

# One of two fitted constants, the other being the barrier's cycles in profile.h: the share of the
# peak clock that a chip keeps up. Fitted to three published times of forward kernels on an MI300X
# at (batch, heads, seqlen, hdim) = (2, 24, 16384, 128); here they are with what the model gives.
SUSTAINED_CLOCK = 0.66
_CALIBRATION = (
    "Calibration: the barrier's cycles and the share of the clock are fitted to three published "
    "times on an MI300X at (2, 24, 16384, 128), production kernels with bf16 by rtne, rtna, rtz: "
    "14.69, 13.80, 12.63 ms. The model gives 14.64, 13.85, 12.59 ms. Both constants also stand for "
    "what is not modelled; other chips, shapes and kernels were not compared."
)


@dataclass(frozen=True)
class Work:
    """What instructions came to, of a wave or of many together.

    Attributes:
        instructions: by the unit that executes them.
        matrix_cycles: of the matrix units, by the published rates.
        valu_cycles: of the vector ALUs, transcendental instructions included.
        lds_bytes: that lanes moved to and from LDS.
        lds_cycles: of the LDS banks.
        lds_conflict_cycles: those of them that bank conflicts cost.
        global_bytes: that lanes moved to and from global memory; scalar loads not included.
        cache_lines: of 128 bytes, counted for each instruction anew.
        scratch_bytes: that lanes moved to and from private memory.
    """

    instructions: Mapping[Unit, int]
    matrix_cycles: int = 0
    valu_cycles: int = 0
    lds_bytes: int = 0
    lds_cycles: int = 0
    lds_conflict_cycles: int = 0
    global_bytes: int = 0
    cache_lines: int = 0
    scratch_bytes: int = 0

    def count(self, *units: Unit) -> int:
        """Instructions of these units; of all where none is named."""
        return sum(self.instructions.get(unit, 0) for unit in units or _UNITS)

    @property
    def matrix(self) -> int:
        """Matrix instructions."""
        return self.count("mfma")

    @property
    def valu(self) -> int:
        """Vector ALU instructions, transcendental ones included."""
        return self.count("valu", "transcendental")

    @property
    def global_memory(self) -> int:
        """Buffer, global, flat and scratch instructions."""
        return self.count("vmem_load", "vmem_store", "vmem_atomic")


@dataclass(frozen=True)
class Loop:
    """A loop of the code: the instructions between a branch back and its target.

    Attributes:
        first: address of its first instruction, as symbol+0xoffset.
        last: address of the branch.
        depth: 1 where no loop is around it.
        outer: index of the smallest loop around it.
        iterations: of all waves of the launch.
        iterations_of_waves: of each wave of the workgroup that was timed.
        code: the instructions of the loop, each as if it was executed once; those of loops inside
            and those that are skipped included.
        work: of all waves, without that of loops inside.
        work_of_waves: the same, of each wave of the workgroup that was timed.
    """

    first: str
    last: str
    depth: int
    outer: int | None
    iterations: int
    iterations_of_waves: tuple[int, ...]
    code: Work
    work: Work
    work_of_waves: tuple[Work, ...]


@dataclass(frozen=True)
class Occupancy:
    """The room that a kernel takes, and the workgroups that a compute unit has room for.

    Attributes:
        vgprs: that a wave allocates, accumulation registers included.
        architectural_vgprs: of them, those that are not for accumulation.
        sgprs: that a wave allocates.
        lds_bytes: that a workgroup allocates.
        waves_of_workgroup: of 64 threads.
        by_vgprs, by_sgprs, by_lds, by_waves: workgroups of a compute unit that there are enough
            vector registers, scalar registers, LDS and wave slots for.
        workgroups: the smallest of these.
    """

    vgprs: int
    architectural_vgprs: int
    sgprs: int
    lds_bytes: int
    waves_of_workgroup: int
    by_vgprs: int
    by_sgprs: int
    by_lds: int
    by_waves: int
    workgroups: int

    @property
    def waves_of_simd(self) -> int:
        """Waves that the fullest SIMD has room for."""
        return math.ceil(self.workgroups * self.waves_of_workgroup / _SIMDS)

    @property
    def limits(self) -> tuple[str, ...]:
        """What keeps one more workgroup out."""
        named = {
            "VGPRs": self.by_vgprs,
            "SGPRs": self.by_sgprs,
            "LDS": self.by_lds,
            "wave slots": self.by_waves,
        }
        return tuple(name for name, room in named.items() if room == self.workgroups)


@dataclass(frozen=True)
class Timing:
    """One compute unit, by the model.

    Attributes:
        workgroups: that ran on it together.
        cycles: until the last of them had ended.
        matrix_busy: share of the cycles in which a SIMD's matrix unit worked.
        vector_busy: share in which a SIMD's vector ALU worked.
        lds_busy: share in which the LDS banks worked.
        line_busy: share in which L1 delivered.
        stalls: cycles in which waves waited, summed over waves, by what they waited for.
    """

    workgroups: int
    cycles: int
    matrix_busy: float
    vector_busy: float
    lds_busy: float
    line_busy: float
    stalls: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """A whole launch on the chip, by the model.

    Attributes:
        workgroups: of the launch.
        rounds: in which the compute units run them; a partial one counts as a whole.
        cycles: rounds times the cycles of one.
        clock: cycles a second that the chip is assumed to keep up.
        seconds: cycles over clock.
    """

    workgroups: int
    rounds: int
    cycles: float
    clock: float
    seconds: float


@dataclass(frozen=True)
class Conflict:
    """An instruction that loses LDS cycles to bank conflicts."""

    address: str
    instruction: str
    executed: int
    lds_cycles: int
    lds_conflict_cycles: int


@dataclass(frozen=True)
class LaunchProfile:
    """What one launch of a kernel cost. Its text is a report.

    Attributes:
        kernel: its name.
        device: marketing name of the virtual chip.
        arch: gfx942 or gfx950.
        compute_units: of the chip.
        peak_clock: of the chip, in Hz.
        grid, block: workgroups, and threads of each.
        launched_workgroups: product of `grid`.
        ended_workgroups: fewer than launched where the launch failed.
        workgroups: that times are for: as many as were launched, or as options say.
        timed_workgroup: linear number of the one that is looked at wave by wave.
        rates: cycles and sizes that the model uses, by name; see profile.h.
        occupancy: room that the kernel takes.
        work: of all waves.
        work_of_waves: of each wave of the timed workgroup.
        loops: by address; of branches back that were taken.
        conflicts: the worst instructions, the worst first.
        timing: None where there is none; `why_not` says why.
        why_not: empty where there is a timing.
    """

    kernel: str
    device: str
    arch: str
    compute_units: int
    peak_clock: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    launched_workgroups: int
    ended_workgroups: int
    workgroups: int
    timed_workgroup: int
    rates: Mapping[str, int]
    occupancy: Occupancy
    work: Work
    work_of_waves: tuple[Work, ...]
    loops: tuple[Loop, ...]
    conflicts: tuple[Conflict, ...]
    timing: Timing | None
    why_not: str

    @property
    def share_of_timed(self) -> float:
        """Instructions of the mean workgroup over those of the timed one."""
        timed = sum(work.count() for work in self.work_of_waves)
        return self.work.count() / self.ended_workgroups / timed if timed else 1.0

    def estimate(self) -> Estimate | None:
        """The time of the launch on the chip; None without a timing."""
        if self.timing is None:
            return None
        rounds = math.ceil(self.workgroups / (self.compute_units * self.timing.workgroups))
        cycles = rounds * self.timing.cycles * self.share_of_timed
        clock = self.peak_clock * SUSTAINED_CLOCK
        return Estimate(self.workgroups, rounds, cycles, clock, cycles / clock)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it, with the estimate and the assumptions."""
        estimate = self.estimate()
        return {
            **asdict(self),
            "estimate": asdict(estimate) if estimate else None,
            "assumptions": self.assumptions(),
        }

    def assumptions(self) -> list[str]:
        """What the times rest on, a sentence each."""
        rates = self.rates
        clock = self.peak_clock * SUSTAINED_CLOCK
        return [
            (
                f"Cycles of an instruction: VALU {rates['valu']}, transcendental "
                f"{rates['transcendental']}, matrix {rates['matrix_pass']} a pass; each wave "
                f"issues at most one instruction in {rates['issue']} cycles (published rates)."
            ),
            (
                "Each SIMD has one vector, one scalar, one LDS and one memory port, and its waves "
                "issue in order; VALU and matrix instructions overlap but for the latter's issue."
            ),
            (
                f"LDS: {rates['lds_banks']} banks of 4 bytes, data after {rates['lds_latency']} "
                "cycles (published: 64 to 128) and the time in the queue."
            ),
            (
                f"Global memory: every access takes {rates['global_latency']} cycles (published: "
                f"400 to 800) and {rates['cycles_of_line']} cycles of L1 for each line of "
                f"{rates['line_bytes']} bytes; caches and HBM bandwidth are not modelled."
            ),
            (
                f"Assumed without a source: scalar loads {rates['scalar_latency']} cycles, taken "
                f"branch {rates['branch']}, queues {rates['queue']}. Fitted: barrier "
                f"{rates['barrier']}."
            ),
            (
                f"Workgroups fill {self.compute_units} compute units in rounds, a partial round "
                f"counting as a whole, at {clock / 1e9:.2f} GHz: the peak of "
                f"{self.peak_clock / 1e9:.1f} GHz times {SUSTAINED_CLOCK} (fitted)."
            ),
            _CALIBRATION,
        ]

    def __str__(self) -> str:
        return "\n".join(_report(self))


class _Options(ctypes.Structure):
    """`ProfileOptions` in profile.h."""

    _fields_ = [
        ("workgroup", ctypes.c_uint64),
        ("assumed_workgroups", ctypes.c_uint64),
        ("most_steps", ctypes.c_uint64),
    ]


def set_profile_options(
    library: ctypes.CDLL,
    *,
    workgroup: int = 0,
    assumed_workgroups: int = 0,
    most_steps: int = _MOST_STEPS,
) -> None:
    """Set how later launches of this process are profiled.

    Args:
        library: the `profile` variant of the emulator.
        workgroup: linear number (x fastest) of the one that is looked at wave by wave, and timed.
        assumed_workgroups: times are for a launch of so many; 0: for as many as are launched.
        most_steps: instructions of the timed workgroup beyond which there is no timing.

    Raises:
        RuntimeError: another variant.
    """
    set_options = _exported(library, "jitfmha_emulator_set_profile_options")
    set_options.restype = None
    set_options.argtypes = [ctypes.c_void_p]
    set_options(ctypes.byref(_Options(workgroup, assumed_workgroups, most_steps)))


def take_profiles(library: ctypes.CDLL) -> list[LaunchProfile]:
    """The profiles of the launches of this process since the last call, at most 1000.

    Args:
        library: the `profile` variant of the emulator.

    Raises:
        RuntimeError: another variant.
    """
    take = _exported(library, "jitfmha_emulator_take_profiles")
    take.restype = ctypes.c_char_p
    take.argtypes = [ctypes.c_void_p]
    left_out = ctypes.c_uint64()
    return [_launch(facts) for facts in json.loads(take(ctypes.byref(left_out)))]


def _exported(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError:
        raise RuntimeError(
            "this variant of the emulator does not profile; load 'profile'"
        ) from None


# ---- From JSON -----------------------------------------------------------------------------------


def _work(rows: Iterable[Mapping[str, Any]]) -> Work:
    instructions: dict[Unit, int] = {}
    sums = dict.fromkeys(
        (
            "lds_bytes",
            "lds_cycles",
            "lds_conflict_cycles",
            "global_bytes",
            "cache_lines",
            "scratch_bytes",
        ),
        0,
    )
    matrix_cycles = valu_cycles = 0
    for row in rows:
        unit: Unit = row["unit"]
        instructions[unit] = instructions.get(unit, 0) + row["instructions"]
        if unit == "mfma":
            matrix_cycles += row["cycles"]
        else:
            valu_cycles += row["cycles"]
        for name in sums:
            sums[name] += row[name]
    return Work(instructions, matrix_cycles, valu_cycles, **sums)


def _of_loop(rows: Iterable[Mapping[str, Any]], index: int) -> Work:
    return _work(row for row in rows if row["loop"] == index)


def _launch(facts: dict[str, Any]) -> LaunchProfile:
    counts, waves = facts["counts"], facts["counts_of_waves"]
    loops = tuple(
        Loop(
            first=loop["first"],
            last=loop["last"],
            depth=loop["depth"],
            outer=None if loop["outer"] < 0 else loop["outer"],
            iterations=loop["iterations"],
            iterations_of_waves=tuple(loop["iterations_of_waves"]),
            code=_work(loop["code"]),
            work=_of_loop(counts, index),
            work_of_waves=tuple(_of_loop(rows, index) for rows in waves),
        )
        for index, loop in enumerate(facts["loops"])
    )
    timing = facts["timing"]
    return LaunchProfile(
        kernel=facts["kernel"],
        device=facts["device"],
        arch=facts["arch"],
        compute_units=facts["compute_units"],
        peak_clock=facts["clock_khz"] * 1e3,
        grid=(facts["grid"][0], facts["grid"][1], facts["grid"][2]),
        block=(facts["block"][0], facts["block"][1], facts["block"][2]),
        launched_workgroups=facts["launched_workgroups"],
        ended_workgroups=facts["ended_workgroups"],
        workgroups=facts["workgroups"],
        timed_workgroup=facts["timed_workgroup"],
        rates=facts["rates"],
        occupancy=Occupancy(**facts["occupancy"]),
        work=_work(counts),
        work_of_waves=tuple(_work(rows) for rows in waves),
        loops=loops,
        conflicts=tuple(Conflict(**conflict) for conflict in facts["conflicts"]),
        timing=None if timing["why_not"] else _timing(timing),
        why_not=timing["why_not"],
    )


def _timing(facts: dict[str, Any]) -> Timing:
    cycles = facts["cycles"]
    return Timing(
        workgroups=facts["workgroups"],
        cycles=cycles,
        matrix_busy=facts["matrix_busy"] / (_SIMDS * cycles),
        vector_busy=facts["vector_busy"] / (_SIMDS * cycles),
        lds_busy=facts["lds_busy"] / cycles,
        line_busy=facts["line_busy"] / cycles,
        stalls=facts["stalls"],
    )


# ---- The report ----------------------------------------------------------------------------------

_COLUMNS = (
    "instr",
    "MFMA",
    "VALU",
    "trans",
    "SALU",
    "LDS",
    "global",
    "barrier",
    "MFMA cyc",
    "VALU cyc",
    "LDS cyc",
    "conflicts",
    "lines",
)


def _cells(work: Work, per: int = 1) -> list[str]:
    values = (
        work.count(),
        work.matrix,
        work.valu,
        work.count("transcendental"),
        work.count("salu", "branch", "smem"),
        work.count("lds"),
        work.global_memory,
        work.count("barrier"),
        work.matrix_cycles,
        work.valu_cycles,
        work.lds_cycles,
        work.lds_conflict_cycles,
        work.cache_lines,
    )
    return [f"{value / per:.10g}" if value % per == 0 else f"{value / per:.1f}" for value in values]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _report(profile: LaunchProfile) -> list[str]:
    room = profile.occupancy
    lines = [
        f"kernel {profile.kernel} on {profile.device} ({profile.arch})",
        (
            f"grid {profile.grid}, block {profile.block}: {profile.launched_workgroups} workgroups "
            f"of {room.waves_of_workgroup} waves"
        ),
        (
            f"registers: {room.vgprs} VGPRs a wave, {room.architectural_vgprs} of them "
            f"architectural; {room.sgprs} SGPRs. LDS: {room.lds_bytes} bytes a workgroup"
        ),
        (
            f"occupancy: {room.workgroups} workgroups a compute unit, {room.waves_of_simd} waves a "
            f"SIMD; limited by {', '.join(room.limits)}"
        ),
        "",
    ]
    if profile.ended_workgroups < profile.launched_workgroups:
        lines.append(f"The launch failed: {profile.ended_workgroups} workgroups ended.")
    rows = [["counts", *_COLUMNS], ["all waves", *_cells(profile.work)]]
    rows += [
        [f"workgroup {profile.timed_workgroup} wave {i}", *_cells(work)]
        for i, work in enumerate(profile.work_of_waves)
    ]
    lines += [*_table(rows), ""]
    if profile.loops:
        rows = [["loops, one iteration of one wave", "iterations", *_COLUMNS]]
        for loop in profile.loops:
            name = f"{'  ' * (loop.depth - 1)}{loop.first} .. {loop.last.rpartition('+')[2]}"
            rows.append([name, str(loop.iterations), *_cells(loop.work, max(loop.iterations, 1))])
            rows.append(["  in its code", "", *_cells(loop.code)])
        lines += [*_table(rows), ""]
    if profile.conflicts:
        lines.append("LDS bank conflicts:")
        lines += [
            f"  {c.lds_conflict_cycles} of {c.lds_cycles} cycles: `{c.instruction}` at {c.address}"
            for c in profile.conflicts
        ]
        lines.append("")
    return lines + _timing_lines(profile)


def _timing_lines(profile: LaunchProfile) -> list[str]:
    timing, estimate = profile.timing, profile.estimate()
    if timing is None or estimate is None:
        return [f"no timing: {profile.why_not}"]
    waiting = sum(timing.stalls.values()) or 1
    stalls = sorted(timing.stalls.items(), key=lambda item: -item[1])
    return [
        f"model: {timing.cycles} cycles for {timing.workgroups} workgroup(s) on a compute unit",
        (
            f"  busy: matrix units {timing.matrix_busy:.1%}, vector ALUs {timing.vector_busy:.1%}, "
            f"LDS {timing.lds_busy:.1%}, L1 {timing.line_busy:.1%}"
        ),
        "  waves wait for: "
        + ", ".join(f"{name} {cycles / waiting:.0%}" for name, cycles in stalls if cycles),
        (
            f"  chip: {estimate.workgroups} workgroups in {estimate.rounds} rounds, "
            f"{estimate.cycles:.0f} cycles, {estimate.seconds * 1e3:.3f} ms"
        ),
        "assumptions:",
        *(f"  - {sentence}" for sentence in profile.assumptions()),
    ]
