"""How much of each scenario the tests run, and what they require of every outcome."""

from __future__ import annotations

import pytest
from rigs.cache_faults import Extent, Outcome


@pytest.fixture
def extent(request: pytest.FixtureRequest) -> Extent:
    """The long form of a scenario with ``--exhaustive``, else the short one."""
    return Extent.LONG if request.config.getoption("--exhaustive") else Extent.SHORT


def check_outcome(outcome: Outcome) -> None:
    """Every check held, there was at least one, and every figure is within its bar."""
    assert outcome.failures == []
    assert outcome.attempts > 0
    missed = [figure for figure in outcome.figures if figure.measured > figure.bar]
    assert missed == []
