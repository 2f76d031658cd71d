"""What a kernel's launches cost: the emulator's library in its `profile` variant.

Counts are exact. Times are those of a model: an in-order replay of the instructions of a sample of
workgroups against the rates of rates.json (csrc_templates/emulator/profile/timing.cpp), and a
launch put together from them (estimate.py). `LaunchProfile` prints them with what they assume.

    profile = profile_launch(emulator, function, grid, block, kernarg, run_sample_only=True)
    profile.estimate().matrix_busy          # share of the whole launch
    for loop in profile.main_loops:
        loop.matrix_cycles, loop.valu_cycles   # of one iteration of one wave
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from textwrap import fill
from typing import Any, Literal, NamedTuple, get_args

from ..amd import chips
from ..amd.chips import SIMDS
from ..amd.clock import clock_of
from ..amd.demangling import demangled
from .estimate import Estimate, Event, TimedWorkgroup, Timing, estimate_launch
from .library import taken
from .rates import ChipRates, rates_of, rates_of_chip
from .runtime import Emulator, Function
from .shared_structs import DEFAULT_MOST_STEPS, DEFAULT_SAMPLE, PROFILE_OPTIONS

Unit = Literal[
    "salu", "branch", "message", "waitcnt", "barrier", "smem", "valu", "transcendental", "mfma",
    "lds", "vmem_load", "vmem_store", "vmem_atomic",
]  # fmt: skip
_UNITS: tuple[Unit, ...] = get_args(Unit)
_MARKETING = "AMD Instinct "


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
        cache_lines: of 128 bytes, counted again for each instruction.
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
        return self.count("mfma")

    @property
    def valu(self) -> int:
        """How many vector ALU instructions there are, transcendental ones included."""
        return self.count("valu", "transcendental")

    @property
    def global_memory(self) -> int:
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
        iterations_of_waves: of each wave of the workgroup that is looked at.
        code: the instructions of the loop, each as if it was executed once; those of loops inside
            and those that are skipped included.
        work: of all waves, without that of loops inside.
        work_of_waves: the same, of each wave of the workgroup that is looked at.
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

    @property
    def matrix_cycles(self) -> float:
        return self.work.matrix_cycles / self.iterations

    @property
    def valu_cycles(self) -> float:
        """The same of vector ALUs, transcendental instructions included."""
        return self.work.valu_cycles / self.iterations


@dataclass(frozen=True)
class Occupancy:
    """The room that a kernel takes, and the workgroups that a compute unit has room for.

    Attributes:
        vgprs, sgprs: that a wave allocates; vector registers with those for accumulation.
        architectural_vgprs: of them, those that are not for accumulation.
        lds_bytes: that a workgroup allocates.
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
        return math.ceil(self.workgroups * self.waves_of_workgroup / SIMDS)

    @property
    def limits(self) -> tuple[str, ...]:
        """Name what keeps one more workgroup out of a compute unit."""
        named = {
            "VGPRs": self.by_vgprs,
            "SGPRs": self.by_sgprs,
            "LDS": self.by_lds,
            "wave slots": self.by_waves,
        }
        return tuple(name for name, room in named.items() if room == self.workgroups)


@dataclass(frozen=True)
class Conflict:
    """An instruction that loses LDS cycles to bank conflicts."""

    address: str
    instruction: str
    executed: int
    lds_cycles: int
    lds_conflict_cycles: int


