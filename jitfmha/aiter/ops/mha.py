"""The place of AITER's attention functions, for code that imports them from there."""

from __future__ import annotations

from .. import (
    flash_attn_fp8_pertensor_func,
    flash_attn_func,
    flash_attn_varlen_fp8_pertensor_func,
    flash_attn_varlen_func,
    fmha_v3_bwd,
    fmha_v3_fwd,
    fmha_v3_varlen_bwd,
    fmha_v3_varlen_fwd,
    mha_batch_prefill,
    mha_batch_prefill_func,
    mha_bwd,
    mha_fwd,
    mha_varlen_bwd,
    mha_varlen_fwd,
)

__all__ = [
    "flash_attn_fp8_pertensor_func",
    "flash_attn_func",
    "flash_attn_varlen_fp8_pertensor_func",
    "flash_attn_varlen_func",
    "fmha_v3_bwd",
    "fmha_v3_fwd",
    "fmha_v3_varlen_bwd",
    "fmha_v3_varlen_fwd",
    "mha_batch_prefill",
    "mha_batch_prefill_func",
    "mha_bwd",
    "mha_fwd",
    "mha_varlen_bwd",
    "mha_varlen_fwd",
]
