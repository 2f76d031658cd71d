"""Functions of other packages: names, order and defaults of arguments, as those declare them."""

import inspect

import pytest

import jitfmha
from jitfmha.aiter.ops.triton import unified_attention
from jitfmha.flash_attn import flash_attn_interface

_V3 = "q_descale=None, k_descale=None, v_descale=None"
_PADDED = "cu_seqlens_q_padded=None, cu_seqlens_k_padded=None"
_GROUPS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_WINDOW = "is_causal, window_size_left, window_size_right"
_RETURNS = "return_softmax_lse, return_dropout_randval"
_BATCH = f"q, k, v, dropout_p, softmax_scale, {_WINDOW}"
_GROUP = (
    f"q, k, v, {_GROUPS}, min_seqlen_q, dropout_p, softmax_scale, logits_soft_cap, zero_tensors, "
    f"{_WINDOW}"
)
_MODELS = (
    "causal=False, window_size=(-1, -1, 0), bias=None, alibi_slopes=None, deterministic={}, "
    "return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1"
)
_FP8 = "causal=False, window_size=(-1, -1, 0), softmax_scale=None, sink_ptr=None"
_BACKWARD = "dropout_p, softmax_scale, {}" + f"{_WINDOW}, deterministic"
_FORWARD_RESULTS = "dout, q, k, v, out, softmax_lse"
_GRADIENTS = "dq=None, dk=None, dv=None"
_RANDOM = "alibi_slopes=None, rng_state=None, gen=None"
_ATOMICS = "is_v3_atomic_fp32, how_v3_bf16_cvt"
_FLASH_ATTN = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)

_SIDES = "causal, window_size_left{0}, window_size_right{0}, softcap{1}, alibi_slopes{2}"
_PASS = "dropout_p, softmax_scale, " + _SIDES
_GRADIENTS_OF_PASS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
_PASSES = {
    "_flash_attn_forward": f"q, k, v, {_PASS.format('', '', '')}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {_GROUPS}, {_PASS.format('=-1', '=0.0', '=None')}, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0"
    ),
    "_flash_attn_backward": (
        f"{_GRADIENTS_OF_PASS}, {_PASS.format('', '', '')}, deterministic, rng_state=None"
    ),
    "_flash_attn_varlen_backward": (
        f"{_GRADIENTS_OF_PASS}, {_GROUPS}, {_PASS.format('', '', '')}, deterministic, "
        "rng_state=None, zero_tensors=False"
    ),
}
_CACHES = "out, workspace_buffer, query, key_cache, value_cache, scale"
_CACHE_KIND = (
    "alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap, k_scale, v_scale, "
    "fp8_out_scale=None, partition_size=256, mtp=1"
)
_LISTS = "qo_indptr, kv_indptr, kv_indices, kv_last_page_lens"

