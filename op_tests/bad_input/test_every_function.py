"""Every public function, also those whose rules are not written down here once more.

Whatever is passed, a call ends the same way alone and after a good one of its kind: with the same
bits, or with the same refusal, which names an argument.
"""

import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import test_functions
import test_gradients
import torch
import untyped
from calls import Arguments, Draw, Subject, no_results
from changes import any_calls
from contract import MOST_BYTES, Call, Tally, all_threads, describe, refusal
from fresh_calls import fresh_calls
from hypothesis import reject
from hypothesis import strategies as st
from inputs import prefix_sums
from packed_pages import packed_keys, packed_values
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import jitfmha
from jitfmha import aiter, context_parallel, flash_attn  # noqa: A004
from jitfmha.aiter import mha_v3, passes, sparse
from jitfmha.aiter.ops.triton import mha as triton_mha
from jitfmha.aiter.ops.triton import unified_attention
from jitfmha.aiter.ops.triton.attention import mla as triton_mla
from jitfmha.aiter.ops.triton.gluon import mla_gluon, pa_decode_gluon
from jitfmha.call.dispatch import Explanation
from jitfmha.flash_attn import bert_padding
from jitfmha.flash_attn import flash_attn_interface as interface
from jitfmha.flash_attn.layers import rotary
from jitfmha.flash_attn.ops.triton import rotary as triton_rotary
from jitfmha.kernels.cpu import CpuPlan

# What the subjects of the other tests have kernels for as well.
HDIM, DTYPE = 64, torch.float16
BACKWARD_DTYPE = torch.float32
LENGTHS_Q, LENGTHS_K = [3, 0, 2], [4, 2, 3]
IGNORED: Arguments = dict.fromkeys(
    ("alibi_slopes", "bias", "sink_ptr", "gen", "q_descale", "k_descale", "v_descale", "out")
)


