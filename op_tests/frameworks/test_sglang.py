"""What SGLang's backend for AITER imports and calls.

Read from ``python/sglang/srt/layers/attention/aiter_backend.py`` of github.com/sgl-project/sglang
at commit 003c5589f7d3eca71d5d42127e611ee834162b91, ``aiter_utils.py`` beside it at
078e5e2a5227bb6af1727574bb6212f0afb25250 and ``aiter_mla_gluon.py`` at
2ee4570a5f1414e6980ea3eeeaf05cc5a8a0b0d0.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import assert_close
from frameworks.serving import FP8, TARGETS, Serving, on
from inputs import prefix_sums
from packed_pages import packed_keys, packed_values
from refusals import refused
from torch import Tensor

from jitfmha import aiter, install_as  # noqa: A004
from jitfmha.aiter import sparse
from jitfmha.aiter.ops.triton.attention import mla as of_triton
from jitfmha.problem.float64_reference import attention_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

IMPORTS = {
    "aiter": [
        "flash_attn_varlen_fp8_pertensor_func",
        "flash_attn_varlen_func",
        "get_mla_metadata_info_v1",
        "get_mla_metadata_v1",
        "get_ps_metadata_info_v1",
        "get_ps_metadata_v1",
        "mha_batch_prefill_func",
        "mla_prefill_ps_asm_fwd",
        "mla_reduce_v1",
        "paged_attention_ragged",
    ],
    "aiter.mla": ["mla_decode_fwd", "mla_prefill_fwd"],
    "aiter.ops.triton.attention.unified_attention": ["unified_attention"],
    "aiter.ops.triton.gluon.mla_gluon": ["mla_gluon"],
    "aiter.ops.triton.gluon.pa_decode_gluon": ["get_recommended_splits", "pa_decode_gluon"],
}


def names() -> dict[str, Callable[..., Any]]:
    with install_as("aiter"):
        modules = {name: importlib.import_module(name) for name in IMPORTS}
        return {n: getattr(modules[module], n) for module, those in IMPORTS.items() for n in those}


AITER = names()
SCALE = 0.11


def decode_ragged(it: Serving) -> Tensor:
    """``forward_decode``: a key in each page."""
    AITER["paged_attention_ragged"](
        *(it.out, it.workspace, it.q, it.k, it.v, SCALE),
        *(it.indptr, it.indices, it.last_page_lens, 1, 512),
        *(None, it.cache_dtype, "NHD", 0.0, it.k_scale.view(1), it.v_scale.view(1), None, 256),
    )
    return it.out


def decode_unified(it: Serving) -> Tensor:
    """``forward_decode`` and ``forward_extend`` of verified drafts, lengths being int64.

    Drafts have queries of 16 bits over an fp8 cache.
    """
    AITER["unified_attention"](
        q=it.q,
        k=it.k,
        v=it.v,
        out=it.out,
        cu_seqlens_q=it.cu_q,
        seqused_k=it.seqlens_k.long(),
        max_seqlen_q=max(it.lengths_q),
        max_seqlen_k=it.table.shape[1] * it.page_size,
        softmax_scale=SCALE,
        causal=True,
        window_size=(-1, -1),
        block_table=it.table,
        softcap=0,
        q_descale=None,
        k_descale=it.scales[0],
        v_descale=it.scales[1],
        sinks=None,
    )
    return it.out


def extend(it: Serving) -> Tensor:
    """``forward_extend`` over the cache."""
    return AITER["mha_batch_prefill_func"](
        *(it.q.contiguous(), it.k, it.v, it.cu_q, it.indptr, it.indices),
        *(max(it.lengths_q), max(it.lengths_k)),
        causal=True,
        logits_soft_cap=0.0,
        alibi_slopes=None,
        return_lse=False,
        return_attn_probs=False,
        window_size=(-1, -1),
        sink_ptr=None,
        q_descale=None,
        k_descale=it.scales[0],
        v_descale=it.scales[1],
        softmax_scale=SCALE,
    )


TOKENS = {"page_size": 1}
CHUNKS = {"lengths_q": (1, 20, 3), "lengths_k": (1, 37, 70)}
DRAFTS = {"lengths_q": (4, 4, 4), "lengths_k": (4, 37, 70)}
SITES: list[tuple[Callable[[Serving], Tensor], dict[str, Any]]] = [
    (decode_ragged, TOKENS),
    (decode_ragged, TOKENS | {"kv_dtype": FP8}),
    (decode_unified, {}),
    (decode_unified, DRAFTS),
    (decode_unified, DRAFTS | {"kv_dtype": FP8}),
    (extend, TOKENS | CHUNKS),
    (extend, TOKENS | CHUNKS | {"kv_dtype": FP8}),
]


@pytest.mark.sample("target", TARGETS, 1)
@pytest.mark.parametrize(("site", "batch"), SITES)
def test_keys_in_pages(rng, target, site, batch):
    it = Serving(rng, **batch)
    with on(target):
        out = site(it)
    it.check(out, softmax_scale=SCALE)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("queries", [1, 3])
def test_packed_pages(rng, target, window, queries):
    """``forward_decode_vectorized_5d``; AITER's own calls have several queries, too."""
    it = Serving(rng, lengths_q=(queries,) * 3, lengths_k=(queries, 37, 70))
    sinks = torch.randn(4, generator=rng)
    splits = AITER["get_recommended_splits"](3, 2)
    exp_sums = torch.empty(3, 2, splits, 2)
    with on(target):
        AITER["pa_decode_gluon"](
            output=it.out,
            query=it.q,
            key_cache=packed_keys(it.k),
            value_cache=packed_values(it.v),
            context_lengths=it.seqlens_k,
            block_tables=it.table,
            softmax_scale=SCALE,
            query_length=queries,
            max_context_partition_num=splits,
            context_partition_size=256,
            compute_type=torch.bfloat16,
            key_scale=None,
            value_scale=None,
            exp_sums=exp_sums,
            max_logits=torch.empty_like(exp_sums),
            temporary_output=torch.empty(3, 2, splits, 2, 64, dtype=it.q.dtype),
            sinks=sinks,
            sliding_window=window,
            ps=True,
        )
    mask = {"window_size": (window - 1, 0)} if window else {}
    it.check(it.out, softmax_scale=SCALE, sink=sinks, **mask)


