"""Fused multi-head attention for AMD Instinct GPUs, compiled on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .aiter import fmha_v3_bwd, fmha_v3_fwd, fmha_v3_varlen_bwd, fmha_v3_varlen_fwd
from .dropout import dropout_randval, new_rng_state
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .interface import explain, fmha_bwd, fmha_fwd
from .jit.errors import BuildError, CacheError, CompilerNotFound
from .kv_cache import flash_attn_with_kvcache
from .mla import mla_absorbed_fwd, mla_fwd
from .version import __version__
from .warmup import WarmedLauncher, warmup

if TYPE_CHECKING:
    from .amd.runtime import HipError
    from .emulator import emulate

__all__ = [
    "BuildError",
    "CacheError",
    "CompilerNotFound",
    "HipError",
    "WarmedLauncher",
    "__version__",
    "dropout_randval",
    "emulate",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fmha_bwd",
    "fmha_fwd",
    "fmha_v3_bwd",
    "fmha_v3_fwd",
    "fmha_v3_varlen_bwd",
    "fmha_v3_varlen_fwd",
    "mla_absorbed_fwd",
    "mla_fwd",
    "new_rng_state",
    "warmup",
]

_HOMES = {"HipError": ".amd.runtime", "emulate": ".emulator"}


def __getattr__(name: str) -> object:
    # Imported when first asked for: most programs run without a GPU and emulate none.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
