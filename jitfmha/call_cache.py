"""What calls leave behind for later ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

_Kept = TypeVar("_Kept")
_MOST_KEPT = 4096


class CallCache:
    """Prepared calls and kinds of calls by their keys. A target that is put in place has its own.

    Attributes:
        prepared: calls of which everything but the tensors' addresses is settled.
        kinds: calls that differ in lengths and strides only.
    """

    __slots__ = ("kinds", "prepared")

    def __init__(self) -> None:
        self.prepared: dict[Hashable, Any] = {}
        self.kinds: dict[Hashable, Any] = {}

    def clear(self) -> None:
        """Forget everything: later calls are checked and planned again."""
        self.prepared.clear()
        self.kinds.clear()


def keep(kept: dict[Hashable, _Kept], key: Hashable, value: _Kept) -> None:
    """Keep ``value``; where there are too many, they are all forgotten before."""
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = value
