"""Gradients through torch: autograd, torch.compile, torch.func, hooks, checkpoints."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import prefix_sums, random_qkv
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from untyped import fmha_bwd, fmha_fwd

from jitfmha.call import interface
from jitfmha.problem.float64_reference import attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def qkv(rng: torch.Generator) -> list[Tensor]:
    return [x.requires_grad_() for x in random_qkv(rng, heads_q=4)]


@pytest.fixture(params=["first", "repeated", "dispatched"])
def way(
    request: pytest.FixtureRequest, qkv: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls go past torch's dispatcher unless somebody watches."""
    with fresh_calls():
        if request.param == "repeated":
            fmha_fwd(*qkv)
        if request.param == "dispatched":
            monkeypatch.setattr(interface, "is_watched", lambda *tensors: True)
        yield


def expected(total: Callable[..., Tensor], qkv: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of ``total(out, lse)`` of the reference, in float64."""
    inputs = [x.detach().double().requires_grad_() for x in qkv]
    return torch.autograd.grad(
        total(*attention(*inputs)), inputs, allow_unused=True, materialize_grads=True
    )


def assert_close(actual: Any, wanted: tuple[Tensor, ...]) -> None:
    for x, reference in zip(actual, wanted, strict=True):
        assert (x.double() - reference).abs().max() <= 2e-5 * (1 + reference.abs().max())


def squares(out: Tensor, lse: Tensor | None = None) -> Tensor:
    return out.square().sum()


TOTALS: dict[str, Callable[..., Tensor]] = {
    "out": squares,
    "expanded": lambda out, lse: out.sum(),
    "both": lambda out, lse: out.square().sum() + lse.square().sum(),
    "lse": lambda out, lse: lse.square().sum(),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("total", TOTALS)
def test_gradients(qkv, total):
    results = fmha_fwd(*qkv, return_lse=True)
    assert_close(torch.autograd.grad(TOTALS[total](*results), qkv), expected(TOTALS[total], qkv))


@pytest.mark.usefixtures("way")
def test_gradients_without_lse(qkv):
    assert_close(torch.autograd.grad(squares(fmha_fwd(*qkv)), qkv), expected(squares, qkv))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_input_requires_grad(qkv, name):
    wanted = dict(zip("qkv", expected(squares, qkv), strict=True))
    named = dict(zip("qkv", qkv, strict=True))
    arguments = {n: x if n == name else x.detach() for n, x in named.items()}
    squares(fmha_fwd(**arguments)).backward()
    assert_close([named[name].grad], (wanted[name],))
    assert all(x.grad is None for n, x in named.items() if n != name)


@pytest.mark.usefixtures("way")
def test_no_grad_and_frozen_inputs(qkv):
    with torch.no_grad():
        assert not fmha_fwd(*qkv).requires_grad
    assert not fmha_fwd(*[x.detach() for x in qkv]).requires_grad


@pytest.mark.usefixtures("fresh_dynamo", "quick_inductor")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(qkv, backend):
    compiled: Any = torch.compile(
        lambda q, k, v: squares(fmha_fwd(q, k, v)), fullgraph=True, backend=backend
    )
    assert_close(torch.autograd.grad(compiled(*qkv), qkv), expected(squares, qkv))


def test_func_grad(qkv):
    plain = [x.detach() for x in qkv]
    gradient = torch.func.grad(lambda q, k, v: squares(fmha_fwd(q, k, v)), argnums=(0, 1, 2))
    assert_close(gradient(*plain), expected(squares, qkv))


@pytest.mark.usefixtures("way")
def test_second_derivatives_are_refused(qkv):
    (dq, *_) = torch.autograd.grad(squares(fmha_fwd(*qkv)), qkv, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated once more"):
        dq.sum().backward()
    out, lse = (x.detach() for x in fmha_fwd(*qkv, return_lse=True))
    dq, _, _ = fmha_bwd(out.clone(), *qkv, out, lse)
    with pytest.raises(NotImplementedError, match="cannot be differentiated once more"):
        dq.sum().backward()


@pytest.mark.usefixtures("way")
def test_write_to_what_is_saved(qkv):
    for place in range(3):
        copies = [1 * x for x in qkv]
        out = fmha_fwd(*copies)
        copies[place].detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares(out).backward()
    out = fmha_fwd(*qkv)
    total = out.sum()
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_write_to_given_gradients_is_seen_by_autograd(qkv):
    plain = [x.detach() for x in qkv]
    out, lse = fmha_fwd(*plain, return_lse=True)
    weight = torch.ones((), requires_grad=True)
    dq = torch.zeros_like(plain[0])
    product = (weight * dq).sum()
    fmha_bwd(out.clone(), *plain, out, lse, dq=dq)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.usefixtures("way")
def test_second_use_of_a_freed_graph(qkv):
    total = squares(fmha_fwd(*qkv))
    total.backward(retain_graph=True)
    total.backward()
    assert_close([x.grad for x in qkv], tuple(2 * x for x in expected(squares, qkv)))
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


@pytest.mark.usefixtures("way")
def test_saved_tensors_hooks(qkv):
    packed = []

    def pack(x: Tensor) -> Tensor:
        packed.append(tuple(x.shape))
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = fmha_fwd(*qkv)
    assert len(packed) == 5, "q, k, v, out and lse"
    assert_close(torch.autograd.grad(squares(out), qkv), expected(squares, qkv))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(qkv, use_reentrant):
    out: Any = checkpoint(fmha_fwd, *qkv, use_reentrant=use_reentrant)
    squares(out).backward()
    assert_close([x.grad for x in qkv], expected(squares, qkv))


@pytest.mark.parametrize("is_padded", [False, True])
def test_checkpoint_of_packed_sequences(rng, is_padded):
    """The first call goes another way than the one that repeats it in the backward pass."""
    lengths = torch.randint(1, 99, (5,), generator=rng)
    sums = {f"cu_seqlens_{side}": prefix_sums(lengths.tolist()) for side in "qk"}
    rows = lengths + 3 if is_padded else lengths
    if is_padded:
        sums |= {f"cu_seqlens_{side}_padded": prefix_sums(rows.tolist()) for side in "qk"}
    qkv = [torch.randn(int(rows.sum()), 2, 64, generator=rng, requires_grad=True) for _ in range(3)]

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = fmha_fwd(*qkv, mask="causal", **sums)
        return out

    used = torch.cat([torch.arange(int(n)) < m for n, m in zip(rows, lengths, strict=True)])
    dout = torch.randn(qkv[0].shape, generator=rng) * used[:, None, None]
    found = torch.autograd.grad(checkpoint(attend, *qkv, use_reentrant=False), qkv, dout)
    expected = torch.autograd.grad(attend(*qkv), qkv, dout)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[used], y[used])


def test_training_decreases_the_loss(rng):
    """A projection learns what another one gives."""
    x = torch.randn(2, 24, 2, 64, generator=rng)
    teacher, weight = (torch.randn(64, 64, generator=rng) / 8 for _ in range(2))
    weight.requires_grad_()
    target = fmha_fwd(x @ teacher, x, x)
    losses = []
    for _ in range(20):
        loss = (fmha_fwd(x @ weight, x, x) - target).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= gradient / gradient.norm()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_repeated_calls_give_the_same_bits(rng, monkeypatch):
    """Past the dispatcher as through it, whatever the options are, and those are told apart."""
    sums, lengthened = prefix_sums([9, 0, 24]), prefix_sums([10, 3, 29])
    groups = {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
    padded = {"cu_seqlens_q_padded": lengthened, "cu_seqlens_k_padded": lengthened}
    longest = {"max_seqlen_q": 24, "max_seqlen_k": 24}
    of_batches: list[dict[str, Any]] = [
        *({}, {"mask": 1}, {"mask": 2}, {"window_size": (3, 4)}, {"mask": "t:3,4"}),
        *({"softmax_scale": 0.5}, {"softmax_scale": 2}),
    ]
    of_groups = [groups, groups | longest, groups | padded, groups | {"mask": 2}]
    q, k, v = random_qkv(rng, seqlen_q=42, seqlen_k=42)
    calls = [((q, k, v), options) for options in of_batches]
    calls += [((q[0], k[0], v[0]), options) for options in of_groups]
    with fresh_calls():
        with monkeypatch.context() as patched:
            patched.setattr(interface, "is_watched", lambda *tensors: True)
            first = [_results_and_gradients(*call) for call in calls]
        again = [_results_and_gradients(*call) for call in calls]
        for (name, *results), (other_name, *other_results) in zip(first, again, strict=True):
            assert (name, other_name) == ("fmha_fwdBackward", "_EagerAttentionBackward")
            assert all(map(torch.equal, results, other_results))
        for broken in ({"mask": True}, {"return_lse": 1}, {"softmax_scale": True}):
            with pytest.raises(TypeError):
                fmha_fwd(q.clone().requires_grad_(), k, v, **broken)


def _results_and_gradients(qkv: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What was noted for backward, the results, and gradients that depend on both of them."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, lse = fmha_fwd(*leaves, return_lse=True, **options)
    total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).square().sum()
    return out.grad_fn.name(), out, lse, *torch.autograd.grad(total, leaves)


def test_gradients_that_are_not_served_are_refused_in_time(rng):
    """Also where a call like this one, but for requiring grad, was served before."""
    q, k, v = (x.to(torch.float8_e4m3fn) for x in random_qkv(rng))
    weight = torch.ones(2, 33, 2, 64, requires_grad=True)
    for _ in range(2):
        fmha_fwd(q, k, v)
        with pytest.raises(NotImplementedError):
            fmha_fwd((weight * 1).to(torch.float8_e4m3fn), k, v)
