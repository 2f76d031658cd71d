"""The rotary embedding that others import from flash-attn, against float64.

Read from ``flash_attn/ops/triton/rotary.py`` and ``flash_attn/layers/rotary.py`` of
github.com/Dao-AILab/flash-attention at commit 0251105a2fb19d2957484b7f023cd8c115286ced; vLLM
imports the first one.
"""

from typing import Any

import pytest
import torch
from inputs import prefix_sums
from refusals import refused
from torch import Tensor

from jitfmha import install_as
from jitfmha.flash_attn.layers import rotary
from jitfmha.flash_attn.ops.triton.rotary import apply_rotary

HDIM, WIDTH, POSITIONS = 24, 16, 40
apply: Any = apply_rotary


def tables(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    angles = torch.rand(POSITIONS, WIDTH // 2, generator=rng) * 6
    return angles.cos(), angles.sin()


def turned(x: Tensor, angles: tuple[Tensor, Tensor], position: int, interleaved: bool) -> Tensor:
    """A token ``(h, hdim)`` as complex numbers, in float64."""
    cos, sin = (table[position].double() for table in angles)
    pairs = x[:, :WIDTH].double()
    a, b = (pairs[:, ::2], pairs[:, 1::2]) if interleaved else pairs.chunk(2, -1)
    product = torch.complex(a, b) * torch.complex(cos, sin)
    parts = [product.real, product.imag]
    whole = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([whole, x[:, WIDTH:].double()], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_and_packed_sequences(rng, dtype, interleaved):
    x = torch.randn(2, 7, 3, HDIM, generator=rng).to(dtype)
    angles, offsets = tables(rng), torch.tensor([0, 33], dtype=torch.int32)
    first = offsets.tolist()
    rows = [turned(x[n, i], angles, first[n] + i, interleaved) for n in (0, 1) for i in range(7)]
    expected = torch.stack(rows).view(x.shape)
    found = rotary.apply_rotary_emb(x, *angles, interleaved, False, offsets)
    torch.testing.assert_close(found, expected.to(dtype))
    # The first four tokens of one sequence, and all of the other.
    packed, sums = torch.cat([x[0, :4], x[1]]), prefix_sums([4, 7])
    more = {"seqlen_offsets": offsets, "cu_seqlens": sums, "max_seqlen": 7}
    of_packed = apply(packed, *angles, **more, interleaved=interleaved)
    assert torch.equal(of_packed, torch.cat([found[0, :4], found[1]]))
    # Backwards it is as before, but for rounding.
    there = apply(x.float(), *angles, offsets, interleaved=interleaved)
    back = apply(there, *angles, offsets, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x.float())
    # In place, and by the function in the dtype of x.
    copy = x.clone()
    assert apply(copy, *angles, offsets, interleaved=interleaved, inplace=True) is copy
    assert torch.equal(copy, found)
    of_batch = [torch.stack([table[:7], table[33:]]) for table in angles]
    by_torch = rotary.apply_rotary_emb_torch(x.double(), *of_batch, interleaved)
    torch.testing.assert_close(by_torch, expected, rtol=1e-6, atol=1e-6)


def test_gradients(rng):
    x = torch.randn(1, 5, 2, HDIM, generator=rng, requires_grad=True)
    angles = tables(rng)
    weights = torch.randn(x.shape, generator=rng)
    (gradient,) = torch.autograd.grad((apply(x, *angles, 3) * weights).sum(), x)
    torch.testing.assert_close(gradient, apply(weights, *angles, 3, conjugate=True))


@pytest.mark.parametrize("scale_base", [None, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_layer(rng, interleaved, scale_base):
    """All ways to give q and k, in place, with positions that start elsewhere in each sequence."""
    layer: Any = rotary.RotaryEmbedding(WIDTH, 100.0, interleaved, scale_base)
    offsets, rows = torch.tensor([0, 33], dtype=torch.int32), POSITIONS
    turns = 100.0 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    position = torch.arange(rows).double()
    angles = torch.outer(position, turns)
    size = torch.ones(()).double()
    if scale_base:
        share = (torch.arange(0, WIDTH, 2) + 0.4 * WIDTH) / (1.4 * WIDTH)
        size = share.double() ** ((position - rows // 2) / scale_base)[:, None]
    q, k = (torch.randn(2, 7, heads, HDIM, generator=rng) for heads in (4, 2))
    expected = []
    for x, of_x in ((q, size), (k, 1 / size)):
        tables = angles.cos() * of_x, angles.sin() * of_x
        places = [(n, i) for n in (0, 1) for i in range(7)]
        of_rows = [turned(x[n, i], tables, int(offsets[n]) + i, interleaved) for n, i in places]
        expected.append(torch.stack(of_rows).view(x.shape).float())
    of_q, of_k = expected
    where = {"seqlen_offset": offsets, "max_seqlen": rows}
    both, v = torch.cat([q, k], 2), torch.randn(2, 7, 2, HDIM, generator=rng)
    qkv = torch.cat([both, v], 2)
    assert layer(qkv, **where, num_heads_q=4) is qkv
    torch.testing.assert_close(qkv, torch.cat([of_q, of_k, v], 2), rtol=1e-5, atol=1e-5)
    alone, kv = q.clone(), torch.stack([k, v], 2)
    found = layer(alone, kv, **where)
    assert found[0] is alone
    assert found[1] is kv
    torch.testing.assert_close(alone, of_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv, torch.stack([of_k, v], 2), rtol=1e-5, atol=1e-5)
    # A leaf that requires grad stays, and its gradient is that of the rotation.
    square = torch.stack([q[:, :, :2], k, v], 2).requires_grad_()
    out = layer(square, **where)
    assert torch.equal(square.detach()[:, :, 1], k)
    torch.testing.assert_close(out[:, :, 0], of_q[:, :, :2], rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=rng)
    (gradient,) = torch.autograd.grad((out * weights).sum(), square)
    assert torch.equal(gradient[:, :, 2], weights[:, :, 2])
    if not scale_base:  # a rotation's transpose is its inverse
        back = layer(gradient.clone(), **where)
        torch.testing.assert_close(back, weights, rtol=1e-5, atol=1e-5)


def test_tables_of_a_layer():
    """They have the dtype of x, and grow; a model of 16 bits has exact ones."""
    layer: Any = rotary.RotaryEmbedding(WIDTH).bfloat16()
    exact = rotary.RotaryEmbedding(WIDTH)
    for rows, dtype in ((3, torch.float32), (300, torch.float32), (5, torch.bfloat16)):
        qkv = torch.ones(1, rows, 3, 1, WIDTH, dtype=dtype)
        assert torch.equal(layer(qkv.clone()), exact(qkv.clone()))
    with refused(ValueError, "max_seqlen", "seqlen_offset"):
        layer(qkv, seqlen_offset=torch.tensor([1]))
    with refused(ValueError, "num_heads_q=2", "(1, 5, 3, 16)"):
        layer(qkv[:, :, :, 0], num_heads_q=2, max_seqlen=5)


def test_a_compiled_layer_in_training(rng):
    """Also with tables that were made in inference mode."""
    torch._dynamo.reset()
    layer = rotary.RotaryEmbedding(WIDTH)
    qkv = torch.randn(2, 7, 3, 2, HDIM, generator=rng)
    with torch.inference_mode():
        expected = layer(qkv.clone())
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaf = qkv.clone().requires_grad_()
    found = compiled(leaf * 1)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert leaf.grad is not None


def test_by_their_names():
    with install_as("flash_attn"):
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn.ops.triton.rotary import apply_rotary as by_name

        assert apply_rotary_emb is rotary.apply_rotary_emb
        assert by_name is apply_rotary


def test_errors(rng):
    x, (cos, sin) = torch.zeros(2, 7, 3, HDIM), tables(rng)
    for changes, error, texts in [
        ({"seqlen_offsets": 34}, ValueError, ["cos has 40 rows", "34", "40"]),
        ({"seqlen_offsets": torch.tensor([1])}, ValueError, ["seqlen_offsets", "2 sequences"]),
        ({"seqlen_offsets": 1.5}, TypeError, ["seqlen_offsets", "1.5"]),
        ({"sin": sin[:, 1:]}, ValueError, ["sin", "(40, 7)"]),
        ({"x": x[0]}, ValueError, ["x is", "4 dimensions"]),
        ({"x": x[..., :8]}, ValueError, ["rotary_dim", "8"]),
        ({"cu_seqlens": prefix_sums([7])}, ValueError, ["x is", "3 dimensions"]),
        ({"interleaved": 2}, ValueError, ["interleaved", "2"]),
    ]:
        with refused(error, *texts):
            apply(**{"x": x, "cos": cos, "sin": sin, **changes})


def test_errors_of_a_layer(rng):
    """They were torch's, or wrong angles, or came when q was rotated already."""
    layer: Any = rotary.RotaryEmbedding
    for given, error, texts in [
        ((-2,), ValueError, ["dim=-2"]),
        ((3,), ValueError, ["dim=3"]),
        (("4",), TypeError, ["dim", "'4'"]),
        ((4, 0.0), ValueError, ["base=0.0"]),
        ((4, "1"), TypeError, ["base", "'1'"]),
        ((4, 10**400), ValueError, ["base=1000"]),
        ((4, 10.0, 2), ValueError, ["interleaved=2"]),
        ((4, 10.0, False, float("nan")), ValueError, ["scale_base=nan"]),
    ]:
        with refused(error, *texts):
            layer(*given)
    for dtype in (torch.bool, torch.uint8, torch.float8_e4m3fn):
        with refused(TypeError, "x has dtype", str(dtype)):
            rotary.rotate_half(torch.zeros(2).to(dtype))
    (cos, sin), turns = tables(rng), layer(WIDTH)
    qkv = torch.randn(1, 5, 3, 2, HDIM, generator=rng)
    q, before = qkv[:, :, 0], qkv.clone()
    for call in (
        lambda: rotary.apply_rotary_emb_qkv_(qkv, cos, sin, cos[:3], sin[:3]),
        lambda: turns(q, qkv[:, :, 1:, 0]),
        lambda: turns(q, qkv[:, :, :2].repeat(1, 2, 1, 1, 1)),
    ):
        with refused(ValueError):
            call()
        assert torch.equal(qkv, before)
