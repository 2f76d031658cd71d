"""Every scenario of the rigs, over the extent that the run asks for."""

import pytest
from rigs.cache_faults import FAULTS, Extent, scenario


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault, request, seed):
    """Every check holds, there is at least one, and every count is within its bar.

    The long form of a scenario with ``--exhaustive``, else the short one. What takes how many times
    as long as another is for the cache suite to say: here other tests run beside it.
    """
    extent = Extent.LONG if request.config.getoption("--exhaustive") else Extent.SHORT
    outcome = scenario(fault)(extent, print, seed)
    assert outcome.failures == []
    assert outcome.attempts > 0
    assert [figure for figure in outcome.figures if not figure.met and figure.unit != "x"] == []
