"""AITER's other names: each gives the bits of a function that has tests of its own.

Read from ``aiter/ops/mha.py``, ``aiter/ops/attention.py`` and ``mha.py`` and ``mha_v3.py`` of
``aiter/ops/triton/attention/`` of github.com/ROCm/aiter at commit
e4048607a535ace3a2b51ded31b1c8c2d45c0879.
"""

from typing import Any

import pytest
import torch
from frameworks.serving import Serving
from inputs import prefix_sums, random_qkv
from packed_pages import packed_keys, packed_values
from refusals import refused

import jitfmha
from jitfmha import aiter, install_as  # noqa: A004
from jitfmha.aiter import mha_v3, passes
from jitfmha.aiter.ops.triton import mha as triton_mha

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SCALE = 0.2
mha: Any = mha_v3
of_triton: Any = triton_mha
private: Any = passes
ours: Any = aiter


def test_names_that_have_nothing_to_do_with_attention():
    """vLLM asks for some by ``hasattr``, and imports others where it uses them."""
    with install_as("aiter"):
        import aiter as by_name

        with refused(AttributeError, "gemm_a8w8_CK", "attention functions", "docs/drop_ins.md"):
            by_name.gemm_a8w8_CK  # noqa: B018
        assert not hasattr(by_name, "qr_all_reduce_rmsnorm")
        from aiter.ops import attention

        assert attention.pa_persistent_fwd is ours.pa_persistent_fwd
        with refused(ImportError, "topk_softmax", "aiter"):
            from aiter import topk_softmax  # noqa: F401
        with refused(ModuleNotFoundError, "aiter.fused_moe", "docs/drop_ins.md"):
            import aiter.fused_moe  # noqa: F401


def test_batches(rng):
    q, k, v = random_qkv(rng, (20, 33, 2, 2), hdim=64)
    expected = jitfmha.flash_attn_func(q, k, v, softmax_scale=SCALE, causal=True)
    room = torch.full_like(expected, torch.nan)
    assert torch.equal(aiter.fmha_fwd_bf16_opus_fwd(q, k, v, SCALE, True), expected)
    assert aiter.fmha_fwd_bf16_opus_fwd(q, k, v, SCALE, True, room) is room
    assert torch.equal(room, expected)
    assert torch.equal(mha.flash_attn_func(q, k, v, SCALE, True), expected)
    window = {"causal": False, "window_size": (8, 3)}
    of_window = jitfmha.flash_attn_func(q, k, v, softmax_scale=SCALE, **window)
    assert torch.equal(mha.flash_attn_func(q, k, v, SCALE, **window, num_splits=1), of_window)


def test_packed_sequences(rng):
    q, k, v = (torch.randn(rows, 2, 64, generator=rng) for rows in (25, 33, 33))
    lengths = prefix_sums([5, 20]), prefix_sums([9, 24]), 20, 24
    expected = jitfmha.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=SCALE, causal=True)
    opus = aiter.fmha_fwd_bf16_opus_varlen_fwd(q, k, v, SCALE, True, *lengths)
    assert torch.equal(opus, expected)
    assert torch.equal(mha.flash_attn_varlen_func(q, k, v, *lengths, SCALE, True), expected)
    # Rows between the sequences that belong to none.
    padded = prefix_sums([7, 20])
    wide = torch.cat([q[:5], torch.full((2, 2, 64), torch.nan), q[5:]])
    spread = aiter.fmha_fwd_bf16_opus_varlen_fwd(
        *(wide, k, v, SCALE, True, *lengths), seqstart_q_pad=padded
    )
    assert torch.equal(torch.cat([spread[:5], spread[7:]]), expected)


def test_a_cache(rng):
    """Queries see the keys up to their own by default, and rotated halves."""
    q, k, v = random_qkv(rng, (2, 2, 2, 2), hdim=64)
    _, k_cache, v_cache = random_qkv(rng, (2, 32, 2, 2), hdim=64)
    lengths = torch.tensor([30, 7], dtype=torch.int32)
    angles = torch.rand(32, 16, generator=rng)
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": lengths}
    caches = k_cache.clone(), v_cache.clone()
    found = mha.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **tables, softmax_scale=SCALE)
    expected = jitfmha.flash_attn_with_kvcache(
        *(q, *caches, k, v), **tables, softmax_scale=SCALE, causal=True, rotary_interleaved=False
    )
    assert torch.equal(found, expected)
    assert torch.equal(k_cache, caches[0])


