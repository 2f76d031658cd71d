"""matmul against float64 on the CPU, its gradients, and what torch does with the operator."""

import re
from typing import Any

import pytest
import torch
from drawn_products import ACTIVATE, check, check_call, drawn_call, matrix, numbers
from drawn_rows import drawn_index
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import jitfmha
from jitfmha.bench import gemm
from jitfmha.gemm.problem import ACTIVATIONS, FLOATS, FP8, OUT_DTYPES, MatmulArguments

SIZES = [0, 1, 2, 7, 16, 33, 64, 100, 129]


def drawn_size(rng):
    return tuple(SIZES[drawn_index(rng, len(SIZES))] for _ in range(3))


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_drawn_calls(dtype, rng, poisoned_memory):
    for _ in range(12):
        check_call(drawn_call(rng, dtype, drawn_size(rng)), rounds_product=True)


@pytest.mark.parametrize("has_bf16", [False, True])
def test_fp8_on_processors(has_bf16, rng, monkeypatch):
    """Those that multiply bfloat16, and others, which take copies in float32."""
    monkeypatch.setattr("jitfmha.gemm.cpu.multiplies_bf16", lambda: has_bf16)
    a, b = numbers(rng, (20, 30), FP8[0]), numbers(rng, (30, 40), FP8[0])
    check_call(MatmulArguments(a, b), rounds_product=True)


def test_rows_of_int8_with_any_stride(rng):
    """Single rows, rows that share memory, and rows that are far apart: torch's own is wrong."""
    column, b = (torch.randint(-9, 10, (9, n), generator=rng).char() for n in (1, 9))
    shared = [b[0].as_strided((5, 4), (step, 1)) for step in (0, 1, 3)]
    far = torch.empty((1 << 31) + 9, dtype=torch.int8).as_strided((2, 9), (1 << 31, 1)).copy_(b[:2])
    for a in (column, column.mT, *shared, far):
        check_call(MatmulArguments(a, a.mT))
        check_call(MatmulArguments(b[:3, : len(a)], a))


def test_calls_that_differ_in_one_argument(rng):
    """The second is not taken for the first, which is there."""
    a, b, bias = (numbers(rng, size, torch.bfloat16) for size in ((8, 8), (8, 8), (8,)))
    first = MatmulArguments(a, b, bias.float())
    for changed in (
        *({"activation": "relu"}, {"out_dtype": torch.float32}, {"bias": None}, {"a": a.mT}),
        *({"bias": bias}, {"scale_a": torch.full((8, 1), 0.5)}, {"a": a[:2]}),
    ):
        for given in (first, first._replace(**changed)):
            check_call(given, rounds_product=True)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_by_torch(activation, rng):
    a, b, bias = (matrix(rng, shape, torch.float32) for shape in ((2, 3, 5, 8), (3, 8, 6), (1, 6)))
    scale = torch.rand(5, 1, generator=rng)

    def ours(a, b, bias):
        return jitfmha.matmul(a, b, bias=bias, scale_a=scale, activation=activation)

    def theirs(a, b, bias):
        return ACTIVATE.get(activation, lambda x: x)(scale * (a @ b) + bias)

    gradients = []
    for function in (ours, theirs):
        leaves = [x.detach().clone().requires_grad_() for x in (a, b, bias)]
        first = torch.autograd.grad(function(*leaves).cos().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)
        gradients.append((*first, *second))
    torch.testing.assert_close(*gradients)
    assert all(x.shape == y.shape for x, y in zip(gradients[0], (a, b, bias), strict=False))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_have_the_dtypes_of_inputs(dtype, rng):
    a, b = (torch.randn(2, 7, 7, generator=rng).to(dtype).requires_grad_() for _ in range(2))
    bias = torch.randn(7, generator=rng).requires_grad_()
    jitfmha.matmul(a, b[0], bias=bias, out_dtype=torch.float32).sum().backward()
    assert (a.grad.dtype, b.grad.dtype, bias.grad.dtype) == (dtype, dtype, torch.float32)
    torch.testing.assert_close(bias.grad, torch.full((7,), 14.0))


def test_compiled(rng, quick_inductor):
    a, b, bias = (torch.randn(6, 6, generator=rng).requires_grad_() for _ in range(3))

    def loss(a, b, bias):
        return jitfmha.matmul(a, b, bias=bias[:1], activation="silu").square().sum()

    expected = torch.autograd.grad(loss(a, b, bias), (a, b, bias))
    actual = torch.autograd.grad(torch.compile(loss, fullgraph=True)(a, b, bias), (a, b, bias))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, None), (None, 2, None), (None, None, 0)])
