"""The builder is killed: the next caller is not held up, and nothing piles up."""

from __future__ import annotations

from rigs.cache_faults import Extent, killed_builders

from .conftest import check_outcome


def test_killed_builders(extent: Extent, seed: int) -> None:
    check_outcome(killed_builders.run(extent, print, seed))
