"""``jitfmha.LatentAttention`` in its three forms against the layer's formula in float64."""

from typing import Any

import pytest
import torch
from refusals import refused
from torch import Tensor, nn

import jitfmha
from jitfmha.problem.float64_reference import attention

FORMS = ("naive", "absorbed", "flash")
EMBED_DIM, HEADS = 56, 3
SIZES = {"kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20}


def module(rng: torch.Generator, **options: Any) -> jitfmha.LatentAttention:
    made = jitfmha.LatentAttention(EMBED_DIM, HEADS, **SIZES, **options)
    for parameter in made.parameters():
        parameter.data.normal_(generator=rng).mul_(0.2)
    return made


def turned(x: Tensor, base: float, interleaved: bool) -> Tensor:
    """``x (b, s, h, r)``, turned by complex numbers."""
    positions = torch.arange(x.shape[1]).double()[:, None]
    angle = positions * base ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    result = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
    return (result if interleaved else result.transpose(-1, -2)).flatten(-2)


def expected(own: jitfmha.LatentAttention, x: Tensor) -> Tensor:
    """What ``own`` computes, in float64: keys and values are projected."""
    weights = {name: value.double() for name, value in own.named_parameters()}

    def linear(name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, weights[f"{name}.weight"])

    def normed(name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[f"{name}.weight"]

    x = x.double()
    if own.q_lora_rank == 0:
        q = linear("wq", x)
    else:
        q = linear("wq_b", normed("q_norm", linear("wq_a", x)))
    nope, rope = own.qk_nope_head_dim, own.qk_rope_head_dim
    q_nope, q_pe = q.unflatten(-1, (HEADS, -1)).split([nope, rope], -1)
    latent, k_pe = linear("wkv_a", x).split([own.kv_lora_rank, rope], -1)
    rows = linear("wkv_b", normed("kv_norm", latent)).unflatten(-1, (HEADS, -1))
    k_nope, v = rows.split([nope, own.v_head_dim], -1)
    turning = own.rotary_base, own.rotary_interleaved
    q = torch.cat([q_nope, turned(q_pe, *turning)], -1)
    k_pe = turned(k_pe.unsqueeze(-2), *turning).expand(-1, -1, HEADS, -1)
    mask = "causal" if own.causal else 0
    out, _ = attention(
        q, torch.cat([k_nope, k_pe], -1), v, mask=mask, softmax_scale=own.softmax_scale
    )
    return linear("wo", out.flatten(-2))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": 32, "softmax_scale": 0.3},
    {"causal": False, "rotary_interleaved": False},
    {"rotary_base": 100.0},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample("options", OPTIONS, 2)
def test_forms(rng, form, options):
    own = module(rng, form=form, **options)
    for seqlen in (1, 37):
        x = torch.randn(2, seqlen, EMBED_DIM, generator=rng)
        assert_near(own(x), expected(own, x))


def assert_near(actual: Tensor, exact: Tensor) -> None:
    """A few roundings of float32 in sums of at most 60 products, by the largest number."""
    torch.testing.assert_close(actual.double(), exact, atol=2e-5 * exact.abs().max().item(), rtol=0)


@pytest.mark.sample("form", FORMS, 2)
def test_gradients(rng, form):
    own = module(rng, form=form, q_lora_rank=32)
    x = torch.randn(1, 33, EMBED_DIM, generator=rng)
    dout = torch.randn(x.shape, generator=rng)
    own(x).backward(dout)
    actual = {name: each.grad for name, each in own.named_parameters()}
    own.zero_grad()
    expected(own, x).backward(dout.double())
    for name, parameter in own.named_parameters():
        assert_near(actual[name], parameter.grad.double())


@pytest.mark.parametrize("form", FORMS)
def test_a_cache(rng, form):
    """Chunks of a prompt, then tokens one by one, behind others of a sequence that began anew."""
    own = module(rng, form=form)
    x = torch.randn(2, 40, EMBED_DIM, generator=rng)
    cache = own.new_cache(2, 50)
    with torch.no_grad():
        own(torch.randn(2, 5, EMBED_DIM, generator=rng), cache=cache)
        cache.seqlens.zero_()
        parts = x.split([17, 1, 1, 21], dim=1)
        out = torch.cat([own(part, cache=cache) for part in parts], dim=1)
        assert_near(out, expected(own, x))
    assert cache.seqlens.tolist() == [40, 40]


def test_room_of_caches(rng):
    """One latent stands for the keys and values of all heads."""
    own = module(rng)
    rows = {}
    for form in FORMS:
        own.form = form
        cache = own.new_cache(1, 10)
        memories = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in cache[:2]}
        rows[form] = sum(x.nbytes() for x in memories.values()) // (10 * 4)
    assert rows == {"naive": HEADS * (24 + 16 + 20), "absorbed": 40 + 16, "flash": 40 + 16}


@pytest.mark.sample("form", FORMS, 1)
def test_on_an_emulated_gpu(rng, form):
    own = module(rng, form=form).bfloat16()
    x = torch.randn(1, 9, EMBED_DIM, generator=rng).bfloat16()
    with torch.no_grad(), jitfmha.emulate("gfx950"):
        cache = own.new_cache(1, 16)
        whole = own(x)
        in_parts = torch.cat([own(part, cache=cache) for part in x.split([8, 1], dim=1)], dim=1)
    with torch.no_grad():
        exact = expected(own, x)
    for out in (whole, in_parts):
        error = (out.double() - exact).norm() / exact.norm()
        assert error < 0.03  # about ten roundings to bf16, of 2**-9 each


def test_errors(rng):
    with refused(ValueError, "form='fast'", "absorbed"):
        module(rng, form="fast")
    with refused(ValueError, "qk_rope_head_dim=3"):
        jitfmha.LatentAttention(EMBED_DIM, HEADS, qk_rope_head_dim=3)
    for name, bad in (("embed_dim", "8"), ("kv_lora_rank", 0.5), ("causal", 1), ("v_head_dim", 0)):
        options = {"embed_dim": EMBED_DIM, "num_heads": HEADS} | {name: bad}
        with refused(TypeError if bad else ValueError, name, str(bad)):
            jitfmha.LatentAttention(**options)
    own = module(rng)
    x = torch.randn(1, 4, EMBED_DIM, generator=rng)
    for bad_x in (x[0], None):
        with refused(ValueError, "x is", "(b, s, embed_dim)"):
            own(bad_x)
    with refused(TypeError, "capacity must be an int, got str ('8')"):
        own.new_cache(1, "8")
    cache = own.new_cache(1, 8)
    own.form = "naive"
    with refused(ValueError, "1 heads of 56 and 40 columns", "3, 40, 20"), torch.no_grad():
        own(x, cache=cache)
    own.causal = False
    with refused(ValueError, "causal=False"):
        own(x, cache=cache)
