"""What a whole launch takes on the chip, from the workgroups of it that were timed.

The timed ones lie on lines along the axes of the grid, and anywhere in it
(csrc_templates/emulator/profile/sample.cpp). Those that were not timed are predicted as the sum of
one term for each axis, read off the lines; the ones anywhere tell how well that works, and stand
for the others where it does not. Then all workgroups are put on the compute units in the order of
the launch.

Cycles become a time by the clock that the chip keeps up with its matrix units as busy as they are.
What HBM moves while matrix units work is in the cycles, as far as it does not hide behind that
work: a unit's share of HBM is a part of the model of a unit (csrc_templates/emulator/profile/).
Workgroups that wait for what others store are timed as if nobody had to wait, all of them. Where
such a workgroup is at a wait, on the compute units, all of it stands still until the others have
come to their stores; the load that sees them goes out then, so that its way there and back counts.
Where it has looked before, and a look at the same place in vain is what makes it wait, what it does
depends on when it looked on the chip.
What it moves before and behind them is added, because it hides behind nothing: workgroups begin
and end together, and then all of them load what is theirs alone, or store it. No launch takes less
than HBM does to stream what it touches.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..amd.chips import SIMDS
from .rates import ChipRates

_MOST_ERROR = 0.1
_FEWEST_ANYWHERE = 4

Id = tuple[int, int, int]


@dataclass(frozen=True)
class Timing:
    """One compute unit, by the model.

    Attributes:
        workgroups: copies of one workgroup that ran on it together.
        cycles: until the last of them had ended.
        matrix_busy: share of the cycles in which a SIMD's matrix unit worked.
        vector_busy: share in which a SIMD's vector ALU worked.
        lds_busy: share in which the LDS banks worked.
        l1_busy: share in which L1 delivered.
        l1_hits: share of the cache lines that loads asked for which L1 had, or had asked for.
        lines_at_ends: that HBM moves before and behind the matrix work of a workgroup.
        stalls: cycles in which waves waited, summed over waves, by what they waited for.
    """

    workgroups: int
    cycles: int
    matrix_busy: float
    vector_busy: float
    lds_busy: float
    l1_busy: float
    l1_hits: float
    lines_at_ends: float
    stalls: Mapping[str, int]


@dataclass(frozen=True)
class Event:
    """Where a workgroup waits for others, or others for it.

    Attributes:
        cycles: since it began, if it never had to wait.
        store: number of what it stores then; -1 where it waits, or looks.
        waits_for: numbers of the stores by others that it waits for.
        look: where it looks whether they are there before it waits, and where it waits then, the
            look's number; otherwise -1.
        poll_cycles: that a wait takes from the stores on, where the look came too early.
    """

    cycles: int
    store: int
    waits_for: tuple[int, ...]
    look: int = -1
    poll_cycles: int = 0


@dataclass(frozen=True)
class TimedWorkgroup:
    """A workgroup of the sample, by its number (x fastest) and id (x, y, z).

    ``timing`` is None where there is none, and then ``why_not`` says why. ``events`` come in the
    order of their cycles.
    """

    number: int
    id: Id
    instructions: int
    timing: Timing | None
    why_not: str
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """A whole launch on the chip, by the model.

    Attributes:
        workgroups: of the launch.
        rounds: in which the compute units would run them if all took equally long.
        cycles: from the first workgroup's begin to the last one's end, without `ends_seconds`.
        clock: cycles a second that the chip keeps up with its matrix units as busy as they are.
        memory_seconds: in which HBM streams the memory that the launch may touch, once.
        ends_seconds: the part of them before and behind the matrix work of workgroups.
        seconds: cycles over clock, and `ends_seconds`; at least `memory_seconds`.
        uncertainty: standard deviation of `seconds` as a share, from published times that nothing
            was fitted to.
        matrix_busy: share of the cycles in which the chip's matrix units worked.
        vector_busy: the same of the vector ALUs.
        waiting: share of the time of workgroups in which they wait for each other.
        basis: how workgroups that were not timed were predicted, in words.
    """

    workgroups: int
    rounds: int
    cycles: float
    clock: float
    memory_seconds: float
    ends_seconds: float
    seconds: float
    uncertainty: float
    matrix_busy: float
    vector_busy: float
    waiting: float
    basis: str


@dataclass(frozen=True)
class _Cost:
    """What one workgroup takes: its slot's time, work of the four SIMDs together, and lines."""

    cycles: float
    matrix: float
    vector: float
    lines_at_ends: float
    events: tuple[Event, ...] = ()

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.cycles + other.cycles,
            self.matrix + other.matrix,
            self.vector + other.vector,
            self.lines_at_ends + other.lines_at_ends,
        )

    def scaled(self, factor: float) -> _Cost:
        return _Cost(
            self.cycles * factor,
            self.matrix * factor,
            self.vector * factor,
            self.lines_at_ends * factor,
        )


