"""What vLLM calls, of flash-attn's stand-in and of AITER.

Read from files of github.com/vllm-project/vllm, each at the commit that the table names. Functions
of ``vllm.vllm_flash_attn`` take the same keywords as what it imports as ``flash_attn`` on ROCm.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from frameworks.serving import FP8, TARGETS, Serving, on
from inputs import prefix_sums
from packed_pages import packed_keys, packed_values
from refusals import refused
from torch import Tensor

import jitfmha
from jitfmha import install_as
from jitfmha.problem.float64_reference import attention_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

flash_attn_varlen_func: Any = jitfmha.flash_attn_varlen_func
with install_as("aiter"):
    from aiter.ops.triton.unified_attention import unified_attention
SCALE = 0.11
CHUNKS = {"lengths_q": (1, 20, 3), "lengths_k": (1, 37, 70)}


def flash_attn_backend(it: Serving) -> Tensor:
    """``v1/attention/backends/flash_attn.py``, 5704f34f361c6c59a9c092c4e1e96730cc6dc14d."""
    shape = len(it.lengths_q), it.k.shape[2]
    flash_attn_varlen_func(
        q=it.q,
        k=it.k,
        v=it.v,
        out=it.out,
        cu_seqlens_q=it.cu_q,
        max_seqlen_q=max(it.lengths_q),
        seqused_k=it.seqlens_k,
        max_seqlen_k=max(it.lengths_k),
        softmax_scale=SCALE,
        causal=True,
        alibi_slopes=None,
        window_size=[-1, -1],
        block_table=it.table,
        softcap=0.0,
        scheduler_metadata=None,
        fa_version=3,
        q_descale=it.one.expand(shape),
        k_descale=it.k_scale.expand(shape),
        v_descale=it.v_scale.expand(shape),
        num_splits=1,
        s_aux=None,
    )
    return it.out


def aiter_unified(it: Serving) -> Tensor:
    """``.../rocm_aiter_unified_attn.py``, 00e5aa02a6470e57ef1e606d1caf95c3e2677e41."""
    unified_attention(
        q=it.q,
        k=it.k,
        v=it.v,
        out=it.out,
        cu_seqlens_q=it.cu_q,
        max_seqlen_q=max(it.lengths_q),
        seqused_k=it.seqlens_k,
        max_seqlen_k=max(it.lengths_k),
        softmax_scale=SCALE,
        causal=True,
        alibi_slopes=None,
        window_size=(-1, -1),
        block_table=it.table,
        softcap=0.0,
        q_descale=None,
        k_descale=it.k_scale,
        v_descale=it.v_scale,
        sinks=None,
        output_scale=None,
    )
    return it.out


def aiter_unified_packed(it: Serving) -> Tensor:
    """The same file's cache of keys and values in one, ``(pages, heads, page_size, 2 * hdim)``."""
    cache = torch.cat([it.k, it.v], dim=-1).transpose(1, 2).contiguous()
    it.k, it.v = cache.transpose(1, 2).split(it.k.shape[-1], dim=-1)
    return aiter_unified(it)


def aiter_decode(it: Serving) -> Tensor:
    """``v1/attention/backends/rocm_aiter_fa.py``, 002d0eb6012db14ad48a6db7abecdc1015f2da5d."""
    with install_as("aiter"):
        import aiter  # noqa: A004, F401 - puts the operator in place

        torch.ops.aiter.paged_attention_v1(
            *(it.out, it.workspace, it.q, it.k, it.v, SCALE, it.table),
            *(it.cu_q[:-1], it.seqlens_k, max(it.lengths_k), None, it.cache_dtype, "NHD", 0.0),
            *(it.k_scale, it.v_scale, None, 256),
        )
    return it.out


def aiter_windows(it: Serving) -> Tensor:
    """``rocm_aiter_fa.py`` where paged_attention_v1 has no kernel; of decoding alone."""
    shape = len(it.lengths_q), it.k.shape[2]
    unified_attention(
        q=it.q,
        k=it.k,
        v=it.v,
        out=it.out,
        cu_seqlens_q=it.cu_q,
        max_seqlen_q=1,
        seqused_k=it.seqlens_k,
        max_seqlen_k=max(it.lengths_k),
        softmax_scale=SCALE,
        causal=True,
        alibi_slopes=None,
        window_size=(-1, -1),
        block_table=it.table,
        softcap=0.0,
        q_descale=None,
        k_descale=it.k_scale.expand(shape),
        v_descale=it.v_scale.expand(shape),
    )
    return it.out


