"""Hostile values in the environment never reach a shell."""

from __future__ import annotations

from rigs.cache_faults import Extent, hostile_environment

from .conftest import check_outcome


def test_hostile_environment(extent: Extent, seed: int) -> None:
    check_outcome(hostile_environment.run(extent, print, seed))