def randn(draw: Draw, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return torch.randn(shape, generator=rng).to(dtype)


def qkv(draw: Draw, is_group: bool, dtype: torch.dtype = DTYPE) -> Arguments:
    rows_q = (sum(LENGTHS_Q),) if is_group else (2, 3)
    rows_k = (sum(LENGTHS_K),) if is_group else (2, 5)
    q = randn(draw, *rows_q, 2, HDIM, dtype=dtype)
    return {"q": q, **{n: randn(draw, *rows_k, 1, HDIM, dtype=dtype) for n in "kv"}}


def groups() -> Arguments:
    ends = {"cu_seqlens_q": prefix_sums(LENGTHS_Q), "cu_seqlens_k": prefix_sums(LENGTHS_K)}
    return {**ends, "max_seqlen_q": 3, "max_seqlen_k": 4}


def of_models(is_group: bool) -> Callable[[Draw], Arguments]:
    """AITER's functions that models call."""

    def arguments(draw: Draw) -> Arguments:
        rest: Arguments = {"causal": False, "window_size": (-1, -1, 0), "return_lse": True}
        rest |= {"dropout_p": 0.0, "bias": None, "alibi_slopes": None, "sink_ptr": None}
        if is_group:
            rest |= {**groups(), "logits_soft_cap": 0.0, "block_table": None, "out": None}
        return {**qkv(draw, is_group), **rest}

    return arguments


def of_operators(is_group: bool) -> Callable[[Draw], Arguments]:
    """AITER's functions whose arguments all have to be given."""

    def arguments(draw: Draw) -> Arguments:
        rest: Arguments = {"dropout_p": 0.0, "softmax_scale": None, "is_causal": False}
        rest |= {"window_size_left": -1, "window_size_right": -1, "sink_size": 0}
        rest |= {"return_softmax_lse": True, "return_dropout_randval": False, **IGNORED}
        if is_group:
            rest |= {**groups(), "min_seqlen_q": 0, "logits_soft_cap": 0.0, "zero_tensors": False}
            rest |= {"block_table": None}
        return {**qkv(draw, is_group), **rest}

    return arguments


def of_backward(is_group: bool, **more: Any) -> Callable[[Draw], Arguments]:
    def arguments(draw: Draw) -> Arguments:
        tensors = qkv(draw, is_group, BACKWARD_DTYPE)
        group = groups() if is_group else {}
        out, lse = untyped.fmha_fwd(**tensors, **group, return_lse=True)
        rest: Arguments = {"dropout_p": 0.0, "softmax_scale": None, "is_causal": False}
        rest |= {"window_size_left": -1, "window_size_right": -1, "deterministic": True}
        rest |= {"zero_tensors": False} if is_group else {}
        dout = torch.ones_like(out)
        return {"dout": dout, **tensors, "out": out, "softmax_lse": lse, **group, **rest, **more}

    return arguments


def of_explanations(draw: Draw) -> Arguments:
    tensors = qkv(draw, is_group=False)
    out = torch.zeros_like(tensors["q"])
    lse, room = torch.zeros(2, 2, 3), dict.fromkeys(("dlse", "dq", "dk", "dv", "bias"))
    return {"dout": out, **tensors, "out": out, "lse": lse, "mask": 0, "deterministic": None} | room


def of_cache(draw: Draw) -> Arguments:
    """With new keys and without, in pages or not."""
    caches = {n: randn(draw, 2, 8, 1, HDIM) for n in ("k_cache", "v_cache")}
    made: Arguments = {"q": randn(draw, 2, 3, 2, HDIM), **caches, "k": None, "v": None}
    if draw(st.booleans()):
        made |= {n: randn(draw, 2, 2, 1, HDIM) for n in "kv"}
    made |= {"cache_seqlens": torch.tensor([4, 1], dtype=torch.int32)}
    made |= dict.fromkeys(("cache_batch_idx", "cache_leftpad", "block_table"))
    how = draw(st.sampled_from(("rows", "places", "pages", "pages")))
    if how == "places":
        made["cache_batch_idx"] = torch.tensor([1, 0], dtype=torch.int32)
    elif how == "pages":
        made["block_table"] = torch.tensor([[1], [0]], dtype=torch.int32)
    else:
        made["cache_leftpad"] = torch.tensor([1, 0], dtype=torch.int32)
    return made | {"causal": False, "softcap": 0.0, "num_splits": 0, "return_softmax_lse": True}


def of_pages(draw: Draw, *, as_operator: bool = False) -> Arguments:
    made = of_operators(is_group=True)(draw) if as_operator else of_models(is_group=True)(draw)
    for name in ("cu_seqlens_k", "min_seqlen_q" if as_operator else "bias"):
        made.pop(name)
    table = torch.tensor([0, 1, 2], dtype=torch.int32)
    pages = {n: randn(draw, 3, 4, 1, HDIM) for n in "kv"}
    lists = {"kv_indptr": torch.tensor([0, 1, 2, 3], dtype=torch.int32), "kv_page_indices": table}
    return made | pages | lists | {"kv_last_page_lens": torch.tensor(LENGTHS_K, dtype=torch.int32)}


def of_one_query_each(draw: Draw) -> Arguments:
    """In pages of four keys, of which all are used."""
    pages = {n: randn(draw, 3, 4, 1, HDIM) for n in "kv"}
    lengths = torch.tensor(LENGTHS_K, dtype=torch.int32)
    table = torch.tensor([[2], [0], [1]], dtype=torch.int32)
    q = randn(draw, 3, 2, HDIM)
    return {"q": q, **pages, "lengths": lengths, "table": table, "out": torch.zeros_like(q)}


def of_unified(draw: Draw) -> Arguments:
    made = of_one_query_each(draw)
    made |= {"seqused_k": made.pop("lengths"), "block_table": made.pop("table")}
    made |= {"cu_seqlens_q": prefix_sums([1, 1, 1]), "max_seqlen_q": 1, "max_seqlen_k": 4}
    made |= {"softmax_scale": 0.5, "causal": True, "window_size": (-1, -1), "softcap": 0.0}
    return made | dict.fromkeys(("q_descale", "k_descale", "v_descale", "sinks", "output_scale"))


def of_vllm(draw: Draw) -> Arguments:
    made = of_one_query_each(draw)
    made |= {"seqused_k": made.pop("lengths"), "block_table": made.pop("table")}
    made |= {"cu_seqlens_q": prefix_sums([1, 1, 1]), "max_seqlen_q": 1, "max_seqlen_k": 4}
    made |= {"softmax_scale": 0.5, "causal": True, "window_size": (-1, -1), "softcap": 0.0}
    made |= {"num_splits": 0, "cp_world_size": 1, "return_softmax_lse": True, "fa_version": 3}
    return made | dict.fromkeys(("q_descale", "k_descale", "v_descale", "s_aux"))


def of_paged_attention(draw: Draw, *, is_ragged: bool = False) -> Arguments:
    made = of_one_query_each(draw)
    names = {"q": "query", "k": "key_cache", "v": "value_cache"}
    made |= {name: made.pop(n) for n, name in names.items()}
    lengths, table = made.pop("lengths"), made.pop("table")
    made |= {"scale": 0.5, "logits_soft_cap": 0.0, "alibi_slopes": None, "kv_cache_layout": "NHD"}
    made |= {"kv_cache_dtype": "auto", "k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    made["workspace_buffer"] = torch.zeros(1)
    if not is_ragged:
        lists = {"block_tables": table, "context_lens": lengths, "max_context_len": 4}
        return made | lists | {"cu_query_lens": None, "sliding_window": 0}
    made |= {"kv_indptr": prefix_sums([1, 1, 1]), "kv_page_indices": table.flatten()}
    return made | {"kv_last_page_lens": lengths, "block_size": 4, "max_num_partitions": 1}


def of_packed_pages(draw: Draw) -> Arguments:
    made = of_one_query_each(draw)
    pages = {"K": packed_keys(randn(draw, 3, 8, 1, HDIM))}
    pages["V"] = packed_values(randn(draw, 3, 8, 1, HDIM))
    lists = {"block_tables": made["table"], "context_lens": made["lengths"], "qo_indptr": None}
    return {"Q": made["q"], **pages, **lists, "block_tables_stride0": 1, "out_": made["out"]}


def of_latent_pages(draw: Draw, *, decodes: bool) -> Arguments:
    q, lengths = randn(draw, 3, 2, HDIM), torch.tensor(LENGTHS_K, dtype=torch.int32)
    made = {"q": q, "kv_buffer": randn(draw, 3, 4, 1, HDIM), "o": torch.zeros_like(q)}
    made |= {"qo_indptr": prefix_sums([1, 1, 1]), "kv_indptr": prefix_sums([1, 1, 1])}
    made |= {"kv_indices": torch.tensor([2, 0, 1], dtype=torch.int32)}
    made |= {"kv_last_page_lens": lengths, "max_seqlen_q": 1, "sm_scale": 0.5, "logit_cap": 0.0}
    return made | ({"return_lse": True, "causal": True} if decodes else {})


BUFFERS = ("work_metadata_ptrs", "work_indptr", "reduce_indptr", "reduce_final_map")
BUFFERS += ("reduce_partial_map",)


def of_metadata(draw: Draw) -> Arguments:
    names = "seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens", "work_info_set"
    made: Arguments = {n: prefix_sums([1, 2]) for n in (*BUFFERS, *names)}
    return made | {"num_heads_per_head_k": 16, "num_heads_k": 1, "is_causal": True}


def of_tiles(draw: Draw) -> Arguments:
    made: Arguments = {n: prefix_sums([1, 2]) for n in (*BUFFERS, "work_info")}
    made |= {n: prefix_sums([1, 2]) for n in ("seqlens_qo_indptr", "pages_kv_indptr")}
    made |= {"reduce_final_map": torch.zeros(3, 2).int(), "context_lens": prefix_sums([1])}
    made |= {"gqa_ratio": 1, "num_heads_per_head_k": 1, "is_causal": True}
    return made | {"num_heads_k": 1, "need_lse": True}


def of_sizes(draw: Draw) -> Arguments:
    return {"batch_size": 2, "num_head_k": 16, "max_qlen": 300}


def of_sizes_of_latents(draw: Draw) -> Arguments:
    made: Arguments = {"batch_size": 2, "max_seqlen_qo": 1, "num_head_qo": 16, "is_sparse": False}
    return made | {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}


def of_projected(draw: Draw) -> Arguments:
    made = qkv(draw, is_group=True)
    made = {name.upper(): x for name, x in made.items()}
    out = torch.zeros_like(made["Q"])
    parts = {"splitData": torch.zeros(256, 2, HDIM), "splitLse": torch.zeros(256, 2)}
    lists = {"qo_indptr": prefix_sums(LENGTHS_Q), "kv_indptr": prefix_sums(LENGTHS_K)}
    lists["kv_page_indices"] = torch.arange(sum(LENGTHS_K), dtype=torch.int32)
    rest: Arguments = {"max_seqlen_q": 3, "softmax_scale": 0.5, "is_causal": True}
    return {**made, **lists, **rest, **parts, "output": out, "work_indptr": None} | {
        "work_info_set": None
    }


def of_projected_at_once(draw: Draw) -> Arguments:
    made = of_projected(draw)
    return {name: x for name, x in made.items() if name not in ("splitData", "splitLse")}


def of_latents_of_table(draw: Draw) -> Arguments:
    made = of_latent_pages(draw, decodes=False)
    lengths = {"cu_seqlens_q": made["qo_indptr"], "seqused_k": made["kv_last_page_lens"]}
    table: Arguments = {"block_tables": made["kv_indices"][:, None], "max_seqlen_kv": 4}
    rest: Arguments = {"kv_lora_rank": HDIM, "qk_rope_head_dim": 0, "causal": True}
    rest["softmax_scale"] = 0.5
    tensors = {"q": made["q"], "kv_buffer": made["kv_buffer"], "out": made["o"]}
    return {**tensors, **lengths, **table, **rest, "q_descale": None, "kv_descale": None}


def of_splits_of_latents(draw: Draw) -> Arguments:
    made: Arguments = {"num_kv_splits": None, "bs": 2, "total_kv": 9, "nhead": 16}
    return made | {"max_seqlen_q": 1, "dtype": torch.bfloat16}


def of_chosen(draw: Draw) -> Arguments:
    """Two queries with chosen keys, of two sources."""
    rows = {n: randn(draw, 5, HDIM) for n in ("unified_kv", "kv")}
    tensors = {"q": randn(draw, 2, 3, HDIM), **rows, "attn_sink": torch.zeros(3)}
    lists = torch.tensor([4, -1, 0], dtype=torch.int32), prefix_sums([2, 1])
    named = dict(zip(("kv_indices", "kv_indptr"), lists, strict=True))
    for source in ("prefix", "extend"):
        named |= {f"{name}_{source}": x for name, x in list(named.items())[:2]}
    return {**tensors, **named, "softmax_scale": 0.5, "has_invalid": True, "skip_reduce": False}


def of_topk(draw: Draw) -> Arguments:
    tensors = {"q": randn(draw, 2, 3, HDIM), "kv": randn(draw, 5, 1, HDIM)}
    tensors |= {"out": torch.zeros(2, 3, HDIM, dtype=tensors["q"].dtype)}
    tensors["topk_indices"] = torch.tensor([[4, -1], [0, 2]], dtype=torch.int32)
    rest: Arguments = {"softmax_scale": 0.5, "kv_lora_rank": HDIM, "max_seqlen_q": 1}
    lengths = {"cu_seqlens_q": prefix_sums([1, 1]), "seqused_k": prefix_sums([1])}
    return {**tensors, **rest, **lengths, "max_seqlen_k": 5, "block_table": None}


def of_reduction(draw: Draw) -> Arguments:
    parts = {"partial_output": randn(draw, 8, 2, 5, dtype=torch.float32)}
    parts["partial_lse"] = randn(draw, 8, 2, dtype=torch.float32)
    maps = {"reduce_indptr": torch.tensor([0, 2, 3]).int(), "max_seqlen_q": 2}
    maps |= {"reduce_partial_map": torch.tensor([0, 4, 6]).int(), "num_kv_splits": 0}
    maps |= {"reduce_final_map": torch.tensor([[0, 2], [2, 4]]).int()}
    return {**parts, **maps, "final_output": torch.zeros(4, 2, 5), "final_lse": torch.zeros(4, 2)}


def of_opus(is_group: bool) -> Callable[[Draw], Arguments]:
    def arguments(draw: Draw) -> Arguments:
        rest: Arguments = {"softmax_scale": 0.5, "causal": False, "out": None}
        if is_group:
            rest |= {n.replace("cu_seqlens", "seqstart"): x for n, x in groups().items()}
        return {**qkv(draw, is_group), **rest}

    return arguments


def of_flash_attn_3(is_group: bool) -> Callable[[Draw], Arguments]:
    def arguments(draw: Draw) -> Arguments:
        rest: Arguments = {"softmax_scale": None, "causal": False, "window_size": (-1, -1)}
        rest |= {"attention_chunk": 0, "softcap": 0.0, "deterministic": False, "sm_margin": 0}
        return {**qkv(draw, is_group), **rest, **(groups() if is_group else {})}

    return arguments


def of_cache_of_flash_attn_3(draw: Draw) -> Arguments:
    made = of_cache(draw)
    made["page_table"] = made.pop("block_table")
    return made | {"attention_chunk": 0, "sm_margin": 0}


def of_fp8(is_group: bool) -> Callable[[Draw], Arguments]:
    def arguments(draw: Draw) -> Arguments:
        tensors = qkv(draw, is_group, torch.float8_e4m3fn)
        scales = {n: torch.ones(1) for n in ("q_descale", "k_descale", "v_descale")}
        group = groups() if is_group else {}
        return {**tensors, **scales, **group, "causal": False, "softmax_scale": None}

    return arguments


def of_parts(draw: Draw) -> Arguments:
    return {**qkv(draw, is_group=False), "num_splits": 2, "mask": 0, "block_table": None}


def of_combination(draw: Draw) -> Arguments:
    out, lse = (
        randn(draw, *shape, dtype=torch.float32) for shape in ((2, 1, 3, 2, 5), (2, 1, 3, 2))
    )
    return {"out_partial": out, "lse_partial": lse, "out": None, "out_dtype": None}


def of_latents(draw: Draw) -> Arguments:
    """With more queries than the other form is taken for."""
    tensors = {"q_nope": randn(draw, 1, 9, 2, 48), "q_pe": randn(draw, 1, 9, 2, 16)}
    tensors |= {"kv": randn(draw, 1, 3, 32), "k_pe": randn(draw, 1, 3, 16)}
    return {**tensors, "wkv_b": randn(draw, 2, 48 + HDIM, 32), "return_lse": True, "mask": 0}


def of_absorbed_latents(draw: Draw) -> Arguments:
    tensors = {"q": randn(draw, 2, 3, 2, HDIM), "latent": randn(draw, 2, 5, HDIM)}
    return {**tensors, "rank": HDIM, "softmax_scale": 0.5, "return_lse": True}


def of_padding(draw: Draw) -> Arguments:
    made: Arguments = {"hidden_states": randn(draw, 2, 4, 5), "values": randn(draw, 3, 5)}
    made |= {"attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])}
    made |= {"attention_mask_in_length": torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0]])}
    made |= {"input": randn(draw, 6, 5), "indices": torch.tensor([4, 0, 5]), "first_axis_dim": 7}
    return made | {"batch": 2, "seqlen": 4}


