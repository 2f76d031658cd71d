"""A stand-in for the package ``flash_attn``, version 2: the same names at the same places.

``import jitfmha.flash_attn as flash_attn`` is enough where a program imports it itself; for code
that imports ``flash_attn`` by that name there is :func:`jitfmha.install_as`. What the functions
take and return is said in :mod:`jitfmha.flash_attn.flash_attn_interface`.

``__version__`` is that of flash-attn: the last release whose functions these are, with their names,
order and defaults. Libraries read it to find out which arguments there are, and some refuse what is
newer than they know. That of this package is ``jitfmha.__version__``.
"""

from __future__ import annotations

from . import flash_attn_interface
from .flash_attn_interface import *  # noqa: F403 - the same names

__all__ = ["__version__"]
__all__ += flash_attn_interface.__all__

__version__ = "2.8.3"
