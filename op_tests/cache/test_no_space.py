"""Full disks, quotas, and places that are missing or cannot be written to."""

from __future__ import annotations

from rigs.cache_faults import Extent, no_space

from .conftest import check_outcome


def test_no_space(extent: Extent, seed: int) -> None:
    check_outcome(no_space.run(extent, print, seed))