def of_rows_to_pad(draw: Draw) -> Arguments:
    return of_padding(draw) | {"hidden_states": randn(draw, 3, 5)}


def of_rotary(draw: Draw) -> Arguments:
    shapes = {"x": (2, 3, 2, 8), "qkv": (2, 3, 3, 2, 8), "kv": (2, 3, 2, 2, 8)}
    made = {name: randn(draw, *shape) for name, shape in shapes.items()}
    tables = {name: randn(draw, 9, 3) for name in ("cos", "sin", "cos_k", "sin_k")}
    return made | tables | {"seqlen_offsets": torch.tensor([4, 0], dtype=torch.int32)}


def of_rotary_of_torch(draw: Draw) -> Arguments:
    return of_rotary(draw) | {name: randn(draw, 3, 3) for name in ("cos", "sin")}


def of_passes(draw: Draw, *, is_group: bool, is_backward: bool) -> Arguments:
    """flash-attn's and AITER's functions under ``torch.autograd``."""
    dtype = BACKWARD_DTYPE if is_backward else DTYPE
    tensors, lengths = qkv(draw, is_group, dtype), groups() if is_group else {}
    made: Arguments = {**tensors, **lengths, **IGNORED, "dbias": None, "leftpad_k": None}
    made |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_k_padded"))
    made |= {"dropout_p": 0.0, "softmax_scale": 0.5, "causal": False, "softcap": 0.0}
    made |= {"window_size_left": -1, "window_size_right": -1, "sink_size": 0, "min_seqlen_q": 0}
    made |= {"return_softmax": False, "return_lse": True, "deterministic": True}
    if is_backward:
        out, lse = untyped.fmha_fwd(**tensors, **lengths, return_lse=True, softmax_scale=0.5)
        made |= {"out": out, "softmax_lse": lse, "dout": torch.ones_like(out)}
        made |= {f"d{name}": torch.zeros_like(x) for name, x in tensors.items()}
    return made


