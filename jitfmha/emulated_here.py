"""What CPU tensors run on here, apart from the emulator itself, which few processes import."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .emulator import EmulatedRun

CURRENT_RUN: ContextVar[EmulatedRun | None] = ContextVar("jitfmha_emulated_run", default=None)
"""Set inside of ``emulate``."""

emulated_run_here = CURRENT_RUN.get
"""The run of the ``emulate`` around, or None, at no cost to speak of. It does not know of
JITFMHA_EMULATE, which stays what it is and so need not be in the key of a cache."""


def may_be_emulated() -> bool:
    """False where CPU tensors run on the CPU for certain, and nobody needs the emulator."""
    return emulated_run_here() is not None or bool(os.environ.get("JITFMHA_EMULATE"))
