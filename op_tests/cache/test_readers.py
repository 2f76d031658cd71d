"""Readers load while others publish, rebuild, clear and evict."""

from __future__ import annotations

from rigs.cache_faults import Extent, readers

from .conftest import check_outcome


def test_readers(extent: Extent, seed: int) -> None:
    check_outcome(readers.run(extent, print, seed))