def of_gluon(draw: Draw) -> Arguments:
    """pa_decode_gluon's arguments, and those of others over packed pages."""
    made = of_packed_pages(draw)
    made |= {"query": made["Q"], "key_cache": made["K"], "value_cache": made["V"]}
    made |= {"output": made["out_"], "out": made["out_"], "softmax_scale": 0.5, "scale": 0.5}
    made |= {"context_lengths": made["context_lens"], "query_length": 1, "num_kv_heads": 1}
    made |= {"max_context_partition_num": 1, "block_size": 8, "max_context_len": 4}
    made |= {"kv_cache_dtype": "auto", "alibi_slopes": None, "max_qlen": 1, "max_seq_len": 4}
    made |= dict.fromkeys(("exp_sums", "max_logits", "tmp_out", "k_scale", "v_scale"))
    made |= {n: prefix_sums([1]) for n in (*BUFFERS, "work_info")}
    made |= {"qo_indptr": prefix_sums([1, 1, 1]), "kv_indptr": prefix_sums([1, 1, 1])}
    return made | {"kv_indices": made["block_tables"].flatten()}


def of_latents_of_gluon(draw: Draw) -> Arguments:
    made = {"q_nope": randn(draw, 3, 2, 48), "q_pe": randn(draw, 3, 2, 16)}
    made |= {"kv_c": randn(draw, 9, HDIM), "o": randn(draw, 3, 2, 48), "kv_pe_offset": 48}
    if draw(st.booleans()):
        made |= {"kv_c": made["kv_c"].to(torch.float8_e4m3fn), "kv_scale": 1}
    if draw(st.booleans()):
        lists = torch.arange(sum(LENGTHS_K), dtype=torch.int32), prefix_sums(LENGTHS_K)
    else:
        lists = torch.arange(12, dtype=torch.int32).view(3, 4) % 9, torch.tensor(LENGTHS_K).int()
    made |= {"page_table": lists[0], "seq_info": lists[1], "use_2d_view": lists[0].dim() == 2}
    return made | {"sm_scale": 0.5}