def test_packed_pages_that_are_refused(rng):
    it = Serving(rng)
    call = {
        "output": it.out,
        "query": it.q,
        "key_cache": packed_keys(it.k),
        "value_cache": packed_values(it.v),
        "context_lengths": it.seqlens_k,
        "block_tables": it.table,
        "softmax_scale": SCALE,
        "query_length": 1,
        "max_context_partition_num": 1,
    }
    for changes, error, texts in [
        ({"value_cache": it.v}, ValueError, ["value_cache", "five dimensions"]),
        ({"query_length": 2}, ValueError, ["query", "3 rows", "2 for each of 3"]),
        ({"query_length": 0}, ValueError, ["query", "3 rows"]),
        ({"compute_type": "bf16"}, TypeError, ["compute_type='bf16'"]),
    ]:
        with refused(error, *texts):
            AITER["pa_decode_gluon"](**{**call, **changes})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("queries", [1, 4])
def test_latents_of_few_heads(rng, target, queries):
    """``mla_gluon_decode``; AITER's own calls have a block table and the lse, too."""
    it = Serving(rng, **LATENT, lengths_q=(queries,) * 3, lengths_k=(queries, 37, 70))
    shape = (3, queries, 3) if queries > 1 else (3, 3)
    q_nope, q_pe = torch.split(it.q.view(*shape, 576), [512, 64], dim=-1)
    call = {"k_pe": None, "kv_pe_offset": 512, "kv_scale": 1.0, "min_kv_seq_len": 4}
    with on(target):
        AITER["mla_gluon"](
            *(q_nope, q_pe, it.k.view(-1, 576), it.out.view(*shape, 512), it.indices, it.indptr),
            SCALE,
            use_2d_view=False,
            **call,
        )
    it.check(it.out, softmax_scale=SCALE)
    if target:
        return
    o = torch.empty(*shape, 512)
    found, lse = AITER["mla_gluon"](
        *(q_nope, q_pe, it.k.view(-1, 576), o, it.table, it.seqlens_k, SCALE),
        return_lse=True,
        **call,
    )
    assert found is o
    assert torch.equal(o.view_as(it.out), it.out.float())
    it.check(it.out, lse.reshape(-1, 3).T.contiguous(), softmax_scale=SCALE)


