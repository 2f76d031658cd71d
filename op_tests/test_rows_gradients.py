"""Gradients of softmax, rms_norm and layer_norm, and what torch does with the operators."""

import itertools

import pytest
import torch
from drawn_rows import RowCall, draw, draw_like, drawn_index, own_kernels  # noqa: F401
from norm_reference import backward, check, forward
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import jitfmha
from jitfmha.rows import interface
from jitfmha.rows.ops import rows_bwd
from jitfmha.rows.problem import KINDS, RowBackwardArguments


def check_gradients(rng: torch.Generator, call: RowCall) -> None:
    kind, x, residual, weight, bias, eps = call
    dout = torch.randn(x.shape, generator=rng).to(x.dtype)
    dsum = None if residual is None else torch.randn(x.shape, generator=rng).to(x.dtype)
    if kind == "softmax":
        x = forward(kind, x, None, None, 0)[0].to(x.dtype)
    arguments = RowBackwardArguments(dout, dsum, x, weight, bias, kind, eps, weight is not None)
    gradients = rows_bwd.launch(arguments)
    expected = backward(kind, dout, x, weight, eps, dsum)
    wanted = [(x, expected.x), (weight, expected.weight), (bias, expected.bias)]
    for (given, each), actual in zip(
        [pair for pair in wanted if pair[0] is not None], gradients, strict=True
    ):
        assert given is not None
        check(actual, *each, given.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls(kind, isa, dtypes, rng, poisoned_memory):
    for dtype in dtypes:
        call = draw(rng, kind, dtype)
        for _ in range(6):
            check_gradients(rng, draw_like(rng, call))


@pytest.mark.sample("kind", KINDS, 1, shared_by="rows")
def test_many_rows(kind, dtypes, rng, poisoned_memory):
    for dtype in dtypes:
        check_gradients(rng, draw(rng, kind, dtype, columns=257, batch=(1501,)))


def test_results_do_not_depend_on_threads(rng, num_threads):
    """Nor on whether they go past the caches, as those of one thread do here."""
    x, dout = torch.randn(2, 4200, 1001, generator=rng)
    weight = torch.randn(1001, generator=rng)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        arguments = RowBackwardArguments(dout, None, x, weight, weight, "layer_norm", 1e-5, True)
        results.append(rows_bwd.launch(arguments))
    for each in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(each, results[0], strict=True))


# ---- What torch does -----------------------------------------------------------------------------


