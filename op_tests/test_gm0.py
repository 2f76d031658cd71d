"""Batch mode against the float64 reference: head dimensions, lengths, heads, scales, layouts."""

import itertools

import pytest
import torch
from closeness import check
from inputs import DTYPES, LAYOUTS, lay_out, random_qkv
from torch import Tensor
from untyped import fmha_fwd

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Every hdim at most once per run and dtype would be 2 s each: the launchers are compiled.
HDIMS = [
    *[(1, 1), (2, 7), (5, 3), (8, 8), (16, 16), (17, 33), (24, 24), (31, 63), (32, 32), (40, 40)],
    *[(48, 16), (65, 64), (72, 72), (80, 80), (96, 96), (111, 1), (1, 130), (120, 64), (160, 160)],
    *[(128, 256), (192, 128), (192, 192), (224, 200), (250, 250), (256, 256), (257, 255)],
    *[(320, 64), (64, 320), (384, 384), (511, 509), (576, 576), (8, 576), (576, 8)],
]
# Around the tiles that a kernel may have.
SEQLENS = [0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]


@pytest.mark.sample(
    ("dtype", "hdims", "mask"), list(itertools.product(DTYPES, HDIMS, ("none", "causal"))), 6
)
def test_hdims(rng, dtype, hdims, mask):
    for sizes in ((33, 49, 2, 2), (1, 77, 6, 2), (70, 130, 3, 1)):
        hdim, hdim_v = hdims
        check(*random_qkv(rng, sizes, hdim=hdim, hdim_v=hdim_v, dtype=DTYPES[dtype]), mask=mask)


@pytest.mark.sample("dtype", list(DTYPES), 1)
def test_a_dot_product_of_two_parts_and_one_element(rng, dtype):
    """Long dot products are sums of parts; the one that is left over has a single element.

    Of so many queries tiles have several panels: behind the end of one is the next.
    """
    for seqlen_q in (1, 33, 1100):
        q, k, v = random_qkv(rng, seqlen_q=seqlen_q, hdim=257, hdim_v=9, dtype=DTYPES[dtype])
        check(q, k, v)
        # The last element alone decides.
        q[..., :-1] = 0
        check(q, k, v, softmax_scale=1.0)


@pytest.mark.parametrize("seqlen_q", SEQLENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_seqlens(rng, dtype, seqlen_q):
    for seqlen_k, mask in itertools.product(SEQLENS, ("none", 1, 2)):
        check(*random_qkv(rng, (seqlen_q, seqlen_k, 2, 2), dtype=DTYPES[dtype]), mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences(rng, dtype):
    for sizes in ((1000, 1100, 2, 2), (1, 5000, 2, 2), (3000, 3, 2, 2)):
        q, k, v = random_qkv(rng, sizes, batch=1, dtype=DTYPES[dtype])
        check(q, k, v)
        check(q, k, v, mask="causal")


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize(
    ("heads_q", "heads_k"),
    [(0, 0), (1, 1), (3, 1), (3, 3), (8, 2), (12, 4), (13, 13), (40, 8), (71, 1)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_and_batch(rng, dtype, heads_q, heads_k, batch):
    for seqlen_q in (1, 2, 37):
        sizes = (seqlen_q, 49, heads_q, heads_k)
        q, k, v = random_qkv(rng, sizes, batch=batch, dtype=DTYPES[dtype])
        check(q, k, v)
        check(q, k, v, mask="causal")


@pytest.mark.parametrize("softmax_scale", [1e-30, 1e-4, 0.125, 1, 2.5, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_scale(rng, dtype, softmax_scale):
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype])
    check(q, k, v, softmax_scale=softmax_scale)
    check(q, k, v, softmax_scale=softmax_scale, mask="causal")


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_from_zero(rng, dtype):
    """The softmax must not overflow or underflow where all scores of a row are large."""
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype])
    for shift in (-40.0, 40.0):
        check(torch.ones_like(q), (k + shift), v, softmax_scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rising_scores(rng, dtype):
    """Every key tile raises the maximum, so that every tile rescales what came before."""
    q, k, v = random_qkv(rng, seqlen_k=600, dtype=DTYPES[dtype])
    rising = torch.linspace(-3, 3, 600)[None, :, None, None].expand_as(k)
    check(q.abs(), rising.to(k.dtype).contiguous(), v)
    check(q.abs(), rising.flip(1).to(k.dtype).contiguous(), v)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)))
def test_layouts(rng, dtypes, layouts):
    names = list(LAYOUTS)
    others = torch.randint(len(names), (2,), generator=rng).tolist()
    for dtype in dtypes:
        q, k, v = random_qkv(rng, heads_q=4, dtype=dtype)
        q, k = lay_out(q, layouts[0]), lay_out(k, layouts[1])
        v = lay_out(v, names[others[0]])
        out = lay_out(torch.full_like(q, torch.nan), names[others[1]])
        check(q, k, v)
        check(q, k, v, out=out, mask="causal")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_writes_its_elements_only(rng, dtype, layout):
    q, k, v = random_qkv(rng, dtype=DTYPES[dtype])
    out = lay_out(torch.zeros_like(q), layout)
    everything = torch.empty(0, dtype=q.dtype).set_(out.untyped_storage())
    everything.fill_(-77.0)
    returned = fmha_fwd(q, k, v, out=out)
    assert returned is out
    assert torch.equal(out, fmha_fwd(q, k, v))
    out.fill_(-77.0)
    assert (everything == -77.0).all(), "something beside the elements of out was written"


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_tensors(rng, dtype):
    """Strides of 0, in heads, in the batch and in the sequence."""
    q, k, v = random_qkv(rng, heads_q=4, heads_k=4, dtype=DTYPES[dtype])
    check(q, k[:, :, :1].expand_as(k), v[:, :, 2:3].expand_as(v))
    check(q[:1].expand_as(q), k[1:].expand_as(k), v)
    check(q[:, :1].expand_as(q), k[:, :1].expand_as(k), v[:, :1].expand_as(v), mask="causal")


def test_unit_dimensions_with_odd_strides(rng):
    """A dimension of size 1 may have any stride; nobody can see it."""
    q, k, v = random_qkv(rng, batch=1, seqlen_q=1, heads_q=1, heads_k=1)
    q = q.as_strided(q.shape, (7, 3, 5, 1))
    k = k.as_strided(k.shape, (1, 64, 0, 1))
    check(q, k, v)


def test_k_and_v_may_be_q(rng):
    q, _, _ = random_qkv(rng)
    check(q, q, q)


def test_fresh_output_is_contiguous_and_without_lse(rng):
    q, k, v = random_qkv(rng)
    q = lay_out(q, "sbhd")
    out = fmha_fwd(q, k, v)
    assert isinstance(out, Tensor)
    assert out.is_contiguous()
    with_lse, lse = fmha_fwd(q, k, v, return_lse=True)
    assert torch.equal(out, with_lse)
    assert lse.is_contiguous()


def test_two_same_calls_do_not_share_their_output(rng):
    q, k, v = random_qkv(rng)
    first = fmha_fwd(q, k, v)
    kept = first.clone()
    second = fmha_fwd(-q, k, v)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