# With kv_cache_dtype="fp8" these have the cache as fp8, and the query as it is.
IN_FP8: dict[str, Any] = {"kv_dtype": FP8}
SITES: list[tuple[Callable[[Serving], Tensor], dict[str, Any]]] = [
    (flash_attn_backend, CHUNKS),
    (flash_attn_backend, CHUNKS | IN_FP8),
    (aiter_unified, CHUNKS),
    (aiter_unified_packed, CHUNKS),
    (aiter_unified, CHUNKS | IN_FP8),
    (aiter_unified, CHUNKS | IN_FP8 | {"dtype": torch.float16}),
    (aiter_windows, {"hdim": 32} | IN_FP8),
    (aiter_decode, {}),
    (aiter_decode, IN_FP8),
]


@pytest.mark.sample("target", TARGETS, 1)
@pytest.mark.parametrize(("site", "batch"), SITES)
def test_keys_in_pages(rng, target, site, batch):
    it = Serving(rng, **batch)
    with on(target):
        out = site(it)
    assert out is it.out
    it.check(out, softmax_scale=SCALE)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_packed_pages(rng, kv_dtype):
    """``pa_fwd_asm`` and ``paged_attention_common`` of ``rocm_aiter_fa.py``.

    With the cache that vLLM calls SHUFFLE; the second is called since 2026. An fp8 cache has a
    scale for each token.
    """
    it = Serving(rng, kv_dtype=kv_dtype)
    k, v = packed_keys(it.k), packed_values(it.v)
    of_tokens = it.k.shape[0], it.k.shape[2], it.page_size
    scales = (x.expand(of_tokens).clone() for x in (it.k_scale, it.v_scale))
    k_scale, v_scale = scales if kv_dtype else (None, None)
    with on("gfx942"):
        jitfmha.aiter.pa_fwd_asm(
            Q=it.q,
            K=k,
            V=v,
            block_tables=it.table,
            context_lens=it.seqlens_k,
            block_tables_stride0=it.table.stride(0),
            K_QScale=k_scale,
            V_QScale=v_scale,
            out_=it.out,
        )
    it.check(it.out)
    parts = torch.empty(3, 4, 1)
    jitfmha.aiter.paged_attention_common(
        Q=it.q,
        K=k,
        V=v,
        tmp_out=torch.empty(3, 4, 1, 64),
        max_logits=parts,
        exp_sums=parts,
        max_seq_len=70,
        block_tables=it.table,
        context_lens=it.seqlens_k,
        block_tables_stride0=it.table.stride(0),
        scale=SCALE,
        K_QScale_hip=it.one,
        V_QScale_hip=it.one,
        K_QScale_asm=torch.ones(of_tokens) if k_scale is None else k_scale,
        V_QScale_asm=torch.ones(of_tokens) if v_scale is None else v_scale,
        out_=it.out,
        kv_cache_dtype="auto",
    )
    it.check(it.out, softmax_scale=SCALE)


def test_triton_prefill_of_latents(rng):
    """``mla/aiter_triton_mla.py``, 3ac1a52fbb0d5edaed581485163cf90cf80eae4b; lse of the tokens."""
    with install_as("aiter"):
        from aiter.ops.triton.mha import flash_attn_varlen_func as of_triton
    it = Serving(rng, **CHUNKS, hdim=192)
    result = of_triton(
        *(it.q, it.rows_k, it.rows_v[..., :128]),
        softmax_scale=SCALE,
        return_lse=True,
        cu_seqlens_q=it.cu_q,
        cu_seqlens_k=it.cu_k,
        max_seqlen_q=20,
        max_seqlen_k=70,
        causal=True,
    )
    it.rows_v = it.rows_v[..., :128]
    it.check(result[0], result[1].T.contiguous(), softmax_scale=SCALE)


# ---- _aiter_ops.py, 0002bde560dd9adcabb28b0da32f47d4c020e799: what else it calls of AITER --------

LATENTS: dict[str, Any] = {"page_size": 1, "heads": (3, 1), "hdim": 576, "rank": 512}


