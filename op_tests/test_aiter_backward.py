"""AITER's functions of the backward pass against the reference's gradients."""

from typing import Any

import pytest
import torch
from closeness import is_same
from inputs import prefix_sums, random_qkv
from packed_calls import packed
from refusals import refused
from torch import Tensor

import jitfmha
from jitfmha.problem.float64_reference import attention

mha_fwd: Any = jitfmha.aiter.mha_fwd
mha_varlen_fwd: Any = jitfmha.aiter.mha_varlen_fwd
mha_bwd: Any = jitfmha.aiter.mha_bwd
mha_varlen_bwd: Any = jitfmha.aiter.mha_varlen_bwd
fmha_v3_bwd: Any = jitfmha.aiter.fmha_v3_bwd
fmha_v3_varlen_bwd: Any = jitfmha.aiter.fmha_v3_varlen_bwd

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FIRST = ["dout", "q", "k", "v", "out", "softmax_lse"]
SCORES = ["dropout_p", "softmax_scale"]
WINDOW = ["is_causal", "window_size_left", "window_size_right", "deterministic"]


def gradients(qkv: list[Tensor], dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv by the reference, and the sum of dout times out for each query and head."""
    leaves = [x.double().requires_grad_() for x in qkv]
    out, _ = attention(*leaves, **options)
    softmax_d = (out * dout).sum(-1).transpose(1, 2).detach()
    return *torch.autograd.grad(out, leaves, dout.double()), softmax_d


def assert_near(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Gradients of inputs of size 1: what rounding to float32 leaves."""
    for name, x, y in zip(("dq", "dk", "dv", "softmax_d"), actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize(
    ("is_causal", "left", "right"), [(False, -5, -1), (True, 9, 4), (0, 5, 99)]
)
def test_batch(rng, is_causal, left, right):
    q, k, v = random_qkv(rng, seqlen_q=20, seqlen_k=45, heads_q=4)
    dout = torch.randn(q.shape, generator=rng)
    masked = (is_causal, left, right)
    out, lse, _, _ = mha_fwd(q, k, v, 0.0, 0.2, *masked, 0, True, False)
    given = [
        torch.full((2, n, h, 2, 64), -77.0)[:, :, :, 1] for n, h in ((20, 4), (45, 2), (45, 2))
    ]
    result = mha_bwd(dout, q, k, v, out, lse, 0.0, 0.2, *masked, False, *given)
    for x, place in zip(result, given, strict=False):
        assert x.data_ptr() == place.data_ptr()
    window = (max(left, -1), 0 if is_causal else -1)
    expected = gradients([q, k, v], dout, softmax_scale=0.2, window_size=window)
    assert_near(result, expected)
    others = fmha_v3_bwd(dout, q, k, v, out, lse, torch.zeros(()), 0.2, *masked, None, True, 1)
    assert is_same(result, others)


@pytest.mark.parametrize("zero_tensors", [False, True])
def test_packed_sequences(rng, zero_tensors):
    call = packed(rng, [5, 0, 40, 17], [9, 4, 30, 40], gap=3)
    q, k, v = call.qkv
    dout = torch.randn(q.shape, generator=rng)
    cu, sequences = [*call.sequences.groups.values()][:2], call.sequences.padded
    masked = (True, 9, -1)
    out, lse, _, _ = mha_varlen_fwd(
        *(q, k, v, *cu, 40, 40, 0, 0.0, None, 0.0, False, *masked, 0, True, False), **sequences
    )
    dq, dk, dv = (torch.full_like(x, -77.0) for x in (q, k, v))
    result = mha_varlen_bwd(
        *(dout, q, k, v, out, lse, *cu, 40, torch.tensor(40), 0.0, None, zero_tensors),
        *(*masked, True, dq, dk, dv),
        **sequences,
    )
    unused = [~call.sequences.used_rows(side) for side in (0, 1)]
    for sq, sk, start_q, start_k in zip(*call.sequences.spans, strict=True):
        rows, keys = slice(start_q, start_q + sq), slice(start_k, start_k + sk)
        one = [q[None, rows], k[None, keys], v[None, keys]]
        expected = gradients(one, dout[None, rows], window_size=(9, 0))
        mine = result[0][None, rows], *(x[None, keys] for x in result[1:3])
        assert_near((*mine, result[3][None, :, rows]), expected)
    assert (result[3][:, unused[0]] == 0).all()
    for x, rows in zip(result, (unused[0], unused[1], unused[1]), strict=False):
        assert (x[rows] == (0.0 if zero_tensors else -77.0)).all()
    others = fmha_v3_varlen_bwd(
        *(dout, q, k, v, out, lse, *cu, 40, 40, 0.0, None, True, *masked, True, True, 1),
        **sequences,
    )
    for x, y, rows in zip(result, others, (unused[0], unused[1], unused[1]), strict=False):
        assert torch.equal(x[~rows], y[~rows])
        assert (y[rows] == 0).all()


def test_gradient_of_bias(rng):
    q, k, v = random_qkv(rng, seqlen_q=20, seqlen_k=45, heads_q=4)
    dout, bias = torch.randn(q.shape, generator=rng), torch.randn(20, 45, generator=rng)
    leaf = bias.double().requires_grad_()
    out, lse = attention(q, k, v, bias=leaf[None, None])
    (expected,) = torch.autograd.grad(out, leaf, dout.double())
    dbias = torch.full_like(bias, -77.0)
    returned = (x.detach().float() for x in (out, lse))
    options = (0.0, None, False, -1, -1, True)
    mha_bwd(dout, q, k, v, *returned, *options, bias=bias, dbias=dbias)
    torch.testing.assert_close(dbias.double(), expected, atol=2e-5, rtol=2e-5)


def gradient_of_sink(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sink: Tensor) -> Tensor:
    leaf = sink.double().requires_grad_()
    out, _ = attention(q, k, v, sink=leaf)
    return torch.autograd.grad(out, leaf, dout.double())[0]


def test_sinks(rng):
    q, k, v = random_qkv(rng, seqlen_q=20, seqlen_k=45, heads_q=4)
    dout, sink = torch.randn(q.shape, generator=rng), torch.randn(4, generator=rng)
    # What a forward pass with sinks returns.
    out, lse = (x.float() for x in attention(q, k, v, sink=sink))
    expected = gradient_of_sink(q, k, v, dout, sink)
    start = torch.randn(4, generator=rng)
    d_sink = start.clone()
    options = (0.0, None, False, -1, -1, False)
    result = mha_bwd(dout, q, k, v, out, lse, *options, sink=sink, d_sink=d_sink)
    torch.testing.assert_close((d_sink - start).double(), expected, atol=2e-5, rtol=2e-5)
    assert_near(result, gradients([q, k, v], dout, sink=sink))

    cu_q, cu_k = prefix_sums([20, 20]), prefix_sums([45, 45])
    flat = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
    packed_lse, d_sink = lse.transpose(0, 1).reshape(4, 40), torch.zeros(4)
    mha_varlen_bwd(
        *(*flat, packed_lse, cu_q, cu_k, 20, 45, 0.0, None, False, False, -1, -1, False),
        sink=sink.expand(2, 4),
        d_sink=d_sink,
    )
    torch.testing.assert_close(d_sink.double(), expected, atol=2e-5, rtol=2e-5)

    # What unused rows between the sequences hold has no meaning.
    used = torch.cat([torch.arange(20), torch.arange(24, 44)])
    wide = [x.new_full((50, *x.shape[1:]), torch.nan) for x in flat]
    wide[2:4] = flat[2:4]
    for x, rows in zip((wide[0], wide[1], wide[4]), (flat[0], flat[1], flat[4]), strict=True):
        x[used] = rows
    for garbage in (torch.nan, -1e30, torch.inf):
        wide_lse, d_sink = torch.full((4, 50), garbage), torch.zeros(4)
        wide_lse[:, used] = packed_lse
        mha_varlen_bwd(
            *(*wide, wide_lse, cu_q, cu_k, 20, 45, 0.0, None, False, False, -1, -1, False),
            cu_seqlens_q_padded=torch.tensor([0, 24, 50], dtype=torch.int32),
            sink=sink,
            d_sink=d_sink,
        )
        torch.testing.assert_close(d_sink.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "error", "texts"),
    [
        ({"dropout_p": 0.3}, ValueError, ["rng_state is missing", "dropout_p=0.3"]),
        ({"sink": torch.ones(2)}, ValueError, ["sink", "(2,)", "d_sink"]),
        ({"d_sink": torch.ones(2)}, ValueError, ["d_sink", "(2,)"]),
        ({"sink": torch.ones(2).int(), "d_sink": torch.ones(2)}, TypeError, ["sink", "int32"]),
        ({"sink": torch.ones(2), "d_sink": torch.ones(3, 2)}, ValueError, ["d_sink", "(3, 2)"]),
        ({"sink": torch.ones(3), "d_sink": torch.ones(2)}, ValueError, ["sink", "(3,)"]),
        ({"sink": torch.ones(2), "d_sink": torch.ones(1).expand(2)}, ValueError, ["(0,)"]),
        ({"sink": torch.ones(2), "d_sink": torch.ones(2, device="meta")}, ValueError, ["meta"]),
        (
            {"sink": torch.ones(2), "d_sink": torch.ones(2).requires_grad_()},
            NotImplementedError,
            ["d_sink requires grad"],
        ),
        ({"gen": torch.Generator()}, NotImplementedError, ["gen"]),
        ({"deterministic": "no"}, TypeError, ["deterministic", "'no'"]),
        ({"softmax_lse": torch.ones(2)}, ValueError, ["lse", "(2,)"]),
        ({"window_size_left": 2**63}, ValueError, [f"window_size_left={2**63}"]),
    ],
)
def test_errors(rng, changes, error, texts):
    q, k, v = random_qkv(rng)
    out, lse = jitfmha.fmha_fwd(q, k, v, return_lse=True)
    values = dict(zip(FIRST, (torch.ones_like(q), q, k, v, out, lse), strict=True))
    values |= dict(zip([*SCORES, *WINDOW], (0.0, None, False, -1, -1, True), strict=True))
    mha_bwd(**values)
    with refused(error, *texts):
        mha_bwd(**(values | changes))


def test_the_gradient_of_sinks_has_memory_of_its_own(rng):
    q, k, v = random_qkv(rng)
    out, lse = jitfmha.fmha_fwd(q, k, v, return_lse=True)
    dq = torch.empty_like(q)
    for name, room in (("dq", dq), ("softmax_lse", lse), ("q", q)):
        with refused(ValueError, f"d_sink shares memory with {name}"):
            mha_bwd(
                *(torch.ones_like(q), q, k, v, out, lse, 0.0, None, False, -1, -1, True),
                dq=dq,
                sink=torch.zeros(2),
                d_sink=room.flatten()[:2],
            )
