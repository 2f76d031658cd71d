"""The place of AITER's function of this name in its older versions."""

from __future__ import annotations

from ...paged import unified_attention

__all__ = ["unified_attention"]