def of_triton(is_group: bool) -> Callable[[Draw], Arguments]:
    def arguments(draw: Draw) -> Arguments:
        return {**qkv(draw, is_group), **(groups() if is_group else {})}

    return arguments


def of_splits(draw: Draw) -> Arguments:
    return {"num_sequences": 2, "num_kv_heads": 1}


def of_random_bytes(draw: Draw) -> Arguments:
    state = torch.tensor([draw(st.integers(0, 2**63 - 1)), 0])
    return {"rng_state": state, "batch": 1, "heads_q": 2, "seqlen_q": 3, "seqlen_k": 5}


def of_signature(
    function: Callable[..., Any], good: Callable[[Draw], Arguments]
) -> Callable[[Draw], Arguments]:
    """All arguments of a function: of what `good` draws those that it has, and else its defaults.

    What has a default is changed by the draws, too, also where `good` does not know of it.
    """
    parameters = inspect.signature(function).parameters

    def arguments(draw: Draw) -> Arguments:
        made = good(draw)
        known = {
            name: made.get(name, p.default)
            for name, p in parameters.items()
            if p.kind is not p.VAR_KEYWORD
        }
        return known if len(known) == len(parameters) else made | known

    return arguments


V3 = {"is_v3_atomic_fp32": True, "how_v3_bf16_cvt": 0}
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[Draw], Arguments]]] = {
    "flash_attn_with_kvcache": (untyped.flash_attn_with_kvcache, of_cache),
    "flash_attn.flash_attn_varlen_func": (untyped.flash_attn_varlen_func, of_vllm),
    "explain_bwd": (untyped.explain_bwd, of_explanations),
    "flash_attn_combine": (jitfmha.flash_attn_combine, of_combination),
    "mha_fwd_splitkv": (jitfmha.mha_fwd_splitkv, of_parts),
    "mla_fwd": (untyped.mla_fwd, of_latents),
    "mla_absorbed_fwd": (untyped.mla_absorbed_fwd, of_absorbed_latents),
    "dropout_randval": (jitfmha.dropout_randval, of_random_bytes),
    "fmha_v3_bwd": (aiter.fmha_v3_bwd, of_backward(is_group=False, **V3)),
    "fmha_v3_varlen_bwd": (aiter.fmha_v3_varlen_bwd, of_backward(is_group=True, **V3)),
    "aiter.mha_bwd": (aiter.mha_bwd, of_backward(is_group=False)),
    "aiter.mha_varlen_bwd": (aiter.mha_varlen_bwd, of_backward(is_group=True)),
    "aiter.flash_attn_func": (aiter.flash_attn_func, of_models(is_group=False)),
    "aiter.flash_attn_varlen_func": (aiter.flash_attn_varlen_func, of_models(is_group=True)),
    "aiter.mha_fwd": (aiter.mha_fwd, of_operators(is_group=False)),
    "aiter.mha_varlen_fwd": (aiter.mha_varlen_fwd, of_operators(is_group=True)),
    "aiter.mha_batch_prefill": (aiter.mha_batch_prefill, partial(of_pages, as_operator=True)),
    "aiter.mha_batch_prefill_func": (aiter.mha_batch_prefill_func, of_pages),
    "aiter.fmha_fwd_bf16_opus_fwd": (aiter.fmha_fwd_bf16_opus_fwd, of_opus(is_group=False)),
    "aiter.fmha_fwd_bf16_opus_varlen_fwd": (
        aiter.fmha_fwd_bf16_opus_varlen_fwd,
        of_opus(is_group=True),
    ),
    "aiter.get_mla_metadata_info_v1": (aiter.get_mla_metadata_info_v1, of_sizes_of_latents),
    "aiter.get_mla_metadata_v1": (aiter.get_mla_metadata_v1, of_metadata),
    "aiter.get_ps_metadata_info_v1": (aiter.get_ps_metadata_info_v1, of_sizes),
    "aiter.get_ps_metadata_v1": (aiter.get_ps_metadata_v1, of_tiles),
    "aiter.mla_prefill_ps_asm_fwd": (aiter.mla_prefill_ps_asm_fwd, of_projected),
    "aiter.mla_reduce_v1": (aiter.mla_reduce_v1, of_reduction),
    "aiter.pa_fwd_asm": (aiter.pa_fwd_asm, of_packed_pages),
    "aiter.paged_attention_v1": (aiter.paged_attention_v1, of_paged_attention),
    "aiter.paged_attention_ragged": (
        aiter.paged_attention_ragged,
        partial(of_paged_attention, is_ragged=True),
    ),
    "aiter.mla.mla_decode_fwd": (aiter.mla.mla_decode_fwd, partial(of_latent_pages, decodes=True)),
    "aiter.mla.mla_prefill_ps_fwd": (aiter.mla.mla_prefill_ps_fwd, of_projected_at_once),
    "aiter.mla.get_meta_param": (aiter.mla.get_meta_param, of_splits_of_latents),
    **{
        f"aiter.ops.triton.attention.mla.{name}": (getattr(triton_mla, name), of_latents_of_table)
        for name in ("mla_decode_fwd", "mla_prefill_fwd")
    },
    "aiter.pa_sparse_prefill_opus": (aiter.pa_sparse_prefill_opus, of_chosen),
    **{
        f"aiter.ops.triton.attention.{name}.{name}": (getattr(sparse, name), some)
        for name, some in (
            ("pa_decode_sparse", of_chosen),
            ("pa_prefill_sparse", of_chosen),
            ("unified_attention_sparse_mla", of_topk),
        )
    },
    "aiter.mla.mla_prefill_fwd": (
        aiter.mla.mla_prefill_fwd,
        partial(of_latent_pages, decodes=False),
    ),
    "aiter.ops.triton.unified_attention.unified_attention": (
        unified_attention.unified_attention,
        of_unified,
    ),
    **{
        f"aiter.{name}": (getattr(aiter, name), of_gluon)
        for name in (
            *("pa_decode_gluon", "pa_persistent_fwd"),
            *("paged_attention_common", "paged_attention_rocm"),
        )
    },
    "aiter.get_pa_metadata_info_v1": (aiter.get_pa_metadata_info_v1, of_sizes),
    "aiter.get_pa_metadata_v1": (aiter.get_pa_metadata_v1, of_tiles),
    "aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits": (
        pa_decode_gluon.get_recommended_splits,
        of_splits,
    ),
    "aiter.ops.triton.gluon.mla_gluon.mla_gluon": (mla_gluon.mla_gluon, of_latents_of_gluon),
    "aiter.ops.triton.mha.flash_attn_func": (triton_mha.flash_attn_func, of_triton(is_group=False)),
    "aiter.ops.triton.mha.flash_attn_varlen_func": (
        triton_mha.flash_attn_varlen_func,
        of_triton(is_group=True),
    ),
    "aiter.ops.triton.mha.flash_attn_with_kvcache": (triton_mha.flash_attn_with_kvcache, of_cache),
    "aiter.mha_v3.flash_attn_fp8_func": (mha_v3.flash_attn_fp8_func, of_triton(is_group=False)),
    "aiter.mha_v3.flash_attn_varlen_fp8_func": (
        mha_v3.flash_attn_varlen_fp8_func,
        of_triton(is_group=True),
    ),
    "aiter.mha_v3.flash_attn_func": (mha_v3.flash_attn_func, of_flash_attn_3(is_group=False)),
    "aiter.mha_v3.flash_attn_varlen_func": (
        mha_v3.flash_attn_varlen_func,
        of_flash_attn_3(is_group=True),
    ),
    "aiter.mha_v3.flash_attn_with_kvcache": (
        mha_v3.flash_attn_with_kvcache,
        of_cache_of_flash_attn_3,
    ),
    **{
        f"aiter.{name}": (getattr(aiter, name), of_fp8(is_group="varlen" in name))
        for name in ("flash_attn_fp8_pertensor_func", "flash_attn_varlen_fp8_pertensor_func")
    },
}
for _prefix, _passes in (
    ("flash_attn.flash_attn_interface", interface),
    ("aiter.ops.mha", passes),
):
    for _name in interface._PASSES:
        _how = {"is_group": "varlen" in _name, "is_backward": "backward" in _name}
        FUNCTIONS[f"{_prefix}.{_name}"] = getattr(_passes, _name), partial(of_passes, **_how)