def latents_of_ops(it: Serving, **options: Any) -> tuple[Tensor, Tensor | None]:
    """What ``_rocm_aiter_mla_decode_fwd_impl`` and its sibling with the lse have in common."""
    with install_as("aiter"):
        from aiter.mla import mla_decode_fwd
    assert {"q_scale", "kv_scale"} <= inspect.signature(mla_decode_fwd).parameters.keys()
    _, lse = mla_decode_fwd(
        it.q,
        it.k.view(-1, 1, 1, 576),
        it.out,
        it.cu_q,
        it.indptr,
        it.indices,
        it.last_page_lens,
        max(it.lengths_q),
        sm_scale=SCALE,
        logit_cap=0.0,
        q_scale=None if it.k.dtype == it.q.dtype else it.one,
        kv_scale=None if it.k.dtype == it.q.dtype else it.k_scale.view(1),
        **options,
    )
    return it.out, lse


@pytest.mark.parametrize("causal", [True, False])
def test_decoding_of_latents(rng, causal):
    """Also of several tokens; what says how work is shared out has no effect."""
    it = Serving(rng, **LATENTS, lengths_q=(1, 2, 4), lengths_k=(1, 37, 70))
    names = "work_meta_data", "work_indptr", "work_info_set"
    work = dict.fromkeys((*names, "reduce_indptr", "reduce_final_map", "reduce_partial_map"))
    work |= dict.fromkeys(work, torch.empty(0, dtype=torch.int32))
    out, lse = latents_of_ops(it, causal=causal, **work)
    assert lse is None
    it.check(out, softmax_scale=SCALE, mask=2 if causal else 0)


@pytest.mark.parametrize("target", TARGETS)
def test_decoding_of_fp8_latents(rng, target):
    """An fp8 cache beside queries of 16 bits, which keep them."""
    it = Serving(rng, **LATENTS, kv_dtype=FP8)
    it.v_scale = it.k_scale
    with on(target):
        out, _ = latents_of_ops(it, causal=True)
    it.check(out, softmax_scale=SCALE)


@pytest.mark.parametrize("number", [None, 1])
def test_decoding_of_latents_with_the_lse(rng, number):
    """With splits as AITER counts them, and with one, as vLLM asks for it on gfx950."""
    it = Serving(rng, **LATENTS)
    with install_as("aiter"):
        from aiter.mla import get_meta_param
    count, splits = get_meta_param(None, 3, it.indices.numel(), 3, 1, it.q.dtype)
    if number:
        count, splits = number, torch.arange(4, dtype=torch.int32)
    out, lse = latents_of_ops(it, return_lse=True, num_kv_splits=count, num_kv_splits_indptr=splits)
    assert lse is not None
    it.check(out, lse.T.contiguous(), softmax_scale=SCALE)


@pytest.mark.parametrize("sinks", [False, True])
def test_sequences_of_ops(rng, sinks):
    """``flash_attn_varlen_func``, with None where vLLM has nothing to say."""
    with install_as("aiter"):
        from aiter import flash_attn_varlen_func as of_aiter
    it = Serving(rng, **CHUNKS)
    sink = torch.randn(4, generator=rng) if sinks else None
    out, lse = of_aiter(
        q=it.q,
        k=it.rows_k,
        v=it.rows_v,
        cu_seqlens_q=it.cu_q,
        cu_seqlens_k=it.cu_k,
        max_seqlen_q=20,
        max_seqlen_k=70,
        min_seqlen_q=None,
        dropout_p=0.0,
        softmax_scale=SCALE,
        causal=True,
        window_size=None,
        alibi_slopes=None,
        return_lse=True,
        out=it.out,
        sink_ptr=sink,
    )
    assert out.data_ptr() == it.out.data_ptr()
    it.check(out, lse, softmax_scale=SCALE, **({"sink": sink} if sinks else {}))


