"""The place of AITER's functions for keys in pages and for latent attention."""

from __future__ import annotations

from ..decode import (
    get_pa_metadata_info_v1,
    get_pa_metadata_v1,
    pa_decode_gluon,
    pa_persistent_fwd,
    paged_attention_common,
    paged_attention_rocm,
)
from ..mla_metadata import (
    get_mla_metadata_info_v1,
    get_mla_metadata_v1,
    get_ps_metadata_info_v1,
    get_ps_metadata_v1,
    mla_prefill_ps_asm_fwd,
    mla_reduce_v1,
)
from ..paged import pa_fwd_asm, paged_attention_ragged, paged_attention_v1

__all__ = [
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "get_pa_metadata_info_v1",
    "get_pa_metadata_v1",
    "get_ps_metadata_info_v1",
    "get_ps_metadata_v1",
    "mla_prefill_ps_asm_fwd",
    "mla_reduce_v1",
    "pa_decode_gluon",
    "pa_fwd_asm",
    "pa_persistent_fwd",
    "paged_attention_common",
    "paged_attention_ragged",
    "paged_attention_rocm",
    "paged_attention_v1",
]
