"""What changes builds an entry of its own, and the old one stays usable."""

from __future__ import annotations

from rigs.cache_faults import Extent, upgrades

from .conftest import check_outcome


def test_upgrades(extent: Extent) -> None:
    check_outcome(upgrades.run(extent, print))
