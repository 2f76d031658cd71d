"""The place of AITER's function of this name."""

from __future__ import annotations

from ....sparse import unified_attention_sparse_mla

__all__ = ["unified_attention_sparse_mla"]
