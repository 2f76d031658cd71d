"""The place of AITER's functions of these names in its older versions."""

from __future__ import annotations

from .attention.mha import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
