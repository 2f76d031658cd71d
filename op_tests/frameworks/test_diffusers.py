"""What Diffusers imports of flash-attn, and how it calls it.

Read from ``src/diffusers/models/attention_dispatch.py`` of github.com/huggingface/diffusers at
commit 58eb52c0803ea9af3abec60841c2a093bdf1f951 (0.40.0.dev0).
"""

from typing import Any

import pytest
import torch
from closeness import assert_close, is_same
from frameworks.serving import TARGETS, on
from inputs import prefix_sums, random_qkv
from refusals import refused
from torch import Tensor

import jitfmha
from jitfmha import install_as
from jitfmha.flash_attn import flash_attn_interface
from jitfmha.problem.float64_reference import attention, attention_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

forward: Any = flash_attn_interface._wrapped_flash_attn_forward
backward: Any = flash_attn_interface._wrapped_flash_attn_backward
varlen_forward: Any = flash_attn_interface._wrapped_flash_attn_varlen_forward
varlen_backward: Any = flash_attn_interface._wrapped_flash_attn_varlen_backward
SCALE = 0.2
NO_DROPOUT = 1e-30
"""flash-attn returns an lse with dropout only, so this is what Diffusers asks for."""


def test_imports():
    """All in one ``try``, at the top of the file."""
    with install_as("flash_attn"):
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: F401
        from flash_attn.flash_attn_interface import (
            _wrapped_flash_attn_backward,
            _wrapped_flash_attn_forward,
        )

        assert _wrapped_flash_attn_backward is backward
        assert _wrapped_flash_attn_forward is forward