for _prefix, _module, _good in (
    ("flash_attn.bert_padding", bert_padding, of_padding),
    ("flash_attn.layers.rotary", rotary, of_rotary),
    ("flash_attn.ops.triton.rotary", triton_rotary, of_rotary),
):
    for _name in _module.__all__:
        if inspect.isfunction(_function := getattr(_module, _name)):
            FUNCTIONS[f"{_prefix}.{_name}"] = _function, _good
FUNCTIONS |= {
    "flash_attn.bert_padding.pad_input": (bert_padding.pad_input, of_rows_to_pad),
    "flash_attn.layers.rotary.apply_rotary_emb_torch": (
        rotary.apply_rotary_emb_torch,
        of_rotary_of_torch,
    ),
}
ELSEWHERE = {
    "emulate": "test_warmup_and_emulate.py",
    "warmup": "test_warmup_and_emulate.py",
    "validate_config": "../test_kernel_rules.py",
    "validate_specification": "../test_specifications.py",
    "install_as": "../test_stand_in.py",
    "new_rng_state": "../test_dropout.py",
    **dict.fromkeys(("softmax", "rms_norm", "layer_norm"), "../test_rows.py"),
    **dict.fromkeys(
        ("qk_norm_rope_cache", "aiter.reshape_and_cache", "aiter.reshape_and_cache_flash"),
        "../test_heads.py",
    ),
    **dict.fromkeys(("matmul", "aiter.gemm_a16w16", "aiter.gemm_a8w8"), "../test_matmul.py"),
    **dict.fromkeys(("explain_rows", "explain_matmul"), "../amd/test_explained_calls.py"),
    **dict.fromkeys(
        (
            *("aiter.rms_norm", "aiter.rmsnorm2d_fwd", "aiter.rmsnorm2d_fwd_with_add"),
            *("aiter.layernorm2d_fwd", "flash_attn.ops.rms_norm.rms_norm"),
            "flash_attn.ops.layer_norm.layer_norm",
        ),
        "../test_rows_drop_ins.py",
    ),
    # They need a process group.
    "context_parallel.shard": "../test_context_parallel.py",
    "context_parallel.unshard": "../test_context_parallel.py",
    "context_parallel.ring_attention": "../test_context_parallel.py",
    "context_parallel.all_to_all_attention": "../test_context_parallel.py",
}
"""Functions that have tests of their own of what can be passed."""


