"""An entry with any kind of damage is noticed, reported once and built again."""

from __future__ import annotations

from rigs.cache_faults import Extent, damaged_files

from .conftest import check_outcome


def test_damaged_files(extent: Extent, seed: int) -> None:
    check_outcome(damaged_files.run(extent, print, seed))