@pytest.mark.parametrize("target", TARGETS)
def test_flash_attention(rng, target):
    """``_flash_attention`` of one device, in bf16."""
    q, k, v = random_qkv(rng, (20, 33, 2, 2), hdim=64, dtype=torch.bfloat16)
    with on(target):
        out, lse, *_ = jitfmha.flash_attn_func(
            q=q,
            k=k,
            v=v,
            dropout_p=0.0,
            softmax_scale=SCALE,
            causal=False,
            window_size=(-1, -1),
            return_attn_probs=True,
        )
    assert_close((out, lse), attention(q, k, v, softmax_scale=SCALE), q, k, v, SCALE)


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **mask: Any) -> list[Tensor]:
    """In float64, by autograd through the reference."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", inputs[0], inputs[1]) * SCALE
    if mask["causal"]:
        ahead = torch.ones(scores.shape[-2:]).triu(1 + k.shape[1] - q.shape[1]).bool()
        scores = scores.masked_fill(ahead, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), inputs[2])
    return list(torch.autograd.grad(out, inputs, dout.double()))


@pytest.mark.parametrize("causal", [False, True])
def test_passes_of_a_batch(rng, causal):
    """``_flash_attention_forward_op`` and ``_flash_attention_backward_op``."""
    q, k, v = (x.requires_grad_() for x in random_qkv(rng, (20, 33, 2, 2), hdim=64))
    out, lse, probabilities, rng_state = forward(
        *(q, k, v, NO_DROPOUT, SCALE, causal, -1, -1, 0.0, None, True)
    )
    assert not out.requires_grad
    assert probabilities.numel() == 0
    mask = 2 if causal else 0
    expected = attention(q.detach(), k.detach(), v.detach(), softmax_scale=SCALE, mask=mask)
    assert_close((out, lse), expected, q, k, v, SCALE)
    dout = torch.randn(out.shape, generator=rng)
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = backward(
        *(dout, q, k, v, out, lse, *found),
        *(NO_DROPOUT, SCALE, causal, -1, -1, 0.0, None, False, rng_state),
    )
    for actual, exact in zip(found, gradients(q, k, v, dout, causal=causal), strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=1e-4)
    exact = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(softmax_d.double(), exact, rtol=1e-5, atol=1e-5)


def test_passes_of_packed_sequences(rng):
    """``_flash_varlen_attention_hub_forward_op`` and ``..._backward_op``."""
    lengths_q, lengths_k = (5, 0, 20), (9, 4, 20)
    cu_q, cu_k = prefix_sums(lengths_q), prefix_sums(lengths_k)
    q, k, v = (torch.randn(rows, 2, 64, generator=rng) for rows in (25, 33, 33))
    given = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    out, lse, _, rng_state = varlen_forward(
        *(q, k, v, cu_q, cu_k, 20, 20, NO_DROPOUT, SCALE, False), **given, return_softmax=True
    )
    starts = cu_q.tolist()[:-1], cu_k.tolist()[:-1]
    expected = attention_packed(q, k, v, lengths_q, lengths_k, *starts, softmax_scale=SCALE)
    assert_close((out, lse), expected, q, k, v, SCALE)
    dout = torch.randn(out.shape, generator=rng)
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    lists = dout, q, k, v, out, lse, *found, cu_q, cu_k, 20, 20
    varlen_backward(*lists, NO_DROPOUT, SCALE, False, -1, -1, 0.0, None, False, rng_state)
    for rows, keys in (((0, 5), (0, 9)), ((5, 25), (13, 33))):
        one = q[None, slice(*rows)], k[None, slice(*keys)], v[None, slice(*keys)]
        exact = gradients(*one, dout[None, slice(*rows)], causal=False)
        for x, of, reference in zip(found, (rows, keys, keys), exact, strict=True):
            torch.testing.assert_close(
                x[None, slice(*of)].double(), reference, rtol=1e-4, atol=1e-4
            )
    assert torch.equal(found[1][9:13], torch.zeros(4, 2, 64))


def test_keys_that_are_not_used(rng):
    """``seqused_k`` is as if the others were not there, with and without pages."""
    cu_q, cu_k = prefix_sums([3, 2]), prefix_sums([16, 16])
    q, k, v = (torch.randn(rows, 2, 64, generator=rng).bfloat16() for rows in (5, 32, 32))
    used = torch.tensor([7, 16], dtype=torch.int32)
    k[7:16], v[7:16] = torch.nan, torch.nan
    options = {"seqused_k": used, "return_softmax": False}
    rows = varlen_forward(q, k, v, cu_q, cu_k, 3, 16, 0.0, SCALE, True, **options)
    starts = [0, 3], [0, 16]
    expected = attention_packed(q, k, v, [3, 2], [7, 16], *starts, softmax_scale=SCALE, mask=2)
    assert_close(rows[:2], expected, q, k[:7], v[:7], SCALE)
    pages = k.view(2, 16, 2, 64), v.view(2, 16, 2, 64)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    paged = varlen_forward(
        *(q, *pages, cu_q, cu_k, 3, 16, 0.0, SCALE, True), block_table=table, **options
    )
    assert_close(paged[:2], expected, q, k[:7], v[:7], SCALE)


def test_dropout_of_a_pass(rng):
    """The state that it returns repeats the same numbers."""
    q, k, v = random_qkv(rng, (20, 33, 2, 2), hdim=64)
    call = q, k, v, 0.5, SCALE, False, -1, -1, 0.0, None
    out, lse, probabilities, rng_state = forward(*call, True)
    again = jitfmha.fmha_fwd(
        *(q, k, v), return_lse=True, softmax_scale=SCALE, dropout_p=0.5, rng_state=rng_state
    )
    assert is_same((out, lse), again)
    assert probabilities.shape == (2, 2, 20, 33)
    assert forward(*call, False)[2].numel() == 0


@pytest.mark.parametrize("with_used", [False, True])
def test_keys_that_are_skipped(rng, with_used):
    """``leftpad_k``: the first keys of a sequence are as if they were not there."""
    skipped, used = [3, 0, 5], [9, 0, 5] if with_used else [12, 4, 5]
    cu_q, cu_k = prefix_sums([3, 2, 2]), prefix_sums([12, 4, 5])
    q, k, v = (torch.randn(rows, 2, 64, generator=rng) for rows in (7, 21, 21))
    options = {"seqused_k": torch.tensor(used).int()} if with_used else {}
    found = varlen_forward(
        *(q, k, v, cu_q, cu_k, 3, 12, 0.0, SCALE, True),
        leftpad_k=torch.tensor(skipped).int(),
        **options,
    )
    first = [start + n for start, n in zip(cu_k.tolist(), skipped, strict=False)]
    lengths = [end - n for end, n in zip(used, skipped, strict=True)]
    starts = cu_q.tolist()[:-1], first
    expected = attention_packed(q, k, v, [3, 2, 2], lengths, *starts, softmax_scale=SCALE, mask=2)
    assert_close(found[:2], expected, q, k, v, SCALE)


def test_refused_by_name(rng):
    q, k, v = random_qkv(rng, (20, 33, 2, 2), hdim=64)
    with refused(ValueError, "rng_state is missing", "0.5"):
        backward(q, q, k, v, q, q, q, k, v, 0.5, SCALE, False, -1, -1, 0.0, None, False)
    packed, sums = [x.flatten(0, 1) for x in (q, k, v)], prefix_sums([20, 20])
    given = *packed, sums, prefix_sums([33, 33]), 20, 33, 0.0, SCALE, False
    for leftpad_k, error, texts in [
        ([0, 34], ValueError, ["leftpad_k", "[0, 34]", "[33, 33]"]),
        ([-1, 0], ValueError, ["leftpad_k", "[-1, 0]"]),
        ([0], ValueError, ["leftpad_k", "the 2 sequences"]),
    ]:
        with refused(error, *texts):
            varlen_forward(*given, leftpad_k=torch.tensor(leftpad_k).int())
    with refused(NotImplementedError, "leftpad_k", "block_table"):
        varlen_forward(*given, leftpad_k=sums[1:], block_table=sums[None])