def test_no_public_function_is_forgotten():
    subjects = {subject.name for subject in (*test_functions.SUBJECTS, test_gradients.SUBJECT)}
    tried = {*subjects, *FUNCTIONS, *ELSEWHERE}
    modules: dict[str, Any] = {"": jitfmha}
    for package in (flash_attn, aiter):
        places = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name in (package.__name__, *(place.name for place in places)):
            modules[f"{name.removeprefix('jitfmha.')}."] = importlib.import_module(name)
    named = {
        f"{prefix}{n}": getattr(x, n)
        for prefix, x in modules.items()
        for n in (*getattr(x, "__all__", ()), *getattr(x, "OFFERED", ()))
    }
    named |= {
        f"context_parallel.{name}": value
        for name, value in vars(context_parallel).items()
        if inspect.isfunction(value)
        and value.__module__ == context_parallel.__name__
        and not name.startswith("_")
    }
    refusing = [getattr(aiter.mla, name) for name in aiter.mla.REFUSED]
    functions = {
        n: value
        for n, value in named.items()
        if inspect.isfunction(value) and value not in refusing
    }
    known = {functions[name] for name in tried & functions.keys()}
    assert {name for name, value in functions.items() if value not in known} == set()
    assert (tried - functions.keys()) == {n for n in subjects if n.startswith("ops.")}


# ---- What must hold ------------------------------------------------------------------------------


class NotBuilt(BaseException):
    """A valid call, whose kernel would have to be compiled."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that may be bound; empty: any, which are added."""
    names: list[str] = []
    bind = CpuPlan.bind

    def bind_if_known(plan: CpuPlan) -> Any:
        if names and names[-1] == "" and plan.kernel not in names:
            raise NotBuilt
        if plan.kernel not in names:
            names.insert(0, plan.kernel)
        return bind(plan)

    monkeypatch.setattr(CpuPlan, "bind", bind_if_known)
    return names


def outcome(function: Callable[..., Any], arguments: Arguments) -> tuple[object, str | None]:
    """What a call leaves of copies of its arguments, bit by bit, with its results; or its error."""
    copies = copied(arguments)
    torch.manual_seed(0)
    error: Exception | None = None
    try:
        with all_threads():
            returned = function(**copies)
    except Exception as raised:
        error = raised
    if error is None:
        return [bits(x) for x in (returned, *copies.values())], None
    if "DefaultCPUAllocator" in str(error):
        reject()  # more memory than there is
    assert refusal(error, {**arguments, **_others(function)}), f"{error!r}"
    return None, f"{error!r}"


def _others(function: Callable[..., Any]) -> Arguments:
    """The other arguments, which a text may name as well."""
    return dict.fromkeys(inspect.signature(function).parameters)


