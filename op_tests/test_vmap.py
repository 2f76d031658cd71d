"""torch.vmap: in one launch where that fits, else example by example; the results are the same."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from inputs import prefix_sums, random_qkv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from untyped import fmha_bwd, fmha_fwd

import jitfmha
from jitfmha.call.pytorch.ops import BACKWARD_NAMES, NAMES
from jitfmha.problem.float64_reference import attention

# Torch warns of operators without a rule.
pytestmark = pytest.mark.filterwarnings("error")

EXAMPLES = 3


class Launches(TorchDispatchMode):
    """Keeps the arguments of the operators that reach a kernel; without ``runs`` none does."""

    def __init__(self, runs: bool = True) -> None:
        super().__init__()
        self.arguments: list[tuple[Any, ...]] = []
        self._runs = runs

    @property
    def number(self) -> int:
        return len(self.arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "jitfmha" in str(func):
            self.arguments.append(args)
            if not self._runs:
                return tuple(torch.zeros_like(args[i]) for i in range(len(func._schema.returns)))
        return func(*args, **(kwargs or {}))


def stacked(rng: torch.Generator, **sizes: Any) -> list[Tensor]:
    examples = [random_qkv(rng, **sizes) for _ in range(EXAMPLES)]
    return [torch.stack(x) for x in zip(*examples, strict=True)]


def assert_reference(result: Any, qkv: list[tuple[Tensor, ...]], **options: Any) -> None:
    for i, one in enumerate(qkv):
        exact = attention(*one, **options)
        assert_close((result[0][i], result[1][i]), exact, *one)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 0, 1)])
def test_one_launch(rng, in_dims):
    shared = random_qkv(rng)
    given, examples = [], []
    for x, one, dim in zip(stacked(rng), shared, in_dims, strict=True):
        given.append(one if dim is None else x.movedim(0, dim).contiguous())
        examples.append([one] * EXAMPLES if dim is None else list(x))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fmha_fwd(q, k, v, mask="causal", return_lse=True)

    with Launches() as launches:  # type: ignore[no-untyped-call]
        result = torch.vmap(attend, in_dims=in_dims)(*given)
    assert launches.number == 1
    assert_reference(result, list(zip(*examples, strict=True)), mask="causal")


def test_examples_in_the_last_dimension_are_copied(rng):
    qkv = stacked(rng)
    last = [x.movedim(0, -1).contiguous() for x in qkv]
    result = torch.vmap(torch.ops.jitfmha.fmha_fwd, in_dims=(-1, -1, -1, *[None] * 10))(
        *last, None, "0", [-1, -1], True, *[None] * 6
    )
    assert_reference(result, list(zip(*qkv, strict=True)))


@pytest.mark.parametrize("bias_shape", [(2, 2, 33, 49), (1, 1, 33, 49), (1, 2, 1, 49)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_biases(rng, bias_shape, is_shared):
    qkv = stacked(rng)
    bias = torch.randn(EXAMPLES, *bias_shape, generator=rng)
    given, dim = (bias[0], None) if is_shared else (bias, 0)
    with Launches() as launches:  # type: ignore[no-untyped-call]
        out, lse = torch.vmap(
            lambda q, k, v, bias: fmha_fwd(q, k, v, bias=bias, return_lse=True),
            in_dims=(0, 0, 0, dim),
        )(*qkv, given)
    assert launches.number == 1
    for i, one in enumerate(zip(*qkv, strict=True)):
        exact = attention(*one, bias=bias[0 if is_shared else i])
        assert_close((out[i], lse[i]), exact, *one)


@pytest.mark.parametrize("slopes_shape", [(2,), (2, 2)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_slopes(rng, slopes_shape, is_shared):
    """Those that arrive at the operator: each sequence of each example has its own."""
    qkv = stacked(rng)
    slopes = torch.rand(EXAMPLES, *slopes_shape, generator=rng)
    given, dim = (slopes[0], None) if is_shared else (slopes, 0)
    with Launches(runs=False) as launches:  # type: ignore[no-untyped-call]
        torch.vmap(
            lambda q, k, v, slopes: fmha_fwd(q, k, v, alibi_slopes=slopes), in_dims=(0, 0, 0, dim)
        )(*qkv, given)
    (arrived,) = launches.arguments
    each = slopes[:1].expand_as(slopes) if is_shared else slopes
    expected = each if len(slopes_shape) == 2 else each[:, None].expand(-1, 2, -1)
    found = arrived[NAMES.index("alibi_slopes")].expand(EXAMPLES * 2, 2)
    assert torch.equal(found, expected.reshape(EXAMPLES * 2, 2))


def test_gradients(rng):
    """Of each example, by grad inside of vmap, and of all, by autograd around it."""
    qkv = stacked(rng)
    shared = random_qkv(rng)[1]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fmha_fwd(q, k, v, mask="causal")
        assert isinstance(out, Tensor)
        return out.square().sum()

    inside = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, 0))(
        qkv[0], shared, qkv[2]
    )
    leaves = [x.clone().requires_grad_() for x in (qkv[0], shared, qkv[2])]
    torch.vmap(loss, in_dims=(0, None, 0))(*leaves).sum().backward()
    exact = [x.double().requires_grad_() for x in (qkv[0], shared.expand_as(qkv[1]), qkv[2])]
    for one in zip(*exact, strict=True):
        attention(*one, mask="causal")[0].square().sum().backward()
    for n, (x, leaf, y) in enumerate(zip(inside, leaves, exact, strict=True)):
        expected = y.grad
        assert expected is not None
        torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-4)
        assert leaf.grad is not None
        whole = expected.sum(0) if n == 1 else expected
        torch.testing.assert_close(leaf.grad.double(), whole, rtol=1e-4, atol=1e-4)


def test_one_by_one(rng):
    """What no batch has for each of its sequences."""
    q, k, v = stacked(rng)
    sink = torch.randn(EXAMPLES, 2, generator=rng)
    by_sink = torch.vmap(lambda q, k, v, sink: fmha_fwd(q, k, v, sink=sink))(q, k, v, sink)
    state = torch.tensor([3, 5])
    dropped = torch.vmap(lambda *x: fmha_fwd(*x, dropout_p=0.5, rng_state=state))(q, k, v)
    sums = torch.stack([prefix_sums([33 - i, i]) for i in range(EXAMPLES)])
    groups = {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
    packed = torch.vmap(lambda q, k, v, sums: fmha_fwd(q, k, v, **dict.fromkeys(groups, sums)))(
        q[:, 0], k[:, 0, :33], v[:, 0, :33], sums
    )
    out = torch.full_like(q, torch.nan)
    lse = torch.vmap(lambda *x: fmha_fwd(*x[:3], out=x[3], return_lse=True)[1])(q, k, v, out)
    for i in range(EXAMPLES):
        one = q[i], k[i], v[i]
        assert torch.equal(by_sink[i], fmha_fwd(*one, sink=sink[i]))
        assert torch.equal(dropped[i], fmha_fwd(*one, dropout_p=0.5, rng_state=state))
        alone = q[i, 0], k[i, 0, :33], v[i, 0, :33]
        assert torch.equal(packed[i], fmha_fwd(*alone, **dict.fromkeys(groups, sums[i])))
        expected, expected_lse = fmha_fwd(*one, return_lse=True)
        assert torch.equal(out[i], expected)
        assert torch.equal(lse[i], expected_lse)


def test_gradients_of_a_shared_bias_are_not_added_up(rng):
    out, *qkv = stacked(rng, seqlen_q=49)[0], *stacked(rng, seqlen_q=49)
    lse, bias = torch.randn(EXAMPLES, 2, 2, 49), torch.randn(1, 1, 49, 49, generator=rng)
    for wanted, number in ((False, 1), (True, EXAMPLES)):
        with Launches(runs=False) as launches:  # type: ignore[no-untyped-call]
            torch.vmap(lambda *x, w=wanted: backward_operator(*x, bias, w))(out, *qkv, out, lse)
        assert launches.number == number


def backward_operator(*given: Any) -> Any:
    """``jitfmha::fmha_bwd`` with a bias, and the gradient of it if that is wanted."""
    *tensors, bias, wanted = given
    named = dict(zip(("dout", "q", "k", "v", "out", "lse"), tensors, strict=True))
    flat = dict.fromkeys(BACKWARD_NAMES[: BACKWARD_NAMES.index("bf16_cvt")]) | named
    flat |= {"mask": "0", "window_size": [-1, -1], "bias": bias, "with_dbias": wanted}
    return torch.ops.jitfmha.fmha_bwd(**flat)


def test_an_out_that_all_examples_share_is_refused(rng):
    q, k, v = stacked(rng)
    out = torch.empty_like(q[0])
    with pytest.raises(ValueError, match=r"out has shape \(2, 33, 2, 64\) and is the same"):
        torch.vmap(lambda *x: fmha_fwd(*x, out=out))(q, k, v)


def test_backward_function(rng):
    q, k, v = stacked(rng)
    out, lse = torch.vmap(lambda *x: fmha_fwd(*x, return_lse=True))(q, k, v)
    batched = torch.vmap(fmha_bwd)(out, q, k, v, out, lse)
    for i in range(EXAMPLES):
        alone = fmha_bwd(*(x[i] for x in (out, q, k, v, out, lse)))
        for x, y in zip(batched, alone, strict=True):
            torch.testing.assert_close(x[i], y)


def test_decoding(rng):
    """Over caches of one length or of several."""
    q, k, v = (torch.randn(3, 2, n, 2, 64, generator=rng) for n in (1, 9, 9))
    lengths = torch.tensor([[3, 4], [9, 1], [0, 2]], dtype=torch.int32)

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        out = jitfmha.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
        assert isinstance(out, Tensor)
        return out

    calls = zip(q, k, v, lengths, strict=True)
    assert torch.equal(torch.vmap(step)(q, k, v, lengths), torch.stack([step(*x) for x in calls]))
