"""Clocks that jump, and files with times of another age."""

from __future__ import annotations

from rigs.cache_faults import Extent, clocks

from .conftest import check_outcome


def test_clocks(extent: Extent, seed: int) -> None:
    check_outcome(clocks.run(extent, print, seed))