@dataclass(frozen=True, repr=False)
class LaunchProfile:
    """What one launch of a kernel cost. Its text is a report.

    Attributes:
        device: marketing name of the virtual chip.
        xcd_engines: shader engines of an XCD.
        peak_clock: of the chip, in Hz.
        grid, block: workgroups, and threads of each.
        selected_workgroups: that were to run: all, or the sample.
        ended_workgroups: fewer than selected where the launch failed.
        workgroups: that times are for: as many as were launched, or as options say.
        looked_at: linear number of the workgroup that is looked at wave by wave.
        rates: cycles and sizes that the model uses, by name; `rates.json` has their sources.
        work: of all waves of the workgroups that ended.
        work_of_waves: of each wave of the workgroup that is looked at.
        loops: by address; of branches back that were taken.
        conflicts: the worst instructions, the worst first.
        workgroups_per_unit: that share a compute unit, for the times.
        memory_bytes: that the launch may touch; 0 where it may touch everything.
        timed: the sample of workgroups, by number.
    """

    kernel: str
    device: str
    arch: str
    compute_units: int
    xcds: int
    xcd_engines: int
    peak_clock: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    launched_workgroups: int
    selected_workgroups: int
    ended_workgroups: int
    workgroups: int
    looked_at: int
    rates: Mapping[str, int]
    occupancy: Occupancy
    work: Work
    work_of_waves: tuple[Work, ...]
    loops: tuple[Loop, ...]
    conflicts: tuple[Conflict, ...]
    workgroups_per_unit: int
    memory_bytes: int
    timed: tuple[TimedWorkgroup, ...]

    @property
    def main_loops(self) -> tuple[Loop, ...]:
        """The loops that do the matrix work: with it, and without a loop inside that has it."""
        working = [index for index, loop in enumerate(self.loops) if loop.work.matrix]
        outer = {self.loops[index].outer for index in working}
        return tuple(self.loops[index] for index in working if index not in outer)

    @property
    def timing(self) -> Timing | None:
        """That of the workgroup that is looked at; None where there is none, and `why_not` says
        why.
        """
        return self._looked_at.timing if self._looked_at else None

    @property
    def why_not(self) -> str:
        """Why there are no times; empty where there are."""
        if self._looked_at is None:
            return f"the launch has no workgroup {self.looked_at}"
        return next((workgroup.why_not for workgroup in self.timed if workgroup.why_not), "")

    @property
    def _looked_at(self) -> TimedWorkgroup | None:
        return next((timed for timed in self.timed if timed.number == self.looked_at), None)

    def estimate(self) -> Estimate | None:
        """The whole launch on the chip; None where a workgroup could not be timed."""
        return estimate_launch(
            self.timed,
            grid=self.grid,
            workgroups=self.workgroups,
            compute_units=self.compute_units,
            xcds=self.xcds,
            xcd_engines=self.xcd_engines,
            workgroups_per_unit=self.workgroups_per_unit,
            chip=self._chip,
            line_bytes=self.rates["line_bytes"],
            memory_bytes=self._least_moved,
        )

    @property
    def _chip(self) -> ChipRates:
        return rates_of_chip(self.device.removeprefix(_MARKETING))

    @property
    def _least_moved(self) -> float:
        """Bytes: all that the launch may touch, but no more than its instructions ask for."""
        if not self.ended_workgroups:
            return 0.0
        launched = self.work.cache_lines * self.launched_workgroups / self.ended_workgroups
        asked_for = launched * self.rates["line_bytes"]
        least = min(asked_for, self.memory_bytes or asked_for)
        return least * self.workgroups / self.launched_workgroups

    def to_dict(self) -> dict[str, Any]:
        estimate = self.estimate()
        return {
            **asdict(self),
            "estimate": asdict(estimate) if estimate else None,
            "assumptions": self.assumptions(),
        }

    def assumptions(self) -> list[str]:
        """What the times rest on, a sentence or two each."""
        rates, chip = self.rates, self._chip
        clock, name = chip.clock, self.device.removeprefix(_MARKETING)
        points = ", ".join(f"{hz / 1e6:.0f} MHz at {busy:.0%}" for busy, hz in clock.points)
        assumed = "" if clock.measured_on == name else " of another chip, which is assumed,"
        text = f"""
            Cycles of an instruction: VALU {rates["valu"]}, transcendental
            {rates["transcendental"]}, matrix {rates["matrix_pass"]} a pass; each wave issues at
            most one instruction in {rates["issue"]} cycles (published rates).

            Each SIMD has one vector port, one scalar port, and one for LDS and memory; its waves
            issue in order. VALU and matrix instructions overlap but for the {rates["matrix_read"]}
            cycles in which the latter read; packed float32 issues {rates["packed_after_matrix"]}
            cycles after the matrix unit is free (published).

            LDS: {rates["lds_read_banks"]} banks of 4 bytes for reads and
            {rates["lds_write_banks"]} for writes, data after {rates["lds_latency"]} cycles
            (published: 64 to 128) and the time in the queue.

            L1: {rates["l1_bytes"] >> 10} KiB, {rates["l1_latency"]} cycles, and
            {rates["l1_line"]} for each line of {rates["line_bytes"]} bytes. L2 and Infinity Cache:
            {rates["global_latency"]} cycles (published: 400 to 800), and {rates["global_line"]} a
            line; {rates["atomic_line"]} a line of atomics (fitted).

            HBM moves what the launch may touch once, at {chip.streaming / 1e12:.1f} TB/s, which
            published kernels stream, and all units at work share that evenly; a line is there
            after {rates["hbm_latency"]} cycles (published). While matrix units work this hides
            behind other work as far as loads are in flight, before and behind that not at all. The
            Infinity Cache is cold. Which lines L2 gives up is not modelled.

            Barrier {rates["barrier"]} cycles (published: 37 to 65, the waves' own waiting
            included). Assumed without a source: scalar loads {rates["scalar_latency"]} cycles,
            taken branch {rates["branch"]}, queues {rates["queue"]}.

            A timed workgroup shares its compute unit with {self.workgroups_per_unit - 1} copies of
            itself that start together; nothing of the launch around it is modelled, but for waits:
            where a workgroup polls what another one stores, all of it stands still until then, and
            the load that sees it goes out. What is polled before that costs nothing.

            Workgroups go to {self.xcds} chiplets in turn, in the order of the launch, there to
            {self.xcd_engines} shader engines in turn, and of an engine to
            the first compute unit with room.

            The clock falls as matrix units are busier: measured points{assumed} {points}; the time
            of a cycle is on the line through theirs, and attention's matrix work counts for
            {clock.activity} of that (fitted); at most {self.peak_clock / 1e9:.1f} GHz.

            A time is uncertain by {chip.scatter:.0%}: the scatter around published times of
            AITER's kernels that nothing was fitted to. The emulator's README has the table.
        """
        return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]

    def __repr__(self) -> str:
        return f"<LaunchProfile of {demangled(self.kernel)} on {self.device}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        return "\n".join(_report(self))


