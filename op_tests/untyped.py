"""The public functions without their annotations: tests also pass what those forbid."""

from typing import Any

import jitfmha

explain: Any = jitfmha.explain
explain_bwd: Any = jitfmha.explain_bwd
fmha_bwd: Any = jitfmha.fmha_bwd
fmha_fwd: Any = jitfmha.fmha_fwd
fmha_v3_fwd: Any = jitfmha.fmha_v3_fwd
fmha_v3_varlen_fwd: Any = jitfmha.fmha_v3_varlen_fwd
flash_attn_func: Any = jitfmha.flash_attn_func
flash_attn_kvpacked_func: Any = jitfmha.flash_attn_kvpacked_func
flash_attn_qkvpacked_func: Any = jitfmha.flash_attn_qkvpacked_func
flash_attn_varlen_func: Any = jitfmha.flash_attn_varlen_func
flash_attn_varlen_kvpacked_func: Any = jitfmha.flash_attn_varlen_kvpacked_func
flash_attn_varlen_qkvpacked_func: Any = jitfmha.flash_attn_varlen_qkvpacked_func
flash_attn_with_kvcache: Any = jitfmha.flash_attn_with_kvcache
mha_fwd_splitkv: Any = jitfmha.mha_fwd_splitkv
mla_absorbed_fwd: Any = jitfmha.mla_absorbed_fwd
mla_fwd: Any = jitfmha.mla_fwd
validate_config: Any = jitfmha.validate_config
validate_specification: Any = jitfmha.validate_specification
warmup: Any = jitfmha.warmup
