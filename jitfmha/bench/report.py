"""What a suite returns: comparisons, and the rows that are held against a bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


class SuiteNotAvailable(RuntimeError):
    """A suite lacks what it measures, or is itself in a checkout only; the message says which."""


@dataclass(frozen=True)
class Comparison:
    """One problem, timed here and with a competitor, in alternation; of times the medians."""

    what: str
    against: str
    seconds: float
    against_seconds: float
    speedup: float  # the median over pairs of neighbouring measurements
    gflops: float  # counting only what the mask leaves
    error: float  # largest absolute difference between the two results


@dataclass(frozen=True)
class Row:
    """One bar. ``unit``, for example "x" or "ms", is that of ``measured`` and ``bar`` alike."""

    what: str
    measured: float
    bar: float
    unit: str
    at_least: bool

    @property
    def met(self) -> bool:
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


@dataclass(frozen=True)
class Figure:
    """What was measured for its own sake."""

    what: str
    measured: float
    unit: str


@dataclass
class Report:
    """A run of a suite: its rows with bars, its comparisons, and figures without bars."""

    suite: str
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    @property
    def met(self) -> bool:
        return all(row.met for row in self.rows)

    def at_least(self, what: str, measured: float, bar: float, unit: str) -> None:
        self.rows.append(Row(what, measured, bar, unit, at_least=True))

    def at_most(self, what: str, measured: float, bar: float, unit: str) -> None:
        self.rows.append(Row(what, measured, bar, unit, at_least=False))

    def figure(self, what: str, measured: float, unit: str) -> None:
        self.figures.append(Figure(what, measured, unit))

    def to_dict(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "machine": self.machine,
            "met": self.met,
            "rows": [{**asdict(row), "met": row.met} for row in self.rows],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "figures": [asdict(figure) for figure in self.figures],
        }


Progress = Callable[[str], None]
Suite = Callable[..., Report]
