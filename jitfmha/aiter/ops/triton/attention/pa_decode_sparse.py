"""The place of AITER's function of this name."""

from __future__ import annotations

from ....sparse import pa_decode_sparse

__all__ = ["pa_decode_sparse"]
