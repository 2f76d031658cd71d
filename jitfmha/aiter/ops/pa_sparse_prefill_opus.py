"""The place of AITER's function of this name."""

from __future__ import annotations

from ..sparse import pa_sparse_prefill_opus

__all__ = ["pa_sparse_prefill_opus"]
