"""How much of a scenario to run, and what it found."""

import random
from dataclasses import dataclass, field
from enum import Enum

from jitfmha.bench.report import Progress, Row


class Extent(Enum):
    """``SHORT`` takes seconds (tests, ``--quick``), ``LONG`` is what the bars mean."""

    SHORT = "short"
    LONG = "long"


@dataclass
class Outcome:
    """What one scenario found.

    Attributes:
        attempts: how often something could have gone wrong.
        failures: a sentence for each time that it did.
        figures: numbers that have bars of their own.
    """

    attempts: int = 0
    failures: list[str] = field(default_factory=list)
    figures: list[Row] = field(default_factory=list)

    def at_most(self, what: str, measured: float, bar: float, unit: str) -> None:
        """Add a figure with the bar that it must not exceed."""
        self.figures.append(Row(what, measured, bar, unit, at_least=False))

    def expect(self, holds: bool, sentence: str) -> None:
        """Count an attempt, and a failure described by ``sentence`` unless it ``holds``."""
        self.attempts += 1
        if not holds:
            self.failures.append(sentence)


def reported_seed(scenario: str, progress: Progress, seed: int | None) -> int:
    """The seed, by default a fresh one; ``progress`` gets it, so that a run can be repeated."""
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    progress(f"{scenario.rpartition('.')[2]}: seed {seed}")
    return seed
