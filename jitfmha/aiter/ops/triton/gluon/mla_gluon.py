"""The place of AITER's function of this name."""

from __future__ import annotations

from ....decode import mla_gluon

__all__ = ["mla_gluon"]
