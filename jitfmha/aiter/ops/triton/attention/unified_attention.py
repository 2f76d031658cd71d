"""The place of AITER's function of this name."""

from __future__ import annotations

from ....paged import unified_attention

__all__ = ["unified_attention"]
