"""``jitfmha.Attention`` against the same module in float64, made of plain operations."""

from typing import Any

import pytest
import torch
from inputs import prefix_sums
from torch import Tensor, nn

import jitfmha
from jitfmha.problem.float64_reference import attention

EMBED_DIM, HEADS, HDIM = 96, 3, 64


def module(rng: torch.Generator, **options: Any) -> jitfmha.Attention:
    made = jitfmha.Attention(EMBED_DIM, HEADS, head_dim=HDIM, **options)
    for parameter in made.parameters():
        parameter.data.normal_(generator=rng).mul_(0.2)
    return made


def rotated(x: Tensor, width: int, base: float, interleaved: bool) -> Tensor:
    """``x (b, s, h, d)``, turned by complex numbers."""
    angle = torch.arange(x.shape[1]).double()[:, None] * base ** (
        -torch.arange(0, width, 2).double() / width
    )
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = x[..., :width].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), x[..., width:]], -1)


def expected(own: jitfmha.Attention, x: Tensor, context: Tensor | None = None) -> Tensor:
    """What ``own`` computes for one batch, in float64."""
    weights = {name: value.detach().double() for name, value in own.named_parameters()}

    def projected(name: str, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        return y.unflatten(-1, (-1, HDIM)) if name != "out_proj" else y

    def normed(name: str, x: Tensor) -> Tensor:
        weight = weights.get(f"{name}.weight")
        if weight is None:
            return x
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    x = x.double()
    source = x if context is None else context.double()
    q = normed("q_norm", projected("q_proj", x))
    k, v = normed("k_norm", projected("k_proj", source)), projected("v_proj", source)
    if own.rotary_dim:
        turning = own.rotary_dim, own.rotary_base, own.rotary_interleaved
        q, k = (rotated(y, *turning) for y in (q, k))
    mask = "causal" if own.causal else 0
    out, _ = attention(
        q, k, v, mask=mask, window_size=own.window_size, logit_softcap=own.logit_softcap
    )
    return projected("out_proj", out.flatten(-2))


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True, "num_kv_heads": 1},
    {"causal": True, "rotary_dim": HDIM, "qk_norm": True},
    {"causal": True, "rotary_dim": 32, "rotary_interleaved": True, "window_size": (7, 0)},
)
# Packed sequences and steps behind a cache have one kernel.
CAPPED = [x | {"logit_softcap": 0.1} if "causal" in x else x for x in OPTIONS]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("options", OPTIONS)
def test_batches(rng, options):
    """With gradients and without, which have ways of their own."""
    own = module(rng, **options)
    for seqlen, is_training in ((0, True), (1, False), (33, True), (33, False)):
        x = torch.randn(2, seqlen, EMBED_DIM, generator=rng)
        with torch.set_grad_enabled(is_training):
            out = own(x)
        torch.testing.assert_close(out.double(), expected(own, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", CAPPED)
def test_packed_sequences(rng, options):
    own = module(rng, **options)
    lengths = [5, 0, 17, 1]
    x = torch.randn(sum(lengths), EMBED_DIM, generator=rng)
    parts = [expected(own, part[None])[0] for part in x.split(lengths)]
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            out = own(x, cu_seqlens=prefix_sums(lengths), max_seqlen=17)
        torch.testing.assert_close(out.double(), torch.cat(parts), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [x for x in CAPPED if x.get("causal")])
def test_cache(rng, options):
    """A prompt and then tokens one by one give what all at once do."""
    own = module(rng, **options)
    x = torch.randn(2, 21, EMBED_DIM, generator=rng)
    whole = expected(own, x)
    with torch.no_grad():
        cache = own.new_cache(2, 30)
        parts = [own(part, cache=cache) for part in x.split([13, 0, 1, 1, 6], dim=1)]
    assert cache.seqlens.tolist() == [21, 21]
    torch.testing.assert_close(torch.cat(parts, 1).double(), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["rows", jitfmha.PageLayout.PACKED])
def test_cache_in_pages(rng, layout):
    own = module(rng, **OPTIONS[2])
    x = torch.randn(2, 150, EMBED_DIM, generator=rng)
    whole = expected(own, x)
    with torch.no_grad():
        cache = own.new_cache(2, 150, layout=layout)
        assert cache.capacity == 256
        assert jitfmha.PageLayout.of(cache.k, cache.v) == jitfmha.PageLayout(layout)
        parts = [own(part, cache=cache) for part in x.split([140, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1).double(), whole, rtol=1e-3, atol=1e-3)


def test_compiled(rng):
    """Without graph breaks: a batch with its gradients, packed sequences, and behind a cache."""
    torch._dynamo.reset()
    own = module(rng, **OPTIONS[2])
    compiled = torch.compile(own, fullgraph=True, backend="eager")
    x = torch.randn(2, 21, EMBED_DIM, generator=rng)
    sums = prefix_sums([13, 0, 8])
    gradients = []
    for it in (own, compiled):
        own.zero_grad()
        out = it(x)
        out.square().mean().backward()
        gradients.append([parameter.grad for parameter in own.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    packed = {"cu_seqlens": sums, "max_seqlen": 13}
    torch.testing.assert_close(compiled(x[0], **packed), own(x[0], **packed))
    with torch.no_grad():
        cache = own.new_cache(2, 30)
        parts = [compiled(part, cache=cache) for part in x.split([20, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), own(x).detach(), rtol=1e-4, atol=1e-4)


def test_context(rng):
    own = module(rng, num_kv_heads=1, qk_norm=True)
    x, context = (torch.randn(2, n, EMBED_DIM, generator=rng) for n in (33, 49))
    with torch.no_grad():
        out = own(x, context)
    torch.testing.assert_close(out.double(), expected(own, x, context), rtol=1e-3, atol=1e-3)


def test_gradients_of_parameters(rng):
    own = module(rng, causal=True, rotary_dim=HDIM, qk_norm=True)
    x = torch.randn(2, 33, EMBED_DIM, generator=rng)
    own(x).square().mean().backward()
    name, weight = "q_proj.weight", own.q_proj.weight
    step = torch.randn(weight.shape, generator=rng)
    losses = []
    for sign in (1, -1):
        moved = module(rng, causal=True, rotary_dim=HDIM, qk_norm=True).double()
        moved.load_state_dict(own.state_dict())
        moved.get_parameter(name).data.add_(step.double(), alpha=sign * 1e-4)
        losses.append(expected(moved, x).square().mean())
    assert weight.grad is not None
    slope = (losses[0] - losses[1]).item() / 2e-4
    found = (weight.grad.double() * step).sum().item()
    assert found == pytest.approx(slope, rel=1e-3, abs=1e-6)
    assert all(parameter.grad is not None for parameter in own.parameters())


def test_norms_that_somebody_changed(rng):
    """Hooks run, and other modules are called, with a cache and without."""
    own, x = module(rng, causal=True, qk_norm=True), torch.randn(1, 3, EMBED_DIM, generator=rng)
    seen = []
    own.k_norm.register_forward_hook(lambda *given: seen.append(given[-1].shape))
    with torch.no_grad():
        results = [own(x), own(x, cache=own.new_cache(1, 4))]
    assert seen == [(1, 3, HEADS, HDIM)] * 2
    for out in results:
        torch.testing.assert_close(out.double(), expected(own, x), rtol=1e-3, atol=1e-3)


def test_dropout_in_training_only(rng):
    own = module(rng, dropout=0.5)
    x = torch.randn(2, 33, EMBED_DIM, generator=rng)
    assert not torch.equal(own(x), own(x))
    own.eval()
    assert torch.equal(own(x), own(x))
    torch.testing.assert_close(own(x).double(), expected(own, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2"),
        ({"rotary_dim": 33}, "rotary_dim=33"),
        ({"rotary_dim": 66}, "rotary_dim=66"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"window_size": (1, -2)}, "window_size"),
        ({"head_dim": None, "embed": 97}, "embed_dim=97"),
        ({"embed": "97"}, r"embed_dim must be an int, got str \('97'\)"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"head_dim": 0.5}, r"head_dim must be an int, got float \(0.5\)"),
        ({"rotary_dim": -2}, "rotary_dim=-2"),
        ({"rotary_base": None}, r"rotary_base must be a number, got NoneType"),
        ({"dropout": "0"}, r"dropout must be a number, got str \('0'\)"),
        ({"causal": 1}, r"causal must be a bool, got int \(1\)"),
        ({"qk_norm": "no"}, r"qk_norm must be a bool, got str \('no'\)"),
    ],
)
def test_sizes_that_do_not_fit(options, said):
    sizes = {"head_dim": HDIM} | options
    with pytest.raises((TypeError, ValueError), match=said):
        jitfmha.Attention(sizes.pop("embed", EMBED_DIM), HEADS, **sizes)


def test_inputs_that_do_not_go_together(rng):
    own, plain = module(rng, causal=True, rotary_dim=8, dropout=0.5), module(rng)
    x, sums = torch.randn(2, 5, EMBED_DIM, generator=rng), prefix_sums([5])
    cache, bias = own.new_cache(2, 8), torch.zeros(1, 1, 5, 5)
    for call, said in (
        (lambda: plain(x, cu_seqlens=sums), r"x is .*expected \(total, embed_dim\)"),
        (lambda: plain(x[0]), r"expected \(b, s, embed_dim\)"),
        (lambda: plain(None), r"x is None; expected \(b, s, embed_dim\)"),
        (lambda: plain.new_cache(2, -3), "capacity=-3 must be at least 0"),
        (lambda: jitfmha.PageLayout.ROWS.new_pages(1, 8, -2, 8), "heads=-2 must be"),
        (lambda: own(x, x), "rotary_dim=8"),
        (lambda: plain(x, x, cache=cache), "cannot be combined with cache"),
        (lambda: plain(x[0], x, cu_seqlens=sums), "cannot be combined with cu_seqlens"),
        (lambda: plain(x, cache=cache), "causal=False"),
        (lambda: own(x[0], cu_seqlens=sums, cache=cache), "cu_seqlens .*combined with cache"),
        (lambda: own(x, bias=bias, cache=cache), "bias .*combined with cache"),
        (lambda: own(x, cache=cache), r"dropout=0\.5"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert "rotary_dim=8" in repr(own)