def test_latents_alone(rng):
    """``has_pe=False``, with a sink: the sparse prefill of AITER."""
    it = Serving(rng, page_size=1, heads=(3, 1), hdim=512, rank=512)
    sinks = torch.randn(3, generator=rng)
    call = it.q, None, it.k.view(-1, 512), it.out, it.indices, it.indptr, SCALE
    AITER["mla_gluon"](*call, has_pe=False, attn_sink=sinks)
    it.check(it.out, softmax_scale=SCALE, sink=sinks)
    with refused(NotImplementedError, "k_pe"):
        AITER["mla_gluon"](*call, has_pe=False, k_pe=it.k)
    with refused(ValueError, "kv_scale=2.0", "bfloat16"):
        AITER["mla_gluon"](*call, has_pe=False, kv_scale=2.0)
    with refused(ValueError, "kv_pe_offset=7", "512"):
        AITER["mla_gluon"](*(it.q, it.q), *call[2:], kv_pe_offset=7)


def metadata(it: Serving, dtype: torch.dtype) -> dict[str, Tensor]:
    """``make_mla_decode_meta_data_buffer`` and ``make_mla_meta_data``."""
    draft_num = max(it.lengths_q)
    kinds = AITER["get_mla_metadata_info_v1"](
        *(len(it.lengths_q), draft_num, it.q.shape[1], dtype, dtype),
        is_sparse=False,
        fast_mode=False,
        num_kv_splits=32,
        intra_batch_mode=True,
    )
    buffers = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    work_metadata, work_indptr, work_info_set, *reduction = buffers
    AITER["get_mla_metadata_v1"](
        *(it.cu_q, it.indptr, it.last_page_lens, it.q.shape[1], 1, False),
        *(work_metadata, work_info_set, work_indptr, *reduction),
        kv_granularity=16,
        max_seqlen_qo=draft_num,
        uni_seqlen_qo=draft_num,
        fast_mode=False,
        max_split_per_batch=32,
        intra_batch_mode=True,
        dtype_q=dtype,
        dtype_kv=dtype,
    )
    named = "reduce_indptr", "reduce_final_map", "reduce_partial_map"
    return {
        "work_meta_data": work_metadata,
        "work_indptr": work_indptr,
        "work_info_set": work_info_set,
        **dict(zip(named, reduction, strict=True)),
    }


LATENT = {"page_size": 1, "heads": (3, 1), "hdim": 576, "rank": 512}


@pytest.mark.parametrize("target", TARGETS)
def test_latent_decode_and_verification(rng, target):
    """``_mla_decode_fwd_with_head_pad``, with and without metadata."""
    it = Serving(rng, **LATENT, **DRAFTS)
    given = {"q_scale": None, "kv_scale": None, "intra_batch_mode": True, "num_kv_splits": None}
    with on(target):
        AITER["mla_decode_fwd"](
            *(it.q, it.k.view(-1, 1, 1, 576), it.out),
            qo_indptr=it.cu_q,
            kv_indptr=it.indptr,
            kv_indices=it.indices,
            kv_last_page_lens=it.last_page_lens,
            max_seqlen_q=4,
            sm_scale=SCALE,
            logit_cap=0.0,
            **metadata(it, it.q.dtype),
            **given,
        )
    it.check(it.out, softmax_scale=SCALE)


def test_latent_prefill(rng):
    """``forward_extend`` with a prefix, and the lse that ``mla_decode_fwd`` returns."""
    it = Serving(rng, **LATENT, **CHUNKS)
    lists = it.cu_q, it.indptr, it.indices, it.last_page_lens, 20
    AITER["mla_prefill_fwd"](it.q, it.k, it.out, *lists, SCALE, 0.0)
    it.check(it.out, softmax_scale=SCALE)
    out, lse = AITER["mla_decode_fwd"](
        it.q, it.k, torch.empty_like(it.out), *lists, sm_scale=SCALE, return_lse=True
    )
    it.check(out, lse.T, softmax_scale=SCALE)


