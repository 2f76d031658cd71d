"""A cache at its limit: what goes, and what stays."""

from __future__ import annotations

from rigs.cache_faults import Extent, limit

from .conftest import check_outcome


def test_limit(extent: Extent, seed: int) -> None:
    check_outcome(limit.run(extent, print, seed))
