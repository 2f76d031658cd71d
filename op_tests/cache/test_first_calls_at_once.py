"""Many processes make the first call at once: one builds, the others wait and say for whom."""

from __future__ import annotations

from rigs.cache_faults import Extent, first_calls_at_once

from .conftest import check_outcome


def test_first_calls_at_once(extent: Extent, seed: int) -> None:
    check_outcome(first_calls_at_once.run(extent, print, seed))