def test_mapped(dims, rng):
    call = (matrix(rng, shape, torch.float32) for shape in ((4, 5, 6), (4, 6, 7), (4, 7)))
    a, b, bias = (x if at is not None else x[0] for x, at in zip(call, dims, strict=True))
    a, b, bias = (
        x if not at else x.movedim(0, at) for x, at in zip((a, b, bias), dims, strict=True)
    )

    def ours(a, b, bias):
        return jitfmha.matmul(a, b, bias=bias, activation="relu")

    def theirs(a, b, bias):
        return (a @ b + bias).relu()

    torch.testing.assert_close(*(torch.vmap(f, in_dims=dims)(a, b, bias) for f in (ours, theirs)))
    weights = torch.randn(4, 5, 7, generator=rng)
    mapped = [
        torch.func.vmap(
            torch.func.grad(lambda a, b, c, w, f=f: (f(a, b, c) * w).sum()), (*dims, 0)
        )(a, b, bias, weights)
        for f in (ours, theirs)
    ]
    torch.testing.assert_close(*mapped)


def test_operator(rng):
    a, b, bias = (numbers(rng, size, torch.float32) for size in ((2, 5, 7), (7, 6), (6,)))
    scale = torch.rand(5, 1, generator=rng)
    leaves = (x.requires_grad_() for x in (a, b, bias))
    given = (*leaves, scale, None, None, torch.float32)
    torch.library.opcheck(torch.ops.jitfmha.matmul.default, given)


def test_autocast(rng):
    a, b = torch.randn(2, 9, 9, generator=rng)
    with torch.autocast("cpu", torch.bfloat16):
        out = jitfmha.matmul(a, b.bfloat16())
        eight_bits = jitfmha.matmul(a.to(torch.int8), b.to(torch.int8))
    assert (out.dtype, eight_bits.dtype) == (torch.bfloat16, torch.int32)
    check(out, MatmulArguments(a.bfloat16(), b.bfloat16()))


def test_flops_are_those_of_torch(rng):
    a, b = (torch.randn(3, 4, 4, generator=rng).requires_grad_() for _ in range(2))
    counts = []
    for function in (jitfmha.matmul, torch.matmul):
        with FlopCounterMode(display=False) as counter:
            function(a, b).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_products_of_aiter(dtype, rng):
    x, weight = numbers(rng, (5, 16), dtype), numbers(rng, (7, 16), dtype)
    scale_x, scale_w, bias = (torch.rand(n, 1, generator=rng) for n in (5, 7, 7))
    call = MatmulArguments(x, weight.mT, bias[:, 0], scale_x, scale_w.mT, None, torch.float16)
    check(jitfmha.aiter.gemm_a8w8(x, weight, scale_x, scale_w, bias.mT, torch.float16), call)
    x, weight = x.half(), weight.half()
    out = jitfmha.aiter.gemm_a16w16(x[None], weight, bias[:, 0], torch.float32, scale_x, scale_w)
    check(out[0], call._replace(a=x, b=weight.mT, out_dtype=torch.float32))
    out = jitfmha.aiter.gemm_a16w16(x[:4].view(2, 2, 16), weight, None, torch.float32, scale_x[:4])
    assert torch.equal(
        out.flatten(0, 1),
        jitfmha.matmul(x[:4], weight.mT, scale_a=scale_x[:4], out_dtype=torch.float32),
    )
    weight.is_shuffled = True
    for options, text in (({}, "B.is_shuffled is True"), ({"scale_c": bias}, "scale_c")):
        with pytest.raises(NotImplementedError, match=text):
            jitfmha.aiter.gemm_a16w16(x, weight, **options)
    wrong: Any  # what does not fit
    for wrong, text in ((None, "B must be"), (weight[0], r"B is .*; expected .* and \(n, k\)")):
        with pytest.raises((TypeError, ValueError), match=text):
            jitfmha.aiter.gemm_a16w16(x, wrong)
    wrong = 2.0
    with pytest.raises(TypeError, match="w_scale must be"):
        jitfmha.aiter.gemm_a8w8(x, x, None, wrong)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"A": 1}, "A must be a torch.Tensor"),
        ({"A": torch.ones(2, 4)}, r"A is .* B is a torch.float32 tensor of shape \(4, 3\)"),
        ({"A": torch.ones(2, 3).long()}, "A has dtype torch.int64"),
        ({"B": torch.ones(4, 3).half()}, "B has dtype torch.float16, A has torch.float32"),
        ({"otype": torch.int32}, "otype is torch.int32; a product of torch.float32"),
        ({"scale_a": torch.ones(3)}, "scale_a is .*expected one number or 2"),
        ({"scale_b": torch.ones(4).half()}, "scale_b has dtype torch.float16"),
    ],
)
def test_errors_of_aiters_products_name_its_arguments(changes, text):
    arguments: dict[str, Any] = {"A": torch.ones(2, 3), "B": torch.ones(4, 3)} | changes
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
        jitfmha.aiter.gemm_a16w16(**arguments)
    names = {"A": "XQ", "B": "WQ", "scale_a": "x_scale", "scale_b": "w_scale", "otype": "dtype"}
    arguments = {"scale_a": None, "scale_b": None, "otype": torch.float32} | arguments
    text = re.sub("|".join(names), lambda name: names[name[0]], text)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
        jitfmha.aiter.gemm_a8w8(**{names[name]: x for name, x in arguments.items()})


