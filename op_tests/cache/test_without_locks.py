"""A file system without locks: many processes, one entry."""

from __future__ import annotations

from rigs.cache_faults import Extent, without_locks

from .conftest import check_outcome


def test_without_locks(extent: Extent) -> None:
    check_outcome(without_locks.run(extent, print))
