"""The float64 reference against PyTorch's own attention where it has the feature, else by hand."""

import math
from typing import Any

import pytest
import torch
from inputs import random_qkv
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from jitfmha import dropout_randval
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.float64_reference import (
    Result,
    attention,
    attention_packed,
    int8_probabilities,
    kept,
    signed_probabilities,
    unpaged,
    visible,
)

SEQLENS = [(1, 1), (5, 9), (9, 5), (7, 7)]
NEAR = {"atol": 1e-12, "rtol": 1e-12}


def inputs(
    rng: torch.Generator, seqlen_q: int = 5, seqlen_k: int = 9, heads_k: int = 2
) -> list[Tensor]:
    """q, k and v with 4 query heads, two of them for each key head, and unequal hdim."""
    qkv = random_qkv(
        rng, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_k=heads_k, hdim=6, hdim_v=3
    )
    return [x.double().requires_grad_() for x in qkv]


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's attention for tensors in our order of dimensions."""
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*qkv, enable_gqa=True, **options).transpose(1, 2)


def assert_same(actual: Tensor, expected: Tensor, *tensors: Tensor) -> None:
    """The same values, and the same gradients with regard to the tensors."""
    torch.testing.assert_close(actual, expected, **NEAR)
    weights = torch.linspace(-1, 1, actual.numel(), dtype=torch.float64).view_as(actual)
    gradients = (torch.autograd.grad((x * weights).sum(), tensors) for x in (actual, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **NEAR)


@pytest.mark.parametrize("seqlens", SEQLENS)
@pytest.mark.parametrize("softmax_scale", [None, 0.7])
@pytest.mark.parametrize("mask", [0, 1])
def test_plain_and_top_left_causal(rng, seqlens, softmax_scale, mask):
    q, k, v = inputs(rng, *seqlens)
    out, _ = attention(q, k, v, mask=mask, softmax_scale=softmax_scale)
    assert_same(out, sdpa(q, k, v, is_causal=mask == 1, scale=softmax_scale), q, k, v)


@pytest.mark.parametrize("shape", [(2, 4, 5, 9), (1, 4, 1, 9), (2, 1, 5, 9), (1, 1, 1, 9)])
def test_bias(rng, shape):
    q, k, v = inputs(rng)
    bias = normal(rng, *shape).requires_grad_()
    out, _ = attention(q, k, v, bias=bias)
    assert_same(out, sdpa(q, k, v, attn_mask=bias), q, k, v, bias)


def test_boolean_and_infinite_bias(rng):
    q, k, v = inputs(rng)
    takes_part = torch.rand(2, 4, 5, 9, generator=rng) < 0.6
    takes_part[..., 0] = True  # SDPA's result for a query without keys is NaN in older versions
    additive = torch.zeros(2, 4, 5, 9, dtype=torch.float64).masked_fill(~takes_part, -torch.inf)
    for bias in (takes_part, additive):
        expected = sdpa(q, k, v, attn_mask=takes_part)
        assert_same(attention(q, k, v, bias=bias)[0], expected, q, k, v)


def by_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any = None
) -> Result:
    block_mask = None
    if mask_mod is not None:
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        block_mask = create_block_mask(mask_mod, *sizes, device="cpu")
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    out, auxiliary = flex_attention(
        *qkv,
        score_mod=score_mod,
        block_mask=block_mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    assert auxiliary.lse is not None
    return out.transpose(1, 2), auxiliary.lse.double()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("seqlens", [(5, 9), (9, 9)])
def test_softcap_alibi_bias_and_window(rng, seqlens):
    """All at once: the order in which they act is part of the definition."""
    q, k, v = (x.detach() for x in inputs(rng, *seqlens))
    sq, sk = seqlens
    bias = normal(rng, 2, 4, sq, sk)
    slopes = torch.rand(2, 4, generator=rng, dtype=torch.float64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        capped = 1.5 * torch.tanh(score / 1.5)
        return capped + bias[b, h, i, j] - slopes[b, h] * (i + sk - sq - j).abs()

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        diagonal = i + sk - sq
        return (j >= diagonal - 3) & (j <= diagonal)

    options: dict[str, Any] = {"mask": 2, "window_size": (3, -1)}
    out, lse = attention(q, k, v, logit_softcap=1.5, bias=bias, alibi_slopes=slopes, **options)
    expected, expected_lse = by_flex_attention(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(out, expected, **NEAR)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)  # theirs was in float32


def test_alibi_slopes_for_all_sequences(rng):
    slopes = torch.rand(4, generator=rng)
    q, k, v = inputs(rng)
    for given in (slopes, slopes.expand(2, 4)):
        for n in range(2):  # |i + 9 - 5 - j| for the scores of a head
            distance = [[abs(i + 4 - j) for j in range(9)] for i in range(5)]
            bias = -slopes.double()[:, None, None] * torch.tensor(distance)
            one = q[n : n + 1], k[n : n + 1], v[n : n + 1]
            expected = attention(*one, bias=bias[None])
            actual = attention(q, k, v, alibi_slopes=given)
            torch.testing.assert_close(actual[0][n], expected[0][0], **NEAR)
            torch.testing.assert_close(actual[1][n], expected[1][0], **NEAR)


def test_lse(rng):
    q, k, v = inputs(rng)
    _, lse = attention(q, k, v, mask=2)
    groups = k.repeat_interleave(2, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, groups) / math.sqrt(6)
    scores = scores.masked_fill(~torch.ones(5, 9).tril(4).bool(), -torch.inf)
    assert_same(lse, torch.logsumexp(scores, -1), q, k)


def test_sink_is_a_key_without_a_value(rng):
    q, k, v = inputs(rng)
    sink = normal(rng, 4).requires_grad_()
    bias = torch.cat([torch.zeros(1, 4, 1, 9), sink.view(1, 4, 1, 1)], dim=-1)
    extended = (torch.cat([x, torch.zeros_like(x[:, :1])], dim=1) for x in (k, v))
    out, _ = attention(q, k, v, sink=sink)
    assert_same(out, sdpa(q, *extended, attn_mask=bias), q, k, v, sink)


def test_sink_in_lse(rng):
    q, k, v = inputs(rng)
    sink = normal(rng, 4).requires_grad_()
    _, without = attention(q, k, v)
    _, lse = attention(q, k, v, sink=sink)
    assert_same(lse, torch.logaddexp(without, sink[:, None].expand_as(without)), q, k, sink)


def test_dropout_with_the_mask_that_was_drawn(rng):
    q, k, v = inputs(rng, heads_k=4)
    keep = torch.rand(2, 4, 5, 9, generator=rng) >= 0.3
    out, lse = attention(q, k, v, dropout_p=0.3, keep=keep)
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    expected, _ = torch.ops.aten._scaled_dot_product_attention_math(
        *qkv, dropout_p=0.3, dropout_mask=keep
    )
    assert_same(out, expected.transpose(1, 2), q, k, v)
    assert torch.equal(lse, attention(q, k, v)[1])


def test_dropout_by_a_state(rng):
    """Each sequence drops by bytes that count from its own start."""
    state = torch.randint(-(2**62), 2**62, (2,), generator=rng)
    q, k, v = inputs(rng)
    keep = dropout_randval(state, 2, 4, 5, 9) <= 255 * (1 - 0.3)
    assert torch.equal(kept(state, 0.3, keep.shape), keep)
    expected = attention(q, k, v, dropout_p=0.3, keep=keep)
    actual = attention(q, k, v, dropout_p=0.3, rng_state=state)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    spans = [5, 5], [9, 9], [0, 5], [0, 9]
    of_packed = attention_packed(*packed, *spans, dropout_p=0.3, rng_state=state)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(of_packed[0].unflatten(0, (2, 5)), expected[0], **NEAR)
    signed = signed_probabilities(Arguments.of(q, k, v, {"dropout_p": 0.3, "rng_state": state}))
    assert torch.equal(signed >= 0, keep)
    v_of_heads = v.repeat_interleave(2, dim=2)
    out = torch.einsum("bhij,bjhd->bihd", signed.clamp(min=0) / 0.7, v_of_heads)
    torch.testing.assert_close(out, expected[0], **NEAR)


def test_unknown_options(rng):
    with pytest.raises(TypeError, match="softcap"):
        attention(*inputs(rng), softcap=3.0)


def test_descales(rng):
    q, k, v = inputs(rng)
    q_scale, k_scale, v_scale = torch.rand(3, 2, 2, generator=rng)
    scaled = attention(q, k, v, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)
    per_head = [x.double()[:, None, :, None] for x in (q_scale.repeat_interleave(2, 1), k_scale)]
    by_hand = attention(q * per_head[0], k * per_head[1], v * v_scale[:, None, :, None])
    for actual, expected in zip(scaled, by_hand, strict=True):
        torch.testing.assert_close(actual, expected)
    one = torch.full((1,), 0.5)
    out, _ = attention(q, k, v, q_descale=one, v_descale=one)
    torch.testing.assert_close(out, attention(q / 2, k, v / 2)[0])
    of_heads = torch.rand(4, generator=rng)
    out, _ = attention(q, k, v, q_descale=of_heads, v_descale=v_scale[0])
    by_hand = attention(q * of_heads[:, None], k, v * v_scale[0][:, None])
    torch.testing.assert_close(out, by_hand[0])


@pytest.mark.parametrize("name", ["sink", "bias"])
def test_nan_is_not_hidden(rng, name):
    x = torch.tensor([math.nan, -math.inf, 0.5, 0.5])
    of_first_key = torch.cat([x.view(1, 4, 1, 1), torch.zeros(1, 4, 1, 8)], dim=-1)
    out, lse = attention(*inputs(rng), **{name: x if name == "sink" else of_first_key})
    assert lse[:, 0].isnan().all()
    assert out[:, :, 0].isnan().all()
    assert lse[:, 1:].isfinite().all()


# mask, window_size, sink_size and what the queries of a 4 x 5 problem see, written out.
DRAWN: list[tuple[int | str, tuple[int, int], int, str]] = [
    (0, (-1, -1), 0, "11111 11111 11111 11111"),
    (1, (-1, -1), 0, "1.... 11... 111.. 1111."),
    (2, (-1, -1), 0, "11... 111.. 1111. 11111"),
    ("causal", (1, -1), 0, "11... .11.. ..11. ...11"),
    ("causal", (1, 3), 0, "11... .11.. ..11. ...11"),
    (1, (1, 9), 0, "1.... 11... .11.. ..11."),
    (0, (0, 1), 0, ".11.. ..11. ...11 ....1"),
    (0, (-1, 1), 0, "111.. 1111. 11111 11111"),
    (0, (0, -1), 0, ".1111 ..111 ...11 ....1"),
    ("t:0,1", (-1, -1), 0, "11... .11.. ..11. ...11"),
    ("t:1,-1", (-1, -1), 0, "1.... 11... .11.. ..11."),
    ("b:0,1", (-1, -1), 0, ".11.. ..11. ...11 ....1"),
    ("g:1,3", (-1, -1), 0, "111.. .111. ..111 ...11"),
    (2, (0, -1), 2, "11... 111.. 11.1. 11..1"),
    (1, (0, -1), 3, "1.... 11... 111.. 1111."),
    (0, (0, 0), 1, "11... 1.1.. 1..1. 1...1"),
]


@pytest.mark.parametrize(("mask", "window_size", "sink_size", "drawn"), DRAWN)
def test_visible(mask, window_size, sink_size, drawn):
    expected = [[entry == "1" for entry in row] for row in drawn.split()]
    assert visible(4, 5, mask, window_size, sink_size).tolist() == expected


EVERYTHING = {"mask": 2, "window_size": (2, -1), "sink_size": 1, "logit_softcap": 2.0}


@pytest.mark.parametrize("with_sink", [False, True])
def test_queries_that_see_no_key(rng, with_sink):
    q, k, v = inputs(rng, seqlen_q=9, seqlen_k=5)
    bias = normal(rng, 1, 4, 9, 5)
    bias[:, :, 6] = -torch.inf
    bias.requires_grad_()
    sink = normal(rng, 4).requires_grad_() if with_sink else None
    out, lse = attention(q, k, v, bias=bias, sink=sink, mask=2)
    blind = torch.tensor([True] * 4 + [False, False, True, False, False])
    assert (out[:, blind] == 0).all()
    if sink is None:
        assert torch.equal(lse == -torch.inf, blind.expand_as(lse))
    else:
        assert torch.equal(lse[:, :, blind], sink[None, :, None].expand(2, 4, 5))
    total = out.sum() + lse[lse > -torch.inf].sum()
    d_q, d_k, d_v, d_bias = torch.autograd.grad(total, (q, k, v, bias))
    assert all(x.isfinite().all() for x in (d_q, d_k, d_v, d_bias))
    assert (d_q[:, blind] == 0).all()
    assert (d_bias[:, :, blind] == 0).all()
    assert (d_q[:, ~blind] != 0).all()


@pytest.mark.parametrize("seqlens", [(4, 0), (0, 4), (0, 0)])
def test_lengths_of_zero(rng, seqlens):
    q, k, v = inputs(rng, *seqlens)
    out, lse = attention(q, k, v, mask=2, bias=normal(rng, 2, 4, *seqlens))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all((x == 0).all() for x in gradients)


def test_gradients_against_differences(rng):
    q, k, v = inputs(rng, seqlen_q=4, seqlen_k=3)
    bias, sink = normal(rng, 2, 1, 4, 3).requires_grad_(), normal(rng, 4).requires_grad_()
    keep = torch.rand(2, 4, 4, 3, generator=rng) < 0.8
    slopes = torch.rand(4, generator=rng)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Result:
        options = {**EVERYTHING, "bias": bias, "sink": sink, "alibi_slopes": slopes}
        return attention(q, k, v, dropout_p=0.2, keep=keep, **options)

    assert torch.autograd.gradcheck(function, (q, k, v, bias, sink))


def test_packed_sequences_are_a_batch_of_ragged_ones(rng):
    """One batch, whose padding keys are hidden by an infinite bias, is the same as packed."""
    lengths_q, lengths_k = [3, 0, 5], [4, 6, 6]
    q, k, v = (x[:1].expand(3, -1, -1, -1) * normal(rng, 3, 1, 1, 1) for x in inputs(rng, 5, 6))
    options: dict[str, Any] = {
        "keep": torch.rand(3, 4, 5, 6, generator=rng) < 0.5,
        "dropout_p": 0.5,
        "sink": normal(rng, 4),
        "q_descale": torch.rand(3, 2, generator=rng),
    }
    packed = [
        torch.cat([sequence[:n] for sequence, n in zip(x, lengths, strict=True)])
        for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))
    ]
    starts = [0, 3, 3], [0, 4, 10]
    bias = normal(rng, 3, 4, 5, 6)
    packed_bias = torch.cat([one[:, :n] for one, n in zip(bias, lengths_q, strict=True)], dim=1)
    out, lse = attention_packed(*packed, lengths_q, lengths_k, *starts, bias=packed_bias, **options)
    padding = torch.arange(6) >= torch.tensor(lengths_k)[:, None]
    bias = bias.masked_fill(padding[:, None, None], -torch.inf)
    batch_out, batch_lse = attention(q, k, v, bias=bias, **options)
    for n in range(3):
        rows = slice(starts[0][n], starts[0][n] + lengths_q[n])
        torch.testing.assert_close(out[rows], batch_out[n, : lengths_q[n]], **NEAR)
        torch.testing.assert_close(lse[:, rows], batch_lse[n, :, : lengths_q[n]], **NEAR)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages(rng, page_size):
    seqlens_k = [0, 7, 16]
    num_pages = [-(-n // page_size) for n in seqlens_k]
    order = torch.randperm(sum(num_pages) + 2, generator=rng)
    table = torch.full((3, max(num_pages)), 10**6, dtype=torch.int32)
    cache_k, cache_v = (torch.full((len(order), page_size, 2, 6), torch.nan) for _ in range(2))
    k, v = torch.randn(2, 3, 16, 2, 6, generator=rng)
    for n, pages in enumerate(order[: sum(num_pages)].split(num_pages)):
        table[n, : len(pages)] = pages
        for j in range(seqlens_k[n]):
            cache_k[pages[j // page_size], j % page_size] = k[n, j]
            cache_v[pages[j // page_size], j % page_size] = v[n, j]
    q = torch.randn(3, 5, 4, 6, generator=rng)
    slopes = torch.rand(3, 4, generator=rng)
    packed = [unpaged(cache, table, seqlens_k) for cache in (cache_k, cache_v)]
    spans = [5] * 3, seqlens_k, [0, 5, 10], [0, 0, 7]
    out, lse = attention_packed(q.flatten(0, 1), *packed, *spans, mask=2, alibi_slopes=slopes)
    for n, seqlen in enumerate(seqlens_k):
        one = (x[n : n + 1] for x in (q, k[:, :seqlen], v[:, :seqlen]))
        expected = attention(*one, mask=2, alibi_slopes=slopes[n])
        rows = slice(5 * n, 5 * n + 5)
        torch.testing.assert_close(out[rows], expected[0][0], **NEAR)
        torch.testing.assert_close(lse[:, rows], expected[1][0], **NEAR)


def test_int8_probabilities(rng):
    """By hand, for one row and for each head a scale of its own."""
    probability = torch.tensor([[[[0.5, 0.3, 0.15, 0.05, 0.0]]] * 2]).double()
    scale = torch.tensor([1 / 127, 0.25])
    rounded = int8_probabilities(probability, scale, 1)[0, :, 0]
    counted = torch.tensor([[127.0, 76, 38, 12, 0], [4, 2, 1, 0, 0]])
    torch.testing.assert_close(rounded, counted.double() * scale[:, None] / 2)
    q, k, v = inputs(rng)
    fine = torch.full((1,), 1e-12)  # 127 of them are less than any probability
    out, _ = attention(q, k, v, p_descale=fine)
    largest = attention(q, k, torch.eye(9).repeat(2, 1, 2, 1).view(2, 9, 2, 9))[0].amax(-1)
    summed = v.double().sum(1, keepdim=True).repeat_interleave(2, dim=2)
    expected = largest[..., None] * summed
    torch.testing.assert_close(out / 127e-12, expected, rtol=1e-6, atol=1e-9)