def test_the_suite_holds_its_ratios_against_bars(monkeypatch):
    monkeypatch.setattr(gemm, "_QUICK_SHAPES", ((3, 5, 7), (17, 24, 32)))
    report = gemm.run(True, lambda text: None)
    assert [row.bar for row in report.rows] == [0.95] * 4
    assert len(report.figures) == 8


A = torch.zeros(3, 8)
INT8 = {
    "a": torch.zeros(8, 8).char(),
    "b": torch.zeros(8, 8).char(),
    "out_dtype": torch.int32,
}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"a": "rows"}, TypeError, "a must be a torch.Tensor, got str"),
        ({"a": A.double()}, NotImplementedError, "a has dtype torch.float64"),
        ({"b": A.mT.half()}, ValueError, "b has dtype torch.float16, a has torch.float32"),
        ({"b": A}, ValueError, r"a has shape \(3, 8\) and b \(3, 8\);.*8 is not 3"),
        ({"b": A[0]}, ValueError, r"b has shape \(8,\)"),
        ({"b": A.mT.to("meta")}, ValueError, "b is on meta"),
        ({"a": A.expand(2, 3, 8), "b": A.mT.expand(3, 8, 3)}, ValueError, "before the last two"),
        ({"out_dtype": torch.float16}, NotImplementedError, "out_dtype is torch.float16"),
        ({"activation": 3}, ValueError, "activation is 3; choose None"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'; choose None or one of relu"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \(4,\)"),
        ({"bias": torch.zeros(3).half()}, ValueError, "bias has dtype torch.float16"),
        ({"scale_a": torch.zeros(2)}, ValueError, r"scale_a has shape \(2,\).*\(3, 1\)"),
        ({"scale_b": torch.zeros(1).double()}, ValueError, "scale_b has dtype torch.float64"),
        (INT8 | {"activation": "relu"}, NotImplementedError, "out_dtype is torch.int32; integers"),
    ],
)
def test_refusals_name_the_argument_and_its_value(options, error, text):
    for function in (jitfmha.matmul, jitfmha.explain_matmul):
        # What nothing serves is explained.
        if function is jitfmha.matmul or error is not NotImplementedError:
            with pytest.raises(error, match=text):
                function(**{"a": A, "b": A.mT, **options})


def test_missing_gradients_are_refused():
    fp8 = torch.zeros(8, 8).to(torch.float8_e4m3fn).requires_grad_()
    leaf = A.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"products of torch\.float8_e4m3fn have no"):
        jitfmha.matmul(fp8, fp8)
    with pytest.raises(NotImplementedError, match="scale_a requires grad"):
        jitfmha.matmul(A, A.mT, scale_a=torch.ones(1).requires_grad_())
    with pytest.raises(NotImplementedError, match="activation is 'relu'"):
        torch.ops.jitfmha.matmul(leaf, A.mT, None, None, None, "relu", None)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"shape \(3, 8\) carries a forward-mode"),
    ):
        jitfmha.matmul(forward_ad.make_dual(A, A), A.mT)


def test_products_of_integers_lie_where_their_matrices_do(rng):
    """Whatever the default device is."""
    shapes = (2, 3, 4), (4, 5)
    a, b = (torch.randint(-9, 9, shape, generator=rng).to(torch.int8) for shape in shapes)
    expected = (a.int() @ b.int()).float()
    with torch.device("meta"):
        out = jitfmha.matmul(a, b, out_dtype=torch.float32, scale_a=expected.new_ones(1))
    assert torch.equal(out, expected)