@pytest.mark.parametrize("need_lse", [False, True])
def test_projected_prefill(rng, need_lse):
    """``mla_fp8_prefill_attn``, in bf16; vLLM asks for the lse of this."""
    lengths_q, lengths_k = (3, 300, 0), (3, 300, 40)
    cu_q, cu_k = prefix_sums(lengths_q), prefix_sums(lengths_k)
    q, k, v = (
        torch.randn(rows, 2, hdim, generator=rng).bfloat16()
        for rows, hdim in ((303, 64), (343, 64), (343, 64))
    )
    kinds = AITER["get_ps_metadata_info_v1"](
        batch_size=3, num_head_k=2, max_qlen=300, qlen_granularity=256
    )
    work_metadata, work_indptr, work_info, *reduction = (
        torch.empty(shape, dtype=dtype) for shape, dtype in kinds
    )
    AITER["get_ps_metadata_v1"](
        *(cu_q, cu_k, cu_k.diff(), 1, 2, work_metadata, work_indptr, work_info, *reduction),
        qhead_granularity=1,
        qlen_granularity=256,
        kvlen_granularity=128,
        block_size=1,
        is_causal=True,
        **({"need_lse": True} if need_lse else {}),
    )
    parts = int(reduction[0][-1]) if need_lse else reduction[2].shape[0]
    logits = torch.full((parts * 256, 2, 64), torch.nan)
    attn_lse = torch.full((parts * 256, 2), torch.nan)
    output = torch.full((303, 2, 64), torch.nan, dtype=torch.bfloat16)
    final_lse = torch.full((303, 2), torch.nan)
    scale = torch.ones(())
    AITER["mla_prefill_ps_asm_fwd"](
        *(q, k, v, cu_q, cu_k, torch.arange(343, dtype=torch.int32), work_indptr, work_info, 300),
        *(SCALE, True, logits, attn_lse, output, scale, scale, scale),
    )
    AITER["mla_reduce_v1"](logits, attn_lse, *reduction, 256, 0, output, final_lse)
    starts = cu_q.tolist()[:-1], cu_k.tolist()[:-1]
    expected = attention_packed(
        *(q, k, v, lengths_q, lengths_k, *starts), softmax_scale=SCALE, mask=2
    )
    lse = final_lse.T.contiguous() if need_lse else expected[1].float()
    assert_close((output, lse), expected, q, k, v, SCALE)


def test_parts_of_keys(rng):
    """Two parts of a tile, one of another, none of a third; also as older versions are called."""
    out, lse = torch.randn(12, 1, 2, 5, generator=rng), torch.randn(12, 1, 2, 1, generator=rng)
    indptr = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    final_map = torch.tensor([[0, 3], [3, 4], [4, 6]], dtype=torch.int32)
    partial_map = torch.tensor([0, 8, 4], dtype=torch.int32)
    weights = torch.stack([lse[:3], lse[8:11]]).double().softmax(0)
    expected = (torch.stack([out[:3], out[8:11]]) * weights).sum(0)[:, 0]
    for hint in ((0,), ()):
        final, final_lse = torch.zeros(6, 2, 5), torch.zeros(6, 2)
        AITER["mla_reduce_v1"](out, lse, indptr, final_map, partial_map, 4, *hint, final, final_lse)
        torch.testing.assert_close(final[:3].double(), expected, rtol=1e-6, atol=1e-6)
        total = torch.stack([lse[:3], lse[8:11]]).double().logsumexp(0)[:, 0, :, 0]
        torch.testing.assert_close(final_lse[:3].double(), total, rtol=1e-6, atol=1e-6)
        assert torch.equal(final[3], torch.zeros(2, 5))
        torch.testing.assert_close(final[4:], out[4:6, 0])


