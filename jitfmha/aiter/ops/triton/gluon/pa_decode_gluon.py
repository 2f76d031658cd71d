"""The place of AITER's function of this name."""

from __future__ import annotations

from ....decode import get_recommended_splits, pa_decode_gluon

__all__ = ["get_recommended_splits", "pa_decode_gluon"]
