"""The place of AITER's attention functions, for code that imports them from there."""

from __future__ import annotations

from .. import *  # noqa: F403 - the same names
from .. import __all__ as __all__