class ProfileOptions(NamedTuple):
    """How launches are profiled.

    Attributes:
        looked_at: linear number (x fastest) of the workgroup that is looked at wave by wave.
        assumed_workgroups: times are for a launch of so many; 0: for as many as are launched.
        most_steps: instructions of a timed workgroup beyond which there is no timing.
        sample: workgroups that are timed, of launches that have more; where workgroups may wait
            for each other, all are.
        run_sample_only: the others do not run, and write nothing; counts are those of the sample.
    """

    looked_at: int = 0
    assumed_workgroups: int = 0
    most_steps: int = DEFAULT_MOST_STEPS
    sample: int = DEFAULT_SAMPLE
    run_sample_only: bool = False


def profile_launch(
    emulator: Emulator,
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    kernarg: bytes,
    *,
    dynamic_lds: int = 0,
    memory: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> LaunchProfile:
    """Run a kernel on the emulator's `profile` variant, as `Emulator.launch` does: what it costs.

    Args:
        memory: (address, bytes) that the launch may touch; None: everything.
        options: those of `ProfileOptions`.

    Raises:
        RuntimeError: another variant.
        EmulatorError: the kernel did something wrong or unknown.
    """
    set_profile_options(emulator.library, **options)
    emulator.set_allowed_memory(memory)
    try:
        take_profiles(emulator.library)
        emulator.launch(function, grid, block, kernarg, dynamic_lds=dynamic_lds)
        (profile,) = take_profiles(emulator.library)
    finally:
        take_profiles(emulator.library)  # nor does a launch that fails leave any to the next one
        emulator.set_allowed_memory(None)
        set_profile_options(emulator.library)
    return profile


def set_profile_options(library: ctypes.CDLL, **options: Any) -> None:
    """Set how later launches of this thread are profiled, by the fields of `ProfileOptions`.

    Raises ``RuntimeError`` for another variant than `profile`, ``ValueError`` for a sample of none.
    """
    chosen = ProfileOptions(**options)
    if chosen.sample < 1:
        raise ValueError(f"sample is {chosen.sample}; at least one workgroup has to be timed")
    set_options = getattr(library, "jitfmha_emulator_set_profile_options", None)
    if set_options is None:
        raise RuntimeError("this variant of the emulator keeps no profiles")
    set_options.restype = None
    set_options.argtypes = [ctypes.c_void_p]
    set_options(ctypes.byref(PROFILE_OPTIONS.ctype(**chosen._asdict())))


def take_profiles(library: ctypes.CDLL) -> list[LaunchProfile]:
    """The profiles of the launches of this thread since the last call, at most 1000.

    Raises ``RuntimeError`` for a ``library`` that is not the `profile` variant of the emulator.
    """
    return [_launch(facts) for facts in taken(library, "profiles")]


# ---- From JSON -----------------------------------------------------------------------------------

_SUMMED = (
    *("lds_bytes", "lds_cycles", "lds_conflict_cycles"),
    *("global_bytes", "cache_lines", "scratch_bytes"),
)


def profile_from(text: str | bytes) -> LaunchProfile:
    """The profile of a launch from the JSON that the emulator makes of it."""
    return _launch(json.loads(text))


def _work(rows: Sequence[Mapping[str, Any]]) -> Work:
    instructions: dict[Unit, int] = {}
    cycles = {True: 0, False: 0}  # of matrix units, of vector ALUs
    for row in rows:
        unit: Unit = row["unit"]
        instructions[unit] = instructions.get(unit, 0) + row["instructions"]
        cycles[unit == "mfma"] += row["cycles"]
    sums = {name: sum(row[name] for row in rows) for name in _SUMMED}
    return Work(instructions, cycles[True], cycles[False], **sums)


def _of_loop(rows: Sequence[Mapping[str, Any]], index: int) -> Work:
    return _work([row for row in rows if row["loop"] == index])


def _launch(facts: dict[str, Any]) -> LaunchProfile:
    counts, waves = facts.pop("counts"), facts.pop("counts_of_waves")
    loops = tuple(
        Loop(
            **{
                **loop,
                "outer": None if loop["outer"] < 0 else loop["outer"],
                "iterations_of_waves": tuple(loop["iterations_of_waves"]),
                "code": _work(loop["code"]),
            },
            work=_of_loop(counts, index),
            work_of_waves=tuple(_of_loop(rows, index) for rows in waves),
        )
        for index, loop in enumerate(facts["loops"])
    )
    emulated = chips.chip(facts["device"].removeprefix(_MARKETING))
    facts |= {name: tuple(facts[name]) for name in ("grid", "block")}
    facts |= {
        "loops": loops,
        "occupancy": Occupancy(**facts["occupancy"]),
        "conflicts": tuple(Conflict(**conflict) for conflict in facts["conflicts"]),
        "timed": tuple(_timed(timed) for timed in facts["timed"]),
    }
    return LaunchProfile(
        **facts,
        arch=emulated.architecture.name,
        compute_units=emulated.compute_units,
        xcds=emulated.xcds,
        xcd_engines=emulated.architecture.xcd_engines,
        peak_clock=clock_of(emulated.name).peak,
        rates=dict(rates_of(emulated.architecture.name)),
        work=_work(counts),
        work_of_waves=tuple(_work(rows) for rows in waves),
    )


def _timed(facts: dict[str, Any]) -> TimedWorkgroup:
    timing, why_not = facts["timing"], facts["timing"]["why_not"]
    events = tuple(
        Event(**{**event, "waits_for": tuple(event["waits_for"])}) for event in facts["events"]
    )
    known = {**facts, "id": tuple(facts["id"]), "why_not": why_not, "events": events}
    return TimedWorkgroup(**{**known, "timing": None if why_not else _timing(timing)})


def _timing(facts: dict[str, Any]) -> Timing:
    cycles = facts["cycles"]
    return Timing(
        workgroups=facts["workgroups"],
        cycles=cycles,
        matrix_busy=facts["matrix_busy"] / (SIMDS * cycles),
        vector_busy=facts["vector_busy"] / (SIMDS * cycles),
        lds_busy=facts["lds_busy"] / cycles,
        l1_busy=facts["l1_busy"] / cycles,
        l1_hits=facts["l1_hits"] / max(facts["lines"], 1),
        lines_at_ends=facts["lines_at_ends"] / facts["workgroups"],
        stalls=facts["stalls"],
    )


# ---- The report ----------------------------------------------------------------------------------

_WIDEST_LINE = 80
_COLUMNS: Mapping[str, Callable[[Work], int]] = {
    "instr": Work.count,
    "MFMA": lambda work: work.matrix,
    "VALU": lambda work: work.valu,
    "trans": lambda work: work.count("transcendental"),
    "SALU": lambda work: work.count("salu", "branch", "smem"),
    "LDS": lambda work: work.count("lds"),
    "global": lambda work: work.global_memory,
    "barrier": lambda work: work.count("barrier"),
    "MFMA cyc": lambda work: work.matrix_cycles,
    "VALU cyc": lambda work: work.valu_cycles,
    "LDS cyc": lambda work: work.lds_cycles,
    "conflicts": lambda work: work.lds_conflict_cycles,
    "lines": lambda work: work.cache_lines,
}


def _cells(work: Work, per: int = 1) -> list[str]:
    return [_figure(value(work) / per) for value in _COLUMNS.values()]


def _figure(value: float) -> str:
    """Exact below a million, and five digits of what is larger."""
    if value >= 1e6:
        return f"{value / 1e6:.5g}M" if value < 1e9 else f"{value / 1e9:.5g}G"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _table(rows: list[list[str]]) -> list[str]:
    """The rows, in as many blocks of columns below each other as `_WIDEST_LINE` asks for."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines: list[str] = []
    first = 1
    while first < len(columns):
        end, width = first + 1, widths[0] + 2 + widths[first]
        while end < len(columns) and width + 2 + widths[end] <= _WIDEST_LINE:
            width += 2 + widths[end]
            end += 1
        for row in rows:
            cells = (row[i].rjust(widths[i]) for i in range(first, end))
            lines.append("  ".join((row[0].ljust(widths[0]), *cells)).rstrip())
        first = end
    return lines


def _report(profile: LaunchProfile) -> list[str]:
    room = profile.occupancy
    lines = [
        f"kernel {demangled(profile.kernel)} on {profile.device} ({profile.arch})",
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
    if profile.ended_workgroups < profile.selected_workgroups:
        lines.append(f"The launch failed: {profile.ended_workgroups} workgroups ended.")
    of_all = "all waves"
    if profile.selected_workgroups < profile.launched_workgroups:
        of_all = f"waves of {profile.ended_workgroups} workgroups"
        lines.append(
            f"Only a sample of {profile.selected_workgroups} workgroups ran; counts are theirs."
        )
    rows = [["counts", *_COLUMNS], [of_all, *_cells(profile.work)]]
    rows += [
        [f"workgroup {profile.looked_at} wave {i}", *_cells(work)]
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
    lines += [
        f"main loop {loop.first}: an iteration of a wave has {loop.matrix_cycles:.6g} matrix "
        f"cycles, {loop.valu_cycles:.6g} VALU cycles, "
        f"{loop.work.lds_conflict_cycles / loop.iterations:.6g} LDS conflict cycles, "
        f"{loop.work.scratch_bytes / loop.iterations:.6g} bytes of scratch"
        for loop in profile.main_loops
    ]
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
        no_room = "a workgroup waits for one that has no room on the chip before it ends"
        return [f"no timing: {profile.why_not or no_room}"]
    waiting = sum(timing.stalls.values()) or 1
    stalls = sorted(timing.stalls.items(), key=lambda item: -item[1])
    return [
        (
            f"model: {timing.cycles} cycles for workgroup {profile.looked_at}, "
            f"{timing.workgroups} on a compute unit"
        ),
        (
            f"  busy: matrix units {timing.matrix_busy:.1%}, vector ALUs {timing.vector_busy:.1%}, "
            f"LDS {timing.lds_busy:.1%}, L1 {timing.l1_busy:.1%}, which has {timing.l1_hits:.0%} "
            "of the lines that loads ask for"
        ),
        "  waves wait for: "
        + ", ".join(f"{name} {cycles / waiting:.0%}" for name, cycles in stalls if cycles),
        (
            f"  chip: {estimate.workgroups} workgroups in {estimate.rounds} rounds, "
            f"{estimate.cycles:.0f} cycles"
        ),
        (
            f"  time: {estimate.seconds * 1e3:.3f} ms, give or take {estimate.uncertainty:.0%}: "
            f"the cycles at {estimate.clock / 1e6:.0f} MHz, "
            f"and {estimate.ends_seconds * 1e3:.3f} ms of HBM before and behind matrix work; "
            f"HBM streams for {estimate.memory_seconds * 1e3:.3f} ms in all"
        ),
        (
            f"  busy over the whole launch: matrix units {estimate.matrix_busy:.1%}, vector ALUs "
            f"{estimate.vector_busy:.1%}"
        ),
        f"  workgroups wait for each other for {estimate.waiting:.1%} of their time",
        f"  its workgroups: {estimate.basis}",
        "assumptions:",
        *(
            fill(f"  - {sentence}", _WIDEST_LINE, subsequent_indent="    ")
            for sentence in profile.assumptions()
        ),
    ]