def test_images_in_fp8(rng):
    """``_rocm_aiter_fp8_attn_impl``; and scales of prompts whose q, k and v come in fp8."""
    with install_as("aiter"):
        from aiter import flash_attn_varlen_fp8_pertensor_func, flash_attn_varlen_func
    q, k, v = (torch.randn(2, 33, 3, 64, generator=rng).to(FP8) for _ in range(3))
    scales = {f"{x}_descale": torch.rand(1, generator=rng) + 0.5 for x in "qkv"}
    lengths = prefix_sums((33, 33))
    expected = jitfmha.fmha_fwd(q, k, v, softmax_scale=SCALE, **scales)
    for function in (flash_attn_varlen_fp8_pertensor_func, flash_attn_varlen_func):
        out = function(
            *(x.flatten(0, 1) for x in (q, k, v)),
            **scales,
            cu_seqlens_q=lengths,
            cu_seqlens_k=lengths,
            max_seqlen_q=33,
            max_seqlen_k=33,
            causal=False,
            softmax_scale=SCALE,
        )
        assert torch.equal(out.view(2, 33, 3, 64), expected)


def test_names_that_ops_takes_from_elsewhere():
    """Where vLLM looks for products, it is told what stands in AITER's place."""
    with install_as("aiter"):
        import aiter as by_name

        for name in ("hipb_mm", "gemm_a8w8_blockscale", "topk_softmax"):
            with refused(AttributeError, name, "attention functions"):
                getattr(by_name, name)
        for module in ("fused_moe", "ops.mhc", "ops.shuffle", "ops.triton.fused_kv_cache"):
            with refused(ModuleNotFoundError, f"aiter.{module}", "docs/drop_ins.md"):
                importlib.import_module(f"aiter.{module}")


def test_sequences_without_pages(rng):
    """The new tokens of ``_forward_with_dcp`` in ``flash_attn.py``, with the lse for a merge."""
    it = Serving(rng, **CHUNKS)
    k, v = it.rows_k, it.rows_v
    out, lse = flash_attn_varlen_func(
        q=it.q,
        k=k,
        v=v,
        cu_seqlens_q=it.cu_q,
        cu_seqlens_k=it.cu_k,
        max_seqlen_q=20,
        max_seqlen_k=70,
        softmax_scale=SCALE,
        causal=True,
        return_softmax_lse=True,
        fa_version=2,
        num_splits=1,
    )
    it.check(out, lse, softmax_scale=SCALE)


def test_latents(rng):
    """``v1/attention/backends/mla/flashattn_mla.py``, 09aa6b34bf7bd7f309464cefb570552144db41c3."""
    latent = {"page_size": 1, "heads": (3, 1), "hdim": 576, "rank": 512}
    it = Serving(rng, **latent, lengths_q=(4, 4, 4), lengths_k=(4, 37, 70))
    call = {
        "q": it.q[..., 512:],
        "k": it.k[:, :, 0, 512:].unsqueeze(-2),
        "v": it.k[:, :, 0, :512].unsqueeze(-2),
        "q_v": it.q[..., :512],
        "max_seqlen_q": 4,
        "cu_seqlens_q": it.cu_q,
        "max_seqlen_k": 70,
        "seqused_k": it.seqlens_k,
        "block_table": it.table,
        "softmax_scale": SCALE,
        "causal": True,
        "fa_version": 3,
        "scheduler_metadata": None,
        "num_splits": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
        "cp_tot_seqused_k": None,
    }
    it.check(flash_attn_varlen_func(**call), softmax_scale=SCALE)
    with refused(NotImplementedError, "q_v", "one tensor"):
        flash_attn_varlen_func(**{**call, "v": it.v.clone()})
    with refused(ValueError, "q_v", "(12, 3, 512)"):
        flash_attn_varlen_func(**{**call, "q_v": it.q})


def test_sinks_windows_and_soft_caps(rng):
    it = Serving(rng, **CHUNKS)
    sinks = torch.randn(4, generator=rng).bfloat16()
    pages = {"block_table": it.table, "seqused_k": it.seqlens_k, "cu_seqlens_q": it.cu_q}
    options = {"softmax_scale": SCALE, "causal": True, "softcap": 5.0}
    lengths = {"max_seqlen_q": 20, "max_seqlen_k": 70}
    expected = {"window_size": (8, 0), "sink": sinks.float(), "logit_softcap": 5.0}
    out = flash_attn_varlen_func(
        it.q, it.k, it.v, **pages, **lengths, **options, window_size=[8, 0], s_aux=sinks
    )
    it.check(out, softmax_scale=SCALE, **expected)
    no_scales = dict.fromkeys(["q_descale", "k_descale", "v_descale"])
    unified_attention(
        *(it.q, it.k, it.v, it.out),
        **pages,
        **lengths,
        **options,
        **no_scales,
        window_size=(8, 0),
        sinks=sinks,
    )
    assert torch.equal(it.out, out)


