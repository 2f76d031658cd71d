"""What the cost model takes things to cost, read from ``rates.json``, which names the sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..amd import chips

_FILE = Path(__file__).with_name("rates.json")


@dataclass(frozen=True)
class ChipRates:
    """What differs between chips of one architecture.

    Attributes:
        peak_clock: in Hz.
        clock_points: measured ones: the share of a launch in which matrix units are busy, and Hz.
        activity: fitted: what the matrix work of attention counts for, beside that of the points.
        clock_is_assumed: the points are another chip's.
        streaming: bytes a second that come out of HBM.
        scatter: of modelled times around published ones, as a share.
    """

    peak_clock: float
    clock_points: tuple[tuple[float, float], ...]
    activity: float
    clock_is_assumed: bool
    streaming: float
    scatter: float

    def clock_at(self, matrix_busy: float) -> float:
        """The clock that a chip keeps up with its matrix units busy for this share, in Hz.

        Power limits it, and energy is what work takes: a share of the time goes with all cycles,
        another one with those of matrix units. So the time of a cycle is on the straight line
        through those of the outermost points. At most the peak.
        """
        cycle = self.cycle + self.cycle_of_matrix_work * matrix_busy
        return min(self.peak_clock, 1 / cycle) if cycle > 0 else self.peak_clock

    @property
    def cycle(self) -> float:
        """Seconds of a cycle without matrix work, if the peak did not limit the clock."""
        busy, clock = self.clock_points[0]
        return 1 / clock - self.cycle_of_matrix_work * busy / self.activity

    @property
    def cycle_of_matrix_work(self) -> float:
        """Seconds that a cycle takes longer where matrix units are busy all the time."""
        (low, fast), (high, slow) = self.clock_points[0], self.clock_points[-1]
        return self.activity * (1 / slow - 1 / fast) / (high - low)


@cache
def rates_of(arch: chips.Arch) -> Mapping[str, int]:
    """Cycles and sizes by name, those of LDS that ``chips.json`` has among them."""
    facts = chips.architecture(arch)
    banks = {name: getattr(facts, name) for name in ("lds_read_banks", "lds_write_banks")}
    return MappingProxyType({**_file()["architectures"][arch], **banks})


@cache
def rates_of_chip(name: str) -> ChipRates:
    """The rates of a chip, such as "MI300X"; ``ValueError`` where its clock is not published."""
    chip = chips.chip(name)
    if chip.peak_clock_mhz is None or chip.streaming_gb_s is None:
        raise ValueError(f"{name} has no modelled times: its peak clock is not published")
    own = _file()["chips"][name]
    clocks = _file()["chips"][own.get("clock_of", name)]
    return ChipRates(
        peak_clock=chip.peak_clock_mhz * 1e6,
        clock_points=tuple((busy, mhz * 1e6) for busy, mhz in clocks["clock"]),
        activity=clocks["activity"],
        clock_is_assumed="clock_of" in own,
        streaming=chip.streaming_gb_s * 1e9,
        scatter=clocks["scatter"],
    )


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content
