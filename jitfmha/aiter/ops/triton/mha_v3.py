"""The place of AITER's functions with the arguments of flash-attn 3, in its older versions."""

from __future__ import annotations

from ...mha_v3 import *  # noqa: F403 - the same names
from ...mha_v3 import __all__ as __all__
