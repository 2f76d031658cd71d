"""Rules about which calls a family's kernels serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..amd.chips import Arch
from ..planning.plan import Reason
from ..problem.problem import Problem


class Rule(NamedTuple):
    """One thing that must hold of a call, as a function with a name that says it.

    Attributes:
        reasons: for every way in which a call breaks it, a sentence for its caller.
        source: where the rule comes from: a document, a file that states it, or a measurement.
    """

    reasons: Callable[[Problem, Arch], Iterator[Reason]]
    source: str

    @property
    def name(self) -> str:
        return self.reasons.__name__


def reasons_of(rules: Iterable[Rule], problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Why a call is not served, by any of the rules."""
    for rule in rules:
        yield from rule.reasons(problem, arch)
