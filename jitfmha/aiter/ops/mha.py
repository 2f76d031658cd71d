"""The place of AITER's attention functions, for code that imports them from there."""

from __future__ import annotations

from .. import *  # noqa: F403 - the same names
from .. import __all__ as __all__
from ..passes import _flash_attn_backward as _flash_attn_backward
from ..passes import _flash_attn_forward as _flash_attn_forward
from ..passes import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from ..passes import _flash_attn_varlen_forward as _flash_attn_varlen_forward

# Private, and imported by libraries nevertheless.
OFFERED = (
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
)