def copied(arguments: Arguments) -> Arguments:
    """The same in other memory, where tensors share it as they did."""
    kept: dict[int, Any] = {}
    for x in arguments.values():
        if not isinstance(x, Tensor) or x.is_quantized:  # those are served nowhere
            kept[id(x)] = x
        elif x.is_meta or x.layout != torch.strided or not x.is_leaf:
            kept[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return copy.deepcopy(arguments, memo=kept)


def bits(value: Any) -> object:
    if isinstance(value, (tuple, list)) and not isinstance(value, Explanation):
        return [bits(x) for x in value]
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
        return (
            describe(value) if isinstance(value, Tensor) else re.sub("0x[0-9a-f]+", "", str(value))
        )
    content = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return value.shape, value.stride(), value.dtype, content


def check_outcomes(call: Call, tally: Tally, built: list[str]) -> None:
    function = call.subject.function
    built[:] = [name for name in built if name]
    with fresh_calls():
        _, refused = outcome(function, call.good)
        assert refused is None, f"a good call is refused: {refused}"
        built.append("")  # from here on nothing new
        after_good = outcome(function, call.arguments)
    with fresh_calls():
        assert outcome(function, call.arguments) == after_good
    tally.count("returned" if after_good[1] is None else after_good[1].partition("(")[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name, sweep, built):
    function, some = FUNCTIONS[name]
    good = of_signature(function, some)
    subject = Subject(
        *(name, function, ("gm0",), lambda draw, problem: good(draw), lambda x: (x, set())),
        no_results,
    )

    def check(call: Call, tally: Tally) -> None:
        tensors = [x for x in call.arguments.values() if isinstance(x, Tensor)]
        if any(x.numel() * x.element_size() > MOST_BYTES for x in tensors):
            reject()  # a machine that has memory for it would spend all of it
        try:
            check_outcomes(call, tally, built)
        except NotBuilt:
            reject()

    sweep(any_calls(subject), check, share=0.5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_without_strides(name, sweep):
    """Sparse and nested ones are refused by their names, wherever torch cannot go on with them."""
    function, some = FUNCTIONS[name]
    good = of_signature(function, some)

    def check(arguments: Arguments, tally: Tally) -> None:
        function(**copied(arguments))
        for argument, x in arguments.items():
            if not isinstance(x, Tensor):
                continue
            odd = [torch.zeros(x.shape, dtype=x.dtype, layout=torch.sparse_coo)]
            if x.dim() > 1 and x.shape[0] > 0:
                row = x[0].half() if x.itemsize == 1 else x[0]  # torch nests no fp8
                layouts = (torch.strided, torch.jagged)
                odd += [torch.nested.nested_tensor([row, row], layout=y) for y in layouts]
            for y in odd:
                with pytest.raises((TypeError, ValueError)) as refused:
                    function(**{**copied(arguments), argument: y})
                assert refusal(refused.value, {argument: y}), f"{argument}: {refused.value!r}"

    sweep(st.composite(lambda draw: good(draw))(), check, share=0.1)


@contextmanager
def other_default_dtype() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "another default dtype": other_default_dtype,
    "another default device": lambda: torch.device("meta"),
    "tensors of inference mode": nullcontext,
}


@pytest.mark.parametrize("around", AROUND)
def test_what_is_around_a_call_changes_nothing(around, sweep):
    makes = torch.inference_mode if "inference" in around else nullcontext
    # It makes a tensor of numbers alone, so that torch says on what device.
    names = [name for name in FUNCTIONS if name != "aiter.mla.get_meta_param"]
    drawn = st.composite(lambda draw, good: good(draw))

    def check(functions: list[Arguments], tally: Tally) -> None:
        for name, arguments in zip(names, functions, strict=True):
            expected = outcome(FUNCTIONS[name][0], arguments)
            with makes():
                arguments = {
                    n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()
                }
            with AROUND[around]():
                torch.manual_seed(0)
                returned = FUNCTIONS[name][0](**arguments)
            assert [bits(x) for x in (returned, *arguments.values())] == expected[0], name

    goods = [of_signature(*FUNCTIONS[name]) for name in names]
    sweep(st.tuples(*(drawn(good) for good in goods)), check, share=0.04)


def test_fake_tensors(sweep):
    """Nobody reads what they hold; functions whose results have lengths that tensors hold must."""
    read = "unpad_input", "dropout_randval"
    names = [name for name in FUNCTIONS if not any(word in name for word in read)]
    drawn = st.composite(lambda draw, good: good(draw))

    def check(calls: list[Arguments], tally: Tally) -> None:
        for name, arguments in zip(names, calls, strict=True):
            function = FUNCTIONS[name][0]
            with FakeTensorMode() as mode:
                fakes = {
                    n: mode.from_tensor(x) if isinstance(x, Tensor) else x
                    for n, x in arguments.items()
                }
                returned = shapes(function(**fakes))
            assert returned == shapes(function(**copied(arguments))), name

    goods = [of_signature(*FUNCTIONS[name]) for name in names]
    sweep(st.tuples(*(drawn(good) for good in goods)), check, share=0.04)


def shapes(value: Any) -> object:
    if isinstance(value, (tuple, list)) and not isinstance(value, Explanation):
        return [shapes(x) for x in value]
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return None