def test_of_triton(rng):
    q, k, v = random_qkv(rng, (20, 33, 4, 2), hdim=64)
    sink = torch.randn(4, generator=rng)
    expected = ours.flash_attn_func(q, k, v, 0.0, SCALE, True, sink_ptr=sink, return_lse=True)
    found = of_triton.flash_attn_func(q, k, v, 0.0, SCALE, True, sink=sink, return_lse=True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    cu_q, cu_k = prefix_sums([20, 20]), prefix_sums([33, 33])
    rows = *(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, 20, 33, 0.0, SCALE, True
    out, lse = of_triton.flash_attn_varlen_func(*rows, sink=sink, return_lse=True)
    assert torch.equal(out, expected[0].flatten(0, 1))
    assert torch.equal(lse, expected[1].transpose(1, 2).flatten(0, 1))
    assert torch.equal(of_triton.flash_attn_varlen_func(*rows, sink=sink), out)
    lengths = torch.tensor([30, 7], dtype=torch.int32)
    cached = of_triton.flash_attn_with_kvcache(q, k, v, None, None, lengths, SCALE)
    assert torch.equal(
        cached,
        jitfmha.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, softmax_scale=SCALE, causal=True
        ),
    )


def test_passes(rng):
    """What libraries with derivatives of their own import from ``aiter.ops.mha``."""
    with install_as("aiter"):
        from aiter.ops.mha import _flash_attn_backward, _flash_attn_forward

        assert (_flash_attn_forward, _flash_attn_backward) == (
            private._flash_attn_forward,
            private._flash_attn_backward,
        )
    q, k, v = random_qkv(rng, (20, 33, 2, 2), hdim=64)
    no, masks = (None,) * 3, (True, -1, -1)
    forward = private._flash_attn_forward(
        *(q, k, v, 0.0, SCALE, *masks, 0, None, None, *no, True, False)
    )
    expected = ours.mha_fwd(q, k, v, 0.0, SCALE, *masks, 0, True, False)
    assert all(torch.equal(*pair) for pair in zip(forward, expected, strict=True))
    dout = torch.randn(q.shape, generator=rng)
    room, more = [[torch.full_like(x, torch.nan) for x in (q, k, v)] for _ in "12"]
    call = dout, q, k, v, *forward[:2]
    softmax_d = private._flash_attn_backward(
        *(*call, *room, None, 0.0, SCALE, *masks, None, None, False)
    )
    gradients = ours.mha_bwd(*call, 0.0, SCALE, *masks, False)
    assert all(torch.equal(*pair) for pair in zip((*room, softmax_d), gradients, strict=True))
    cu_q, cu_k = prefix_sums([20, 20]), prefix_sums([33, 33])
    rows, lengths = [x.flatten(0, 1) for x in (q, k, v)], (cu_q, cu_k, 20, 33)
    packed = private._flash_attn_varlen_forward(
        *(*rows, cu_q, cu_k, None, None, 20, 33, 0, 0.0, SCALE, True), return_lse=True
    )
    assert torch.equal(packed[0], forward[0].flatten(0, 1))
    private._flash_attn_varlen_backward(
        *(dout.flatten(0, 1), *rows, *packed[:2], *(x.flatten(0, 1) for x in more)),
        *(*lengths, 0.0, SCALE, True, -1, -1, None, False),
    )
    for x, y in zip(more, room, strict=True):
        torch.testing.assert_close(x, y)


def test_rounded_to_fp8(rng):
    """As fp8 with AITER's scales; with gradients in the dtype of q."""
    q, k, v = random_qkv(rng, (20, 33, 4, 2), hdim=64, dtype=torch.bfloat16)
    given, rounded, exact = {}, [], []
    for name, x in (("q", q), ("k", k), ("v", v)):
        largest = x.float().abs().unflatten(2, (2, -1)).amax((1, 3, 4))
        scale = given[f"{name}_descale"] = largest / 448
        of_heads = scale.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        rounded.append((x.float() / of_heads).to(torch.float8_e4m3fn))
        exact.append((rounded[-1].float() * of_heads).bfloat16().requires_grad_())
    expected = mha.flash_attn_func(*rounded, SCALE, True, **given)
    found = mha.flash_attn_fp8_func(q, k, v, SCALE, True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float())
    cu_q, cu_k = prefix_sums([20, 20]), prefix_sums([33, 33])
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    packed = mha.flash_attn_varlen_fp8_func(*rows, cu_q, cu_k, 20, 33, SCALE, True)
    assert torch.equal(packed, found.flatten(0, 1))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = mha.flash_attn_fp8_func(*inputs, SCALE, True)
    in_bf16 = jitfmha.flash_attn_func(*exact, softmax_scale=SCALE, causal=True)
    torch.testing.assert_close(out, in_bf16.float(), rtol=0.02, atol=0.02)
    weights = torch.randn(out.shape, generator=rng)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    of_exact = torch.autograd.grad((in_bf16.float() * weights).sum(), exact)
    for x, y in zip(gradients, of_exact, strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)
    with refused(TypeError, "q has dtype torch.float8_e4m3fn"):
        mha.flash_attn_fp8_func(rounded[0], k, v)


def test_pages_with_several_queries(rng):
    """AITER's functions for several queries over packed pages give the same bits."""
    it = Serving(rng, lengths_q=(4, 4, 4), lengths_k=(4, 37, 70))
    pages, one = (packed_keys(it.k), packed_values(it.v)), it.one
    expected, lists = torch.empty_like(it.out), (it.table, it.seqlens_k)
    with install_as("aiter"):
        import aiter as by_name

        assert by_name.dtypes.bf16 is torch.bfloat16
        assert by_name.dtypes.fp8 is torch.float8_e4m3fn
        with jitfmha.emulate("gfx942"):
            assert by_name.dtypes.fp8 is torch.float8_e4m3fnuz
        torch.ops.aiter.pa_decode_gluon(expected, it.q, *pages, *lists[::-1], SCALE, 4, 1)
        torch.ops.aiter.paged_attention_rocm(
            *(it.out, one, one, one, it.q, *pages, 2, SCALE, *lists, 16, 70, None, "auto"),
            *(one, one, None, 256, 4),
        )
    it.check(expected, softmax_scale=SCALE)
    assert torch.equal(it.out, expected)
    common = ours.paged_attention_common(
        *(it.q, *pages, one, one, one, *lists, 5, SCALE, 4, 70), qo_indptr=it.cu_q
    )
    assert torch.equal(common, expected)
    kinds = ours.get_pa_metadata_info_v1(3, 2)
    buffers = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    work, indptr, info, *reduction = buffers
    ours.get_pa_metadata_v1(
        *(it.cu_q, it.indptr, it.seqlens_k, 2, 2, True, work, indptr, info, *reduction),
        block_size=16,
        max_seqlen_qo=4,
        uni_seqlen_qo=4,
    )
    call = 4, it.cu_q, it.indptr, it.indices, it.seqlens_k, indptr, info, *reduction
    parts, lse = ours.pa_persistent_fwd(
        it.q, *pages, it.out.zero_(), *call, softmax_scale=SCALE, mask=1
    )
    assert parts.numel() == 0
    assert torch.equal(it.out, expected)
    it.check(it.out, lse.T.contiguous(), softmax_scale=SCALE)
    with refused(NotImplementedError, "fp8_out_scale"):
        ours.paged_attention_rocm(
            *(it.out, one, one, one, it.q, *pages, 2, SCALE, *lists, 16, 70, None, "auto"),
            *(one, one, one, 256, 4),
        )


@pytest.mark.parametrize("form", ["one", "pages", "tokens"])
def test_scales_of_pages(rng, form):
    """8-bit pages with a scale, or one for each page and head or token and head."""
    it = Serving(rng)
    fp8 = torch.float8_e4m3fn
    pages = packed_keys(it.k.to(fp8)), packed_values(it.v.to(fp8))
    shape = {"one": (1,), "pages": (len(it.k), 2), "tokens": (len(it.k), 2, 16)}[form]
    of_k, of_v = (torch.rand(shape, generator=rng) + 0.5 for _ in "kv")
    call = it.q.to(fp8), *pages, it.out, 1, it.cu_q, it.indptr, it.indices, it.seqlens_k
    ours.pa_persistent_fwd(*call, *[it.one] * 5, of_k, of_v, SCALE)
    whole = [x.expand(len(it.k), 2) if form == "one" else x for x in (of_k, of_v)]
    by_token = [x[..., None].expand(-1, -1, 16) if x.dim() == 2 else x for x in whole]
    scales = [x.transpose(1, 2)[..., None].contiguous() for x in by_token]
    expected = jitfmha.fmha_fwd(
        *(it.q.to(fp8), it.k.to(fp8), it.v.to(fp8)),
        softmax_scale=SCALE,
        cu_seqlens_q=it.cu_q,
        cu_seqlens_k=it.cu_k,
        block_table=it.table,
        k_descale=scales[0],
        v_descale=scales[1],
    )
    torch.testing.assert_close(it.out, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "changes", [{"qv": torch.ones(1)}, {"attention_chunk": 2}, {"cu_seqlens_q": prefix_sums([1])}]
)
def test_refused_by_name(rng, changes):
    q, k, v = random_qkv(rng, (2, 32, 2, 2), hdim=64)
    with refused(NotImplementedError, *changes):
        mha.flash_attn_with_kvcache(q, k, v, **changes)
    if "cu_seqlens_q" not in changes:
        with refused(NotImplementedError, *changes):
            mha.flash_attn_func(q, k, v, **changes)