def estimate_launch(
    timed: Sequence[TimedWorkgroup],
    *,
    grid: Id,
    workgroups: int,
    compute_units: int,
    xcds: int,
    xcd_engines: int,
    workgroups_per_unit: int,
    chip: ChipRates,
    line_bytes: int,
    memory_bytes: float = 0,
) -> Estimate | None:
    """The estimate of a launch of `workgroups`.

    None where a workgroup of the sample has no timing, and where one has no room on the chip before
    one ends that waits for it.

    Args:
        timed: the sample, workgroup (0, 0, 0) among them.
        grid: workgroups that were launched; where they are not as many as `workgroups`, the
            sample stands for all.
        xcd_engines: shader engines of each XCD.
        workgroups_per_unit: that share a compute unit.
        memory_bytes: that HBM moves at least.
    """
    costs: dict[Id, _Cost] = {}
    for workgroup in timed:
        timing = workgroup.timing
        if timing is None:
            return None
        share = SIMDS * timing.cycles / timing.workgroups
        costs[workgroup.id] = _Cost(
            timing.cycles,
            timing.matrix_busy * share,
            timing.vector_busy * share,
            timing.lines_at_ends,
            workgroup.events,
        )
    if not costs:
        return None
    every, basis = _predict(costs, grid, workgroups)
    schedule = _Schedule(every, len(costs), compute_units, xcds, xcd_engines, workgroups_per_unit)
    if not schedule.all_have_ended:
        return None
    cycles = schedule.now
    available = SIMDS * compute_units * cycles
    matrix_busy = sum(cost.matrix for cost in every) / available
    clock = chip.clock.at(matrix_busy)
    memory_seconds = memory_bytes / chip.streaming
    ends_seconds = sum(cost.lines_at_ends for cost in every) * line_bytes / chip.streaming
    return Estimate(
        workgroups=workgroups,
        rounds=math.ceil(workgroups / (compute_units * workgroups_per_unit)),
        cycles=cycles,
        clock=clock,
        memory_seconds=memory_seconds,
        ends_seconds=ends_seconds,
        seconds=max(cycles / clock + ends_seconds, memory_seconds),
        uncertainty=chip.scatter,
        matrix_busy=matrix_busy,
        vector_busy=sum(cost.vector for cost in every) / available,
        waiting=schedule.waited / (schedule.waited + sum(cost.cycles for cost in every)),
        basis=basis,
    )


def _predict(costs: Mapping[Id, _Cost], grid: Id, workgroups: int) -> tuple[list[_Cost], str]:
    """The cost of every workgroup in the order of the launch, and where they come from."""
    total = math.prod(grid)
    if workgroups == total == len(costs):
        return [costs[_id_of(n, grid)] for n in range(total)], "all of them were timed"
    if workgroups != total:
        return _repeated(list(costs.values()), workgroups), (
            f"the {len(costs)} timed ones of those that were launched stand for all"
        )
    axes = _axes(costs, grid)
    anywhere = [place for place in costs if sum(index != 0 for index in place) > 1]
    error = _error({place: costs[place] for place in anywhere}, axes)
    if error <= _MOST_ERROR or len(anywhere) < _FEWEST_ANYWHERE:
        text = (
            f"{len(costs)} were timed and the others predicted from their place in the grid; at "
            f"{len(anywhere)} timed ones the prediction is off by {error:.1%} on average"
        )
        predicted = [_sum(axes, _id_of(n, grid)) for n in range(total)]
        return [costs.get(_id_of(n, grid), cost) for n, cost in enumerate(predicted)], text
    return _repeated([costs[place] for place in anywhere], workgroups), (
        f"{len(anywhere)} were timed anywhere in the grid and stand for all, because their place "
        f"does not say what they take: a prediction from it is off by {error:.1%} on average"
    )


def _repeated(costs: Sequence[_Cost], workgroups: int) -> list[_Cost]:
    return [costs[n % len(costs)] for n in range(workgroups)]


def _id_of(number: int, grid: Id) -> Id:
    return number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])