# Of flash-attn 2.8, and of AITER.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {_FLASH_ATTN}",
    "flash_attn_kvpacked_func": f"q, kv, {_FLASH_ATTN}",
    "flash_attn_qkvpacked_func": f"qkv, {_FLASH_ATTN}",
    # vLLM leaves cu_seqlens_k out beside a block table, and passes by name what stands behind *.
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        f"{_FLASH_ATTN}, block_table=None, *, seqused_k=None, out=None, return_softmax_lse=False, "
        "s_aux=None, num_splits=0, q_descale=None, k_descale=None, v_descale=None, "
        "output_scale=None, scheduler_metadata=None, fa_version=None, cp_world_size=1, cp_rank=0, "
        "cp_tot_seqused_k=None, q_v=None, dynamic_causal=None, mask_mod=None, aux_tensors=None"
    ),
    **{f"flash_attn.{name}": text for name, text in _PASSES.items()},
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_GROUPS}, {_FLASH_ATTN}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_FLASH_ATTN}",
    "aiter.flash_attn_func": (
        f"q, k, v, dropout_p=0.0, softmax_scale=None, {_MODELS.format(True)}, cu_seqlens_q=None, "
        "cu_seqlens_kv=None, sink_ptr=None, num_splits=0"
    ),
    # vLLM passes by name what stands behind *.
    "aiter.flash_attn_varlen_func": (
        f"q, k, v, {_GROUPS}, min_seqlen_q=0, dropout_p=0.0, softmax_scale=None, "
        f"logits_soft_cap=0.0, {_MODELS.format(False)}, block_table=None, out=None, {_PADDED}, "
        f"sink_ptr=None, *, {_V3}"
    ),
    "aiter.flash_attn_fp8_pertensor_func": f"q, k, v, q_descale, k_descale, v_descale, {_FP8}",
    "aiter.flash_attn_varlen_fp8_pertensor_func": (
        f"q, k, v, q_descale, k_descale, v_descale, {_GROUPS}, min_seqlen_q=0, "
        f"logits_soft_cap=0.0, {_FP8}"
    ),
    "fmha_v3_fwd": (
        f"{_BATCH}, {_RETURNS}, how_v3_bf16_cvt, out=None, bias=None, alibi_slopes=None, {_V3}, "
        "gen=None"
    ),
    "fmha_v3_varlen_fwd": (
        f"{_GROUP}, {_RETURNS}, how_v3_bf16_cvt, out=None, block_table=None, bias=None, "
        f"alibi_slopes=None, {_V3}, gen=None, {_PADDED}"
    ),
    "aiter.mha_fwd": (
        f"{_BATCH}, sink_size, {_RETURNS}, cu_seqlens_q=None, cu_seqlens_kv=None, out=None, "
        f"bias=None, alibi_slopes=None, {_V3}, sink_ptr=None, gen=None"
    ),
    "aiter.mha_varlen_fwd": (
        f"{_GROUP}, sink_size, {_RETURNS}, out=None, block_table=None, bias=None, "
        f"alibi_slopes=None, {_V3}, gen=None, {_PADDED}, sink_ptr=None"
    ),
    "aiter.mha_bwd": (
        f"{_FORWARD_RESULTS}, {_BACKWARD.format('')}, {_GRADIENTS}, dbias=None, bias=None, "
        f"{_RANDOM}, sink=None, d_sink=None"
    ),
    "aiter.fmha_v3_bwd": (
        f"{_FORWARD_RESULTS}, {_BACKWARD.format('')}, {_ATOMICS}, {_GRADIENTS}, {_RANDOM}"
    ),
    "aiter.mha_varlen_bwd": (
        f"{_FORWARD_RESULTS}, {_GROUPS}, {_BACKWARD.format('zero_tensors, ')}, {_GRADIENTS}, "
        f"{_RANDOM}, {_PADDED}, sink=None, d_sink=None"
    ),
    "aiter.fmha_v3_varlen_bwd": (
        f"{_FORWARD_RESULTS}, {_GROUPS}, {_BACKWARD.format('zero_tensors, ')}, {_ATOMICS}, "
        f"{_GRADIENTS}, {_RANDOM}, {_PADDED}"
    ),
    "aiter.fmha_fwd_bf16_opus_fwd": "q, k, v, softmax_scale, causal, out=None",
    "aiter.fmha_fwd_bf16_opus_varlen_fwd": (
        "q, k, v, softmax_scale, causal, seqstart_q, seqstart_k, max_seqlen_q, max_seqlen_k, "
        "out=None, seqstart_q_pad=None, seqstart_k_pad=None"
    ),
    "unified.unified_attention": (
        "q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, "
        "window_size, block_table, softcap, q_descale, k_descale, v_descale, q_scales=None, "
        "alibi_slopes=None, output_scale=None, qq_bias=None, sinks=None, shuffled_kv_cache=False, "
        "skip_reduce=False"
    ),
    "aiter.paged_attention_v1": (
        f"{_CACHES}, block_tables, cu_query_lens, context_lens, max_context_len, {_CACHE_KIND}, "
        "sliding_window=0"
    ),
    "aiter.paged_attention_ragged": (
        f"{_CACHES}, kv_indptr, kv_page_indices, kv_last_page_lens, block_size, "
        f"max_num_partitions, {_CACHE_KIND}"
    ),
    "aiter.pa_fwd_asm": (
        "Q, K, V, block_tables, context_lens, block_tables_stride0, max_qlen=1, K_QScale=None, "
        "V_QScale=None, out_=None, qo_indptr=None, high_precision=1, kernelName=None"
    ),
    "mla.mla_decode_fwd": (
        f"q, kv_buffer, o, {_LISTS}, max_seqlen_q, page_size=1, nhead_kv=1, sm_scale=None, "
        "logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, work_meta_data=None, "
        "work_indptr=None, work_info_set=None, reduce_indptr=None, reduce_final_map=None, "
        "reduce_partial_map=None, q_scale=None, kv_scale=None, intra_batch_mode=False, "
        "return_logits=False, return_lse=False, g_kv_indptr=None, cp_world_size=1, cp_rank=0, "
        "causal=True"
    ),
    "mla.mla_prefill_fwd": (
        f"q, kv_buffer, o, {_LISTS}, max_seqlen_q, sm_scale=None, logit_cap=0.0, num_kv_splits=None"
    ),
    "aiter.get_mla_metadata_info_v1": (
        "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True, "
        "num_kv_splits=32, intra_batch_mode=False, max_split_per_batch=-1"
    ),
    "aiter.mla_prefill_ps_asm_fwd": (
        "Q, K, V, qo_indptr, kv_indptr, kv_page_indices, work_indptr, work_info_set, max_seqlen_q, "
        "softmax_scale, is_causal, splitData, splitLse, output, q_scale=None, k_scale=None, "
        "v_scale=None"
    ),
}
HOMES = {
    "aiter": jitfmha.aiter,
    "flash_attn": flash_attn_interface,
    "mla": jitfmha.aiter.mla,
    "unified": unified_attention,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    *package, function = name.split(".")
    module = HOMES[package[0]] if package else jitfmha
    found = inspect.signature(getattr(module, function))
    plain = [x.replace(annotation=x.empty) for x in found.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"