def test_scales_of_16_bits_are_those_of_the_call(rng):
    """AITER multiplies with them; flash-attn 3 does not look at them."""
    it = Serving(rng)
    given = it.cu_q, 1, it.seqlens_k, 70, SCALE, True, (-1, -1), it.table, 0.0
    unified_attention(it.q, it.k, it.v, it.out, *given, None, 2 * it.one, 4 * it.one)
    it.check(it.out / 4, softmax_scale=2 * SCALE)
    in_fp8 = Serving(rng, kv_dtype=FP8)
    unified_attention(
        *(in_fp8.q, in_fp8.k, in_fp8.v, in_fp8.out, *given[:-2]),
        *(in_fp8.table, 0.0, 2 * it.one, in_fp8.k_scale, in_fp8.v_scale),
    )
    in_fp8.check(in_fp8.out, softmax_scale=2 * SCALE)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_output_scale(rng, dtype):
    it = Serving(rng)
    out = torch.zeros(it.out.shape, dtype=dtype)
    given = it.cu_q, 1, it.seqlens_k, 70, SCALE, True, (-1, -1), it.table, 0.0, None, None
    unified_attention(it.q, it.k, it.v, it.out, *given, None)
    limit = torch.finfo(dtype).max
    for of_v in (None, 0.3 * it.one):  # which is in the result before it is rounded
        unified_attention(it.q, it.k, it.v, out, *given, of_v, output_scale=torch.tensor(0.001))
        exact = it.out.float() * (1 if of_v is None else of_v) / torch.tensor(0.001)
        assert torch.equal(out.float(), exact.clamp(-limit, limit).to(dtype).float())
    with refused(ValueError, "out is None", "dtype"):
        flash_attn_varlen_func(
            *(it.q, it.k, it.v, it.cu_q),
            seqused_k=it.seqlens_k,
            block_table=it.table,
            output_scale=it.one,
        )


def test_fp8_with_scales(rng):
    """Keys, values and queries of 8 bits, with a scale of no dimension."""
    it = Serving(rng)
    fp8 = torch.float8_e4m3fn
    q, k, v = (x.to(fp8) for x in (it.q, it.k, it.v))
    scale = torch.tensor(0.5)
    given = it.cu_q, 1, it.seqlens_k, 70, SCALE, True, (-1, -1), it.table, 0.0, scale, scale, scale
    unified_attention(q, k, v, it.out, *given)
    exact = [x.to(fp8).bfloat16() for x in (it.q, it.rows_k, it.rows_v)]
    starts = it.cu_q.tolist()[:-1], it.cu_k.tolist()[:-1]
    expected = attention_packed(
        *(*exact, it.lengths_q, it.lengths_k, *starts), softmax_scale=SCALE / 4, mask=2
    )
    # Probabilities are rounded to 8 bits, too.
    torch.testing.assert_close(it.out.double(), expected[0] / 2, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"dynamic_causal": torch.ones(3)},
        {"mask_mod": print},
        {"aux_tensors": [torch.ones(3)]},
        {"cp_world_size": 2},
    ],
)
def test_refused_by_name(rng, changes):
    it = Serving(rng)
    pages = {"seqused_k": it.seqlens_k, "block_table": it.table}
    with refused(NotImplementedError, *changes):
        flash_attn_varlen_func(it.q, it.k, it.v, it.cu_q, **pages, **changes)


def test_lengths_that_are_missing(rng):
    it = Serving(rng)
    with refused(ValueError, "cu_seqlens_k=None"):
        flash_attn_varlen_func(it.q, it.rows_k, it.rows_v, it.cu_q, seqused_k=it.seqlens_k)
    with refused(ValueError, "cu_seqlens_k=None"):
        flash_attn_varlen_func(it.q, it.k, it.v, it.cu_q, block_table=it.table)
    with refused(TypeError, "seqused_k", "float32"):
        flash_attn_varlen_func(
            it.q, it.k, it.v, it.cu_q, block_table=it.table, seqused_k=it.seqlens_k.float()
        )
