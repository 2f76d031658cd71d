"""Bias, ALiBi, soft cap, sinks, sink tokens and dropout against the float64 reference."""

import itertools

import pytest
import torch
from closeness import assert_close, check
from inputs import DTYPES, SIZES, prefix_sums, random_qkv
from packed_calls import RAGGED, packed
from score_features import FEATURES, Shape
from untyped import fmha_fwd

from jitfmha.problem.float64_reference import attention, attention_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HDIM, HDIM_V = 37, 21
# All features together are tested with each instruction set.
KINDS = list(itertools.product(sorted(set(FEATURES) - {"everything"}), DTYPES))


def check_batches(rng: torch.Generator, feature: str, dtype: str) -> None:
    for sizes in (*SIZES, (270, 131, 2, 2)):
        tensors = random_qkv(rng, sizes, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype])
        seqlen_q, seqlen_k, heads_q, _ = sizes
        shape = Shape(2, heads_q, seqlen_q, seqlen_k, DTYPES[dtype], rng)
        check(*tensors, **FEATURES[feature](shape))


@pytest.mark.sample(("feature", "dtype"), KINDS, 3)
def test_batch_mode(rng, feature, dtype):
    check_batches(rng, feature, dtype)


@pytest.mark.sample("dtype", list(DTYPES), 1)
def test_all_features_together(rng, isa, dtype):
    check_batches(rng, "everything", dtype)


@pytest.mark.sample(("feature", "dtype"), KINDS, 2)
def test_group_mode(rng, feature, dtype):
    for heads in ((4, 2), (13, 13)):
        sizes = {"heads": heads, "hdim": HDIM, "hdim_v": HDIM_V, "dtype": DTYPES[dtype]}
        call = packed(rng, *RAGGED, **sizes)
        shape = Shape(6, heads[0], len(call.q), 300, DTYPES[dtype], rng, is_group=True)
        call.check(max_seqlen_k=300, **FEATURES[feature](shape))


def test_padded_sequences(rng):
    """The rows of a packed bias lie as those of q do, between which there may be unused ones."""
    q, k, v = (x[0] for x in random_qkv(rng, batch=1, seqlen_q=40, seqlen_k=50))
    bias = torch.randn(2, 40, 20, generator=rng)
    lengths_q, lengths_k, starts_q, starts_k = [10, 7], [20, 13], [0, 25], [0, 30]
    actual = fmha_fwd(
        *(q, k, v),
        bias=bias,
        return_lse=True,
        max_seqlen_k=20,
        cu_seqlens_q=prefix_sums(lengths_q),
        cu_seqlens_k=prefix_sums(lengths_k),
        cu_seqlens_q_padded=torch.tensor([0, 25, 40], dtype=torch.int32),
        cu_seqlens_k_padded=torch.tensor([0, 30, 50], dtype=torch.int32),
    )
    lengths = lengths_q, lengths_k, starts_q, starts_k
    expected = attention_packed(q, k, v, *lengths, bias=bias)
    assert_close(actual, expected, q, k, v)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_a_bias_of_subnormal_probabilities_or_infinities(rng, seqlen_q):
    q, k, v = random_qkv(rng, seqlen_q=seqlen_q, seqlen_k=300)
    steps = torch.linspace(-300, 0, 300)[None, None, None]
    for bias in (steps, steps.flip(-1), steps.masked_fill(steps < -5, -torch.inf)):
        check(q, k, v, bias=bias)


def test_what_a_boolean_bias_hides_is_not_looked_at(rng):
    q, k, v = random_qkv(rng, seqlen_q=70)
    takes_part = torch.rand(2, 1, 1, 49, generator=rng) < 0.5
    expected = fmha_fwd(q, k, v, bias=takes_part)
    k[~takes_part[:, 0, 0]] = torch.nan
    assert torch.equal(fmha_fwd(q, k, v, bias=takes_part), expected)


def test_an_infinite_sink_takes_everything(rng):
    q, k, v = random_qkv(rng)
    sink = torch.tensor([torch.inf, -torch.inf])
    out, lse = fmha_fwd(q, k, v, sink=sink, return_lse=True)
    plain, plain_lse = fmha_fwd(q, k, v, return_lse=True)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, 0] == torch.inf).all()
    assert torch.equal(out[:, :, 1], plain[:, :, 1])
    assert torch.equal(lse[:, 1], plain_lse[:, 1])
    options = {"sink": sink[[1, 1]], "mask": 2}  # rows that see no key
    out, lse = fmha_fwd(q, k[:, :9], v[:, :9], **options, return_lse=True)
    expected, expected_lse = attention(q, k[:, :9], v[:, :9], **options)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=0)


def test_softcap_bounds_scores(rng):
    """Scores far beyond the cap, up to the largest float, become the cap itself.

    A score is a sum of one sign: one that nearly cancels would not be far beyond the cap.
    """
    for size, scale in ((1e4, 1.0), (1e18, 1.0), (1.0, 3e38)):
        q, k, v = random_qkv(rng, hdim=8)
        q, k = size * q.abs(), size * k.abs() * k[..., :1].sign()
        options = {"softmax_scale": scale, "logit_softcap": 5.0}
        actual = fmha_fwd(q, k, v, return_lse=True, **options)
        expected = attention(q, k, v, **options)
        # The cap is what rounding is relative to.
        assert_close(actual, expected, q / size, k / size, v)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bool])
def test_nothing_behind_a_bias_is_read(rng, bias_dtype):
    """Rows of a bias end where the keys do; behind them lies what must not be added."""
    for seqlen_k in (1, 15, 17, 49):
        q, k, v = random_qkv(rng, seqlen_k=seqlen_k)
        room = torch.full((2, 2, 33, seqlen_k + 40), torch.nan)
        values = torch.randn(2, 2, 33, seqlen_k, generator=rng)
        values = values > 0 if bias_dtype == torch.bool else values
        bias = room.to(bias_dtype)[..., :seqlen_k].copy_(values)
        assert torch.equal(fmha_fwd(q, k, v, bias=bias), fmha_fwd(q, k, v, bias=bias.contiguous()))


def test_decode_steps_with_a_growing_bias(rng):
    """The lengths and strides of a bias change from call to call, the kernel does not."""
    _, k, v = random_qkv(rng, seqlen_k=80)
    for seqlen_k in (1, 2, 64, 65, 80):
        q, _, _ = random_qkv(rng, seqlen_q=1)
        bias = torch.randn(2, 2, 1, seqlen_k, generator=rng)
        check(q, k[:, :seqlen_k], v[:, :seqlen_k], bias=bias)
