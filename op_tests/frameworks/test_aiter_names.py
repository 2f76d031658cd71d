"""AITER's other names: each gives the bits of a function that has tests of its own.

Read from ``aiter/ops/mha.py`` and ``aiter/ops/triton/attention/mha_v3.py`` of github.com/ROCm/aiter
at commit e4048607a535ace3a2b51ded31b1c8c2d45c0879.
"""

from typing import Any

import pytest
import torch
from inputs import prefix_sums, random_qkv
from refusals import refused

import jitfmha
from jitfmha import aiter  # noqa: A004
from jitfmha.aiter import mha_v3

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SCALE = 0.2
mha: Any = mha_v3


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