def _axes(costs: Mapping[Id, _Cost], grid: Id) -> list[list[_Cost]]:
    """Give the term that each axis and index adds; the first axis has that of (0, 0, 0)."""
    base = costs[0, 0, 0]
    axes = []
    for axis, length in enumerate(grid):
        line = {
            place[axis]: cost
            for place, cost in costs.items()
            if all(index == 0 for other, index in enumerate(place) if other != axis)
        }
        terms = [_on_line(line, index) for index in range(length)]
        axes.append(terms if axis == 0 else [term + base.scaled(-1) for term in terms])
    return axes


def _on_line(line: Mapping[int, _Cost], index: int) -> _Cost:
    known = sorted(line)
    above = bisect_right(known, index)
    low = known[above - 1]
    if low == index or above == len(known):
        return line[low]
    share = (index - low) / (known[above] - low)
    return line[low].scaled(1 - share) + line[known[above]].scaled(share)


def _sum(axes: Sequence[Sequence[_Cost]], place: Id) -> _Cost:
    x, y, z = (axis[index] for axis, index in zip(axes, place, strict=True))
    return x + y + z


def _error(costs: Mapping[Id, _Cost], axes: Sequence[Sequence[_Cost]]) -> float:
    """The mean difference between cycles and their prediction, over the mean of the cycles."""
    off = sum(abs(_sum(axes, place).cycles - cost.cycles) for place, cost in costs.items())
    return off / sum(cost.cycles for cost in costs.values()) if costs else 0.0


class _Schedule:
    """The launch on the chip: when the last workgroup ends, and for how long they wait.

    Each goes to the next XCD, there to the shader engine whose turn it is, which does not depend on
    where there is room, and of that to the first free slot. Engines have turns like their units.
    """

    def __init__(
        self,
        costs: Sequence[_Cost],
        timed: int,
        compute_units: int,
        xcds: int,
        xcd_engines: int,
        workgroups_per_unit: int,
    ) -> None:
        self.now = 0.0
        self.waited = 0.0
        self._costs = costs
        self._timed = timed
        self._ended = 0
        # Time, workgroup, how many of its events are behind it, and when it would have begun if
        # it had not waited for anybody.
        self._next: list[tuple[float, int, int, float]] = []
        # When, by repetition or workgroup, and number.
        self._stored: dict[tuple[int, int], float] = {}
        self._looked: dict[tuple[int, int], float] = {}
        self._waiting: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
        self._queue_of: list[Iterator[int]] = [iter(())] * len(costs)
        used = min(xcds, compute_units)
        for xcd in range(used):
            units = len(range(xcd, compute_units, used))
            queues: list[list[int]] = [[] for _ in range(xcd_engines)]
            for turn, number in enumerate(range(xcd, len(costs), used)):
                queues[turn % units % xcd_engines].append(number)
            for engine, queue in enumerate(queues):
                left = iter(queue)
                for number in queue:
                    self._queue_of[number] = left
                for _ in range(workgroups_per_unit * len(range(engine, units, xcd_engines))):
                    self._begin_one_of(left)
        while self._next:
            self.now, number, behind, begin = heapq.heappop(self._next)
            self._pass(number, behind, begin)

    @property
    def all_have_ended(self) -> bool:
        return self._ended == len(self._costs)

    def _begin_one_of(self, queue: Iterator[int]) -> None:
        number = next(queue, None)
        if number is not None:
            self._go_on(number, 0, self.now)

    def _go_on(self, number: int, behind: int, begin: float) -> None:
        cost = self._costs[number]
        at_end = behind == len(cost.events)
        cycles = cost.cycles if at_end else cost.events[behind].cycles
        heapq.heappush(self._next, (begin + cycles, number, behind, begin))

    def _pass(self, number: int, behind: int, begin: float) -> None:
        events = self._costs[number].events
        if behind == len(events):
            self._ended += 1
            self._begin_one_of(self._queue_of[number])
            return
        event = events[behind]
        repetition = number // self._timed  # of those that were launched
        if event.store >= 0:
            self._stored[repetition, event.store] = self.now
            for waiting in self._waiting.pop((repetition, event.store), ()):
                self._pass(*waiting)
        for store in event.waits_for:
            if (repetition, store) not in self._stored:
                self._waiting.setdefault((repetition, store), []).append((number, behind, begin))
                return
        late = self.now - (begin + event.cycles)
        if event.look >= 0 and not event.waits_for:
            self._looked[number, event.look] = self.now
        elif event.look >= 0:
            stored = max(self._stored[repetition, store] for store in event.waits_for)
            late += event.poll_cycles * (stored > self._looked[number, event.look])
        self.waited += late
        self._go_on(number, behind + 1, begin + late)
