"""The clock that a chip keeps up, from ``clocks.json``, which names the sources.

Power limits it, and energy is what work takes: a share of the time goes with all cycles, another
one with those of matrix units. So the time of a cycle is on the straight line through those of the
outermost points that were measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from .chips import chip
from .clock_speed import ClockSpeed

_FILE = Path(__file__).with_name("clocks.json")


@dataclass(frozen=True)
class Clock:
    """What limits the clock of a chip.

    Attributes:
        peak: in Hz.
        points: measured ones: the share of a launch in which matrix units are busy, and Hz.
        activity: fitted: what the matrix work of attention counts for, beside that of the points.
        measured_on: the chip of the points.
    """

    peak: float
    points: tuple[tuple[float, float], ...]
    activity: float
    measured_on: str

    def at(self, matrix_busy: float) -> float:
        """The clock that a chip keeps up with its matrix units busy for this share, in Hz."""
        return 1 / self.speed.seconds(1.0, matrix_busy)

    @cached_property
    def speed(self) -> ClockSpeed:
        """What a launch takes by its cycles."""
        (low, fast), (high, slow) = self.points[0], self.points[-1]
        of_matrix_work = self.activity * (1 / slow - 1 / fast) / (high - low)
        return ClockSpeed(
            self.peak, 1 / fast - of_matrix_work * low / self.activity, of_matrix_work
        )


@cache
def clock_of(name: str) -> Clock:
    """The clock of a chip, such as "MI300X"; ``ValueError`` where its peak is not published."""
    peak = chip(name).peak_clock_mhz
    if peak is None:
        raise ValueError(f"{name} has no modelled times: its peak clock is not published")
    file: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))["chips"]
    measured_on = file[name].get("clock_of", name)
    measured = file[measured_on]
    return Clock(
        peak=peak * 1e6,
        points=tuple((busy, mhz * 1e6) for busy, mhz in measured["clock"]),
        activity=measured["activity"],
        measured_on=measured_on,
    )