def test_parts_of_many_tiles(rng):
    """Tiles of different lengths in any order, with 0 to 5 parts, some of them without keys."""
    lengths = [4, 1, 3, 0, 2, 4]
    starts = prefix_sums(lengths)[:-1]
    order = torch.randperm(6, generator=rng)
    tiles = torch.stack((starts, starts + torch.tensor(lengths).int()), 1)[order].contiguous()
    counts = [5, 1, 0, 2, 3, 1]
    indptr, count = prefix_sums(counts), sum(counts)
    partial_map = (torch.randperm(count, generator=rng) * 4).int()
    out, lse = torch.full((4 * count, 2, 5), torch.nan), torch.full((4 * count, 2), torch.nan)
    expected = torch.full((14, 2, 5), 7.0, dtype=torch.float64)
    expected_lse = torch.full((14, 2), 7.0, dtype=torch.float64)
    for n, (first, end) in enumerate(tiles.tolist()):
        parts = [slice(p, p + end - first) for p in partial_map[indptr[n] : indptr[n + 1]].tolist()]
        for part in parts:
            out[part] = torch.randn(end - first, 2, 5, generator=rng)
            lse[part] = 30 * torch.randn(end - first, 2, generator=rng)
        if parts:
            # A part without keys may hold anything, and a row may have no other.
            lse[parts[0]], out[parts[0]] = -torch.inf, torch.nan
            sums = torch.stack([lse[part] for part in parts]).double()
            values = torch.stack([out[part] for part in parts]).double()
            total = sums.logsumexp(0)
            weights = (sums - total.masked_fill(total == -torch.inf, 0)).exp()[..., None]
            expected[first:end] = (weights * values.masked_fill(weights == 0, 0)).sum(0)
            expected_lse[first:end] = total
    final, final_lse = torch.full((14, 2, 5), 7.0), torch.full((14, 2), 7.0)
    call = out, lse, indptr, tiles, partial_map, 4, 0
    AITER["mla_reduce_v1"](*call, final, final_lse)
    # Three roundings of float32 for each of up to five parts, beside numbers up to some 5.
    torch.testing.assert_close(final.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final_lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    with refused(ValueError, "max_seqlen_q (3)"):
        AITER["mla_reduce_v1"](*call[:5], 3, 0, final, final_lse)


def test_what_lies_on_a_device_is_not_read():
    """Tensors on meta have no values to read."""
    with torch.device("meta"):
        ends = torch.empty(3, dtype=torch.int32)
        kinds = AITER["get_ps_metadata_info_v1"](2, 2, 300)
        work, indptr, info, *reduction = (torch.empty(size, dtype=kind) for size, kind in kinds)
        AITER["get_ps_metadata_v1"](
            *(ends, ends, ends[1:], 1, 2, work, indptr, info, *reduction), need_lse=True
        )
        rows = reduction[2].shape[0] * 256
        parts = torch.empty(rows, 2, 64), torch.empty(rows, 2)
        results = torch.empty(300, 2, 64, dtype=torch.bfloat16), torch.empty(300, 2)
        AITER["mla_reduce_v1"](*parts, *reduction, 256, 0, *results)
        AITER["get_mla_metadata_v1"](
            *(ends, ends, ends[1:], 16, 1, False, work, info, indptr, *reduction)
        )


def test_projected_prefill_in_one_call(rng):
    """``mla_prefill_ps_fwd``, which does what is above by itself."""
    it = Serving(rng, **CHUNKS, page_size=1, heads=(2, 2))
    k, v = it.k[:, 0], it.v[:, 0]
    lists = it.cu_q, it.indptr, it.indices, None, None, 20, True
    out, lse = aiter.mla.mla_prefill_ps_fwd(it.q, k, v, it.out, *lists, softmax_scale=SCALE)
    assert out is it.out
    it.check(out, lse.T.contiguous(), softmax_scale=SCALE)
    aiter.mla.mla_prefill_ps_fwd(it.q, k, v, it.out, *lists)
    it.check(it.out, softmax_scale=64**-0.5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("queries", [1, 2])
def test_latents_of_a_table(rng, target, queries):
    """``mla_decode_fwd`` of Triton, as vLLM's ``aiter_triton_mla`` has it."""
    it = Serving(rng, **LATENT | {"page_size": 16}, lengths_q=(queries,) * 3)
    table = it.cu_q, it.seqlens_k, 70, it.table, SCALE, 512, 64, True, None, None
    with on(target):
        of_triton.mla_decode_fwd(it.q, it.k, it.out, *table)
    it.check(it.out, softmax_scale=SCALE)
    if target is None:
        it = Serving(rng, **LATENT | {"page_size": 16}, **CHUNKS)
        table = it.cu_q, it.seqlens_k, *table[2:3], it.table, *table[4:]
        of_triton.mla_prefill_fwd(it.q, it.k, it.out, *table)
        it.check(it.out, softmax_scale=SCALE)
        with refused(ValueError, "cu_seqlens_q", "8 queries of each"):
            of_triton.mla_decode_fwd(it.q, it.k, it.out, *table)


def chosen_keys(rng: torch.Generator, rows: int, tokens: int, most: int) -> Tensor:
    """For each row some tokens, no one twice, with -1 between them; none at all in the first."""
    chosen = torch.stack([torch.randperm(tokens, generator=rng)[:most] for _ in range(rows)])
    return chosen.masked_fill(torch.rand(rows, most, generator=rng) < 0.3, -1).index_fill(
        0, torch.tensor([0]), -1
    )


@pytest.mark.sample("target", TARGETS, 1)
@pytest.mark.parametrize("site", ["topk", "lists", "sources", "opus"])
def test_chosen_keys(rng, target, site):
    """Sparse latent attention of vLLM and SGLang: of DeepSeek-V3.2 and V4."""
    is_topk = site == "topk"
    hdim, rank = (576, 512) if is_topk else (512, 512)
    q = torch.randn(4, 3, hdim, generator=rng).bfloat16()
    cache, new = (torch.randn(40, hdim, generator=rng).bfloat16() for _ in "12")
    chosen, more = chosen_keys(rng, 4, 40, 24), chosen_keys(rng, 4, 40, 7)
    sink = None if is_topk else 3 + torch.randn(3, generator=rng)  # as much as the keys
    lists = chosen.flatten().int(), prefix_sums([24] * 4)
    others = more.flatten().int(), prefix_sums([7] * 4)
    out = torch.full((4, 3, rank), torch.nan, dtype=torch.bfloat16)
    with on(target):
        if is_topk:
            sparse.unified_attention_sparse_mla(
                q=q,
                kv=cache.view(10, 4, 1, hdim),
                out=out,
                cu_seqlens_q=prefix_sums([1] * 4),
                max_seqlen_q=1,
                seqused_k=prefix_sums([1] * 3),
                max_seqlen_k=40,
                softmax_scale=SCALE,
                topk_indices=chosen.int(),
                block_table=None,
                kv_lora_rank=rank,
            )
        elif site == "lists":
            out = sparse.pa_decode_sparse(q, cache, *lists, sink, SCALE)
        elif site == "sources":
            extra = {"extra_cache": new, "extra_indices": others[0], "extra_indptr": others[1]}
            out = sparse.pa_decode_sparse(q, cache, *lists, sink, SCALE, **extra)
        else:
            found = aiter.pa_sparse_prefill_opus(q, cache, *lists, new, *others, sink, SCALE, out)
            assert found is out
    keys = [cache[each[each >= 0]] for each in chosen]
    if site in ("sources", "opus"):
        keys = [torch.cat([x, new[y[y >= 0]]]) for x, y in zip(keys, more, strict=True)]
    lengths, rows = [len(x) for x in keys], torch.cat(keys)[:, None]
    starts = [0, 1, 2, 3], prefix_sums(lengths).tolist()[:-1]
    expected, _ = attention_packed(
        *(q, rows, rows[..., :rank], [1] * 4, lengths, *starts),
        softmax_scale=SCALE,
        sink=sink,
    )
    # Parts are rounded before they are put together: once more each.
    bound = 2**-7 if site in ("sources", "opus") else 2**-8
    largest = rows.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound * largest)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("mla_decode_fwd", {"cp_world_size": 2}),
    ("mla_decode_fwd", {"nhead_kv": 2}),
    ("get_mla_metadata_v1", {"is_cp_round_robin": True}),
    ("paged_attention_ragged", {"mtp": 2}),
    ("paged_attention_ragged", {"fp8_out_scale": torch.ones(1)}),
    ("unified_attention", {"qq_bias": torch.ones(1)}),
    ("unified_attention", {"skip_reduce": True}),
]


@pytest.mark.parametrize("name", aiter.mla.REFUSED)
def test_latents_with_scales_of_blocks(name):
    with refused(NotImplementedError, name, "fp8 latents with a scale for each block"):
        getattr(aiter.mla, name)(torch.ones(1), sm_scale=1.0)


@pytest.mark.parametrize(("name", "changes"), REFUSED)
def test_refused_by_name(rng, name, changes):
    """The other arguments are valid, or not looked at."""
    it = Serving(rng, page_size=1)
    valid = {"block_size": 1, "kv_cache_layout": "NHD", "mtp": 1}
    valid |= {"kv_indptr": it.indptr, "kv_page_indices": it.indices}
    valid |= {"num_heads_k": 1, "is_causal": True}
    parameters = inspect.signature(AITER[name]).parameters.values()
    needed = {x.name: valid.get(x.name, it.k) for x in parameters if x.default is x.empty}
    with refused(NotImplementedError, *changes):
        AITER[name](**{**needed, **changes})