def loss(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of both results."""
    out, total = jitfmha.layer_norm(x, weight, bias, residual=residual)
    return out.sin().sum() + total.cos().sum()


def inputs_of_loss(rng: torch.Generator) -> list[Tensor]:
    shapes = (2, 3, 50), (2, 3, 50), (50,), (50,)
    return [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("way", ["eager", "compiled", "func"])
def test_gradients_by_torch(way, rng, quick_inductor):
    inputs = inputs_of_loss(rng)
    x, residual, weight, bias = (each.detach().double().requires_grad_() for each in inputs)
    total = x + residual
    out = torch.nn.functional.layer_norm(total, (50,), weight, bias)
    expected = torch.autograd.grad(out.sin().sum() + total.cos().sum(), (x, residual, weight, bias))
    if way == "func":
        actual = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs)
    else:
        function = torch.compile(loss, fullgraph=True) if way == "compiled" else loss
        actual = torch.autograd.grad(function(*inputs), inputs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_calls_are_eager_ones(kind, rng, quick_inductor):
    x = torch.randn(4, 33, generator=rng)
    function = getattr(jitfmha, kind)

    def all_results(x: Tensor) -> tuple[Tensor, ...]:
        return function(x, residual=x, out_dtype=torch.int8)

    actual = torch.compile(all_results, fullgraph=True)(x)
    for one, other in zip(actual, all_results(x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dims", [(0, None), (1, None), (2, 0)])
def test_vmap(dims, rng):
    x = torch.randn(4, 4, 4, generator=rng)
    weight = torch.randn(4, 4, generator=rng) if dims[1] == 0 else torch.randn(4, generator=rng)
    actual = torch.vmap(jitfmha.rms_norm, in_dims=dims)(x, weight)
    examples = x.movedim(dims[0], 0)
    for i in range(4):
        expected = jitfmha.rms_norm(examples[i], weight[i] if dims[1] == 0 else weight)
        torch.testing.assert_close(actual[i], expected)


def test_vmap_of_vectors_with_8_bits(rng):
    x = torch.randn(4, 6, generator=rng)
    out, scale = torch.vmap(lambda each: jitfmha.softmax(each, out_dtype=torch.int8))(x)
    expected, of_rows = jitfmha.softmax(x, out_dtype=torch.int8)
    assert torch.equal(out, expected)
    assert torch.equal(scale, of_rows)


def test_gradients_of_each_example(rng):
    x, residual, weight, bias = (each.detach() for each in inputs_of_loss(rng))
    gradient = torch.func.grad(loss, argnums=(0, 2, 3))
    actual = torch.vmap(gradient, in_dims=(0, 0, None, None))(x, residual, weight, bias)
    for i in range(2):
        expected = gradient(x[i], residual[i], weight, bias)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one[i], other)


def test_autocast_leaves_rows_as_they_are(rng):
    x, weight = torch.randn(3, 40, generator=rng).bfloat16(), torch.randn(40, generator=rng)
    expected = jitfmha.rms_norm(x, weight)
    with torch.autocast("cpu", torch.float16):
        actual = jitfmha.rms_norm(x, weight)
    assert torch.equal(actual, expected)


def test_flop_counters_count_nothing():
    with FlopCounterMode(display=False) as counter:
        jitfmha.softmax(torch.zeros(3, 5))
    assert counter.get_total_flops() == 0


def test_derivatives_that_there_are_not(rng):
    x = torch.randn(3, 5, generator=rng, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"x requires grad.*torch.int8"):
        jitfmha.softmax(x, out_dtype=torch.int8)
    (first,) = torch.autograd.grad(jitfmha.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="once more"):
        first.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="tangent"):
        jitfmha.softmax(forward_ad.make_dual(x.detach(), x.detach()))


def test_only_asked_gradients_are_made(rng):
    x, weight = (torch.randn(5, 40, generator=rng) for _ in range(2))
    weight = weight[0].clone().requires_grad_(bool(drawn_index(rng, 2)))
    x.requires_grad_()
    jitfmha.rms_norm(x, weight).sum().backward()
    assert (weight.grad is None) == (not weight.requires_grad)


def test_small_calls_are_torchs(dtypes, rng, monkeypatch, poisoned_memory, num_threads):
    """But gradients of LayerNorm of 16 bits, which torch takes rounded means for."""
    monkeypatch.undo()
    torch.set_num_threads(1)
    for kind, dtype in itertools.product(("softmax", "layer_norm"), dtypes):
        x, dout = (torch.randn(7, 129, generator=rng).to(dtype) for _ in range(2))
        weight, bias = (torch.randn(129, generator=rng).to(dtype) for _ in range(2))
        weights = () if kind == "softmax" else (weight, bias)
        inputs = [each.requires_grad_() for each in (x, *weights)]
        out = getattr(jitfmha, kind)(*inputs)
        is_ours = kind == "layer_norm" and dtype != torch.float32
        assert ("Eager_rows_fwd" in str(out.grad_fn)) == is_ours
        given = [each.detach() for each in weights] or [None, None]
        check(out.detach(), *forward(kind, x.detach(), *given, 1e-5), dtype)
        gradients = torch.autograd.grad(out, inputs, dout)
        of_x = out.detach() if kind == "softmax" else x.detach()
        expected = backward(kind, dout, of_x, given[0], 1e-5, None)
        for actual, wanted in zip(
            gradients, (expected.x, expected.weight, expected.bias), strict=False
        ):
            check(actual, *wanted, dtype)
        with torch.no_grad(), monkeypatch.context() as patched:
            patched.setattr(interface, "prepared_rows", None)
            getattr(jitfmha, kind)(x, *weights)
            with torch.autocast("cpu", torch.bfloat16):
                assert getattr(jitfmha, kind)(x, *weights).dtype == dtype
            more = torch.randn(interface.MOST_OF_TORCH[dtype] // 129 + 1, 129).to(dtype)
            with pytest.raises(TypeError, match="not callable"):
                getattr(jitfmha, kind)(more, *weights)


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (torch.tensor(1.0), {}, ValueError, r"x has shape \(\)"),
        (torch.ones(2, 3), {"weight": torch.ones(2, 3)}, ValueError, r"weight has shape \(2, 3\)"),
        (torch.ones(2, 3), {"bias": torch.ones(3).double()}, ValueError, "bias has dtype"),
        (torch.ones(2, 3), {"bias": [1.0] * 3}, TypeError, "bias must be a torch.Tensor"),
        (torch.ones(2, 3), {"eps": float("nan")}, ValueError, "eps is nan"),
        (torch.ones(2, 3).double(), {}, NotImplementedError, "x has dtype torch.float64"),
    ],
)
def test_small_calls_that_are_wrong(monkeypatch, x, options, error, text):
    monkeypatch.undo()
    with pytest.raises(error, match=text):
        jitfmha.layer_norm(x, **options)


def test_a_number_has_no_rows(monkeypatch):
    """Though torch has a softmax of it."""
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        jitfmha.softmax(torch.tensor(1.0))


def test_weights_of_modules_pass_the_dispatcher(rng, monkeypatch):
    """Parameters are as plain as other tensors."""
    monkeypatch.setattr(interface, "rows_fwd", None)
    x, weight = torch.randn(3, 40, generator=rng), torch.nn.Parameter(torch.ones(40))
    out = jitfmha.rms_norm(x, weight)
    out.sum().backward()
    torch.testing.assert_close(weight.grad, out.detach().sum(0))
