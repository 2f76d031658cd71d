"""Which calls a family's kernels serve: sets of features, and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..amd.chips import Arch
from ..planning.plan import Reason
from ..problem.features import Feature
from ..problem.problem import Problem

ATTENTION = frozenset(
    {
        Feature.GROUP_MODE,
        Feature.PADDED_SEQUENCES,
        Feature.CAUSAL_MASK,
        Feature.TOP_LEFT_MASK,
        Feature.LSE,
    }
)
"""What all families serve beside data types."""

BACKWARD = frozenset({Feature.BACKWARD, Feature.DETERMINISTIC})
"""What those serve that have backward passes."""


class Rule(NamedTuple):
    """One thing that must hold of a call, as a function with a name that says it.

    It gives a sentence for each way in which a call breaks it. ``source`` is where the rule comes
    from: a document, a file that states it, or a measurement.
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
