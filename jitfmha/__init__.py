"""Fused multi-head attention for AMD Instinct GPUs, compiled on first use."""

from __future__ import annotations

from .aiter import fmha_v3_fwd, fmha_v3_varlen_fwd
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .interface import explain, fmha_fwd
from .jit.errors import BuildError, CacheError, CompilerNotFound
from .warmup import WarmedLauncher, warmup

__version__ = "0.1.0"
__all__ = [
    "BuildError",
    "CacheError",
    "CompilerNotFound",
    "WarmedLauncher",
    "__version__",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "fmha_fwd",
    "fmha_v3_fwd",
    "fmha_v3_varlen_fwd",
    "warmup",
]
