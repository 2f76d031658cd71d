"""softmax, rms_norm and layer_norm against float64, on the CPU and on emulated GPUs."""

import functools
from collections.abc import Iterable

import pytest
import torch
from drawn_rows import RowCall, draw, draw_like, drawn_index, own_kernels  # noqa: F401
from inputs import DTYPES
from norm_reference import LARGEST, check, check_not_finite, check_quantised, forward
from torch import Tensor

import jitfmha
from jitfmha.bench import rows
from jitfmha.call import known_calls
from jitfmha.planning.target import CallCache
from jitfmha.rows import interface
from jitfmha.rows.ops import rows_bwd
from jitfmha.rows.problem import KINDS, Kind, RowBackwardArguments


def result_of(call: RowCall, x: Tensor, **options: object) -> tuple[Tensor, ...]:
    out = getattr(jitfmha, call.kind)(x, **call.options, **options)
    return (out,) if isinstance(out, Tensor) else out


def check_call(call: RowCall, eight_bits: Iterable[torch.dtype] = ()) -> None:
    """A call, and the same with results of dtypes of 8 bits."""
    x = call.x if call.residual is None else call.x + call.residual
    expected, off = forward(call.kind, x, call.weight, call.bias, call.eps)
    out, *sums = result_of(call, call.x)
    check(out, expected, off, call.x.dtype)
    for dtype in eight_bits:
        *others, scale = quantised = result_of(call, call.x, out_dtype=dtype)
        assert others[0].dtype == dtype
        check_quantised(quantised[0], scale, expected, off)
        sums += others[1:]
    assert bool(sums) == (call.residual is not None)
    for each in sums:
        torch.testing.assert_close(each, x, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls(kind, isa, dtypes, rng, poisoned_memory):
    """Of a kernel, and of one with results of 8 bits."""
    for dtype in dtypes:
        call, quantised = draw(rng, kind, dtype), list(LARGEST)[drawn_index(rng, len(LARGEST))]
        for _ in range(6):
            check_call(draw_like(rng, call), [quantised])


A_DTYPE = pytest.mark.sample("dtype", list(DTYPES.values()), 1, shared_by="rows")
A_KIND = pytest.mark.sample("kind", KINDS, 1, shared_by="rows")


@A_DTYPE
@pytest.mark.parametrize("quantised", LARGEST)
def test_eight_bits(quantised, dtype, rng, poisoned_memory):
    x, weight = torch.randn(40, 129, generator=rng).to(dtype), torch.ones(129)
    check_call(RowCall("rms_norm", x, None, weight, None, 1e-6), [quantised])


@A_KIND
def test_the_most_columns(kind, dtypes, rng, poisoned_memory):
    for dtype in dtypes:
        check_call(draw(rng, kind, dtype, columns=131072, batch=(2,)))


@A_KIND
def test_many_rows(kind, dtypes, rng, poisoned_memory, num_threads):
    """Which several threads have, and whose results go past the caches where one has them all."""
    for dtype in dtypes:
        call = draw(rng, kind, dtype, columns=1001, batch=(9001,))
        x = call.x if call.residual is None else call.x + call.residual
        expected, off = forward(kind, x, call.weight, call.bias, call.eps)
        torch.set_num_threads(3)
        out, *sums = result_of(call, call.x)
        check(out, expected, off, dtype)
        torch.set_num_threads(1)
        again, *sums_again = result_of(call, call.x)
        assert torch.equal(again, out)
        assert all(torch.equal(each, x) for each in (*sums, *sums_again))


@A_DTYPE
def test_numbers_that_are_not_finite(dtype):
    """Rows with them are what torch's are, and others are not affected."""
    x = torch.randn(5, 70).to(dtype)
    x[0, 3], x[1, 69], x[2, :], x[3, 5] = torch.inf, torch.nan, -torch.inf, -torch.inf
    torch.testing.assert_close(jitfmha.softmax(x), x.softmax(-1), equal_nan=True)
    normalised = torch.nn.functional.layer_norm(x, (70,))
    torch.testing.assert_close(jitfmha.layer_norm(x), normalised, equal_nan=True)


def check_rows_not_finite(
    rng: torch.Generator, kind: Kind, dtype: torch.dtype, columns: int, out_dtype: torch.dtype
) -> None:
    """Rows with NaN and infinities among others; and all rows, by a number of the weight's."""
    x, numbers = torch.randn(7, columns, generator=rng), torch.randn(columns, generator=rng)
    at = drawn_index(rng, columns)
    x[1, at], x[2, at], x[4, at], x[5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    x[3, at] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # NaN of any bits
    x = x.to(dtype)
    for number in (1.0,) if kind == "softmax" else (1.0, torch.nan, torch.inf):
        numbers[at] = number
        weight = None if kind == "softmax" else numbers
        expected, off = forward(kind, x, weight, None, 1e-5)
        out, scale = result_of(RowCall(kind, x, None, weight, None, 1e-5), x, out_dtype=out_dtype)
        check_not_finite(out, scale, expected)
        # Others of a row with NaN in fp8 are what they are without it.
        if columns > 1:
            rows, kept = scale.isfinite() & x.isfinite().all(-1), numbers.isfinite()
            out, expected, off = (each[rows][:, kept] for each in (out, expected, off))
            check_quantised(out, scale[rows], expected, off)


def test_rows_of_eight_bits_that_are_not_finite(isa, rng, poisoned_memory):
    kind, fp8 = KINDS[drawn_index(rng, len(KINDS))], list(LARGEST)[1 + drawn_index(rng, 2)]
    dtype = list(DTYPES.values())[drawn_index(rng, len(DTYPES))]
    for columns in (1, 17, 64, 1003):
        for out_dtype in (torch.int8, fp8):
            check_rows_not_finite(rng, kind, dtype, columns, out_dtype)


@A_DTYPE
@pytest.mark.parametrize("quantised", LARGEST)
def test_rows_of_zeros_are_zeros(quantised, dtype):
    x = torch.zeros(3, 40, dtype=dtype)
    out, scale = jitfmha.rms_norm(x, torch.ones(40), out_dtype=quantised)
    assert (out.float() == 0).all()
    assert scale.isfinite().all()


@pytest.mark.parametrize("first", [1e4, -1e6])
def test_a_first_number_far_from_the_mean(first, rng):
    x = torch.randn(4, 3000, generator=rng) + 100
    x[:, 0] = first
    expected, off = forward("layer_norm", x, None, None, 1e-5)
    check(jitfmha.layer_norm(x), expected, off, x.dtype)


@pytest.mark.parametrize("at", [0, 20])
def test_squares_that_overflow(at, rng):
    """Such a row becomes zeros, as torch's does where its first number is not the large one."""
    x = torch.randn(3, 40, generator=rng)
    x[1, at] = 3e38
    out = jitfmha.layer_norm(x)
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[::2], torch.nn.functional.layer_norm(x[::2], (40,)))
    arguments = RowBackwardArguments(x.sign(), None, x, None, None, "layer_norm", 1e-5, False)
    assert (rows_bwd.launch(arguments)[0][1] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone(kind, isa, rng):
    """Short rows are worked on together, also beside one whose first number is far away."""
    x = torch.randn(37, 24, generator=rng)
    x[5, 0] = 1e4
    function = getattr(jitfmha, kind)
    together = function(x)
    for i in range(37):
        assert torch.equal(function(x[i]), together[i])


def test_results_do_not_depend_on_threads(rng, num_threads):
    x, weight = torch.randn(300, 700, generator=rng), torch.randn(700, generator=rng)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(jitfmha.rms_norm(x, weight))
    assert all(torch.equal(each, results[0]) for each in results)


def test_the_suite_holds_its_ratios_against_bars(monkeypatch):
    monkeypatch.setattr(rows, "_QUICK_SHAPES", ((5, 33),))
    monkeypatch.setattr(rows, "_DTYPES", (torch.float32,))
    report = rows.run(True, lambda text: None)
    kinds = (*KINDS, *(f"{kind} with gradients" for kind in KINDS), "rms_norm of a sum")
    means, lowest = "geometric mean over torch's", "lowest over torch's"
    assert {row.what for row in report.rows} == {
        f"{k}: {s}" for k in kinds for s in (means, lowest)
    }
    assert {row.bar for row in report.rows} == {1.2, 0.95}
    assert len(report.figures) == len(kinds)


def test_calls_that_differ_in_one_argument(rng):
    """The second is not taken for the first, which is there."""
    x, weight = torch.randn(4, 4, generator=rng), torch.randn(4, generator=rng)
    first = {"x": x, "weight": weight, "eps": 1e-5}
    for changed in (
        *({"eps": 0.5}, {"weight": weight.bfloat16().float()}, {"weight": None}),
        *({"x": x.T}, {"x": x[:2]}, {"x": x.bfloat16(), "weight": None}),
    ):
        for given in (first, first | changed):
            expected, off = forward("rms_norm", given["x"], given["weight"], None, given["eps"])
            check(jitfmha.rms_norm(**given), expected, off, given["x"].dtype)


X = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        ("softmax", {"x": torch.zeros(2, 0)}, ValueError, r"\(2, 0\).*1 to 131072"),
        ("softmax", {"x": torch.zeros(1, 131073)}, ValueError, "131073"),
        ("softmax", {"x": torch.zeros(())}, ValueError, r"shape \(\)"),
        ("softmax", {"x": X.double()}, NotImplementedError, "float64"),
        ("softmax", {"x": "rows"}, TypeError, "x must be a torch.Tensor, got str"),
        ("softmax", {"residual": torch.zeros(3, 9)}, ValueError, r"residual.*\(3, 9\)"),
        ("softmax", {"residual": X.half()}, ValueError, "residual.*float16"),
        ("softmax", {"out_dtype": torch.float64}, NotImplementedError, "out_dtype.*float64"),
        ("rms_norm", {"out_dtype": torch.float8_e5m2}, NotImplementedError, "out_dtype.*e5m2"),
        ("rms_norm", {"weight": torch.zeros(7)}, ValueError, r"weight.*\(7,\)"),
        ("rms_norm", {"weight": torch.zeros(8).half()}, ValueError, "weight.*float16"),
        ("rms_norm", {"weight": torch.zeros(8, device="meta")}, ValueError, "weight is on meta"),
        ("rms_norm", {"eps": -1e-6}, ValueError, "eps is -1e-06"),
        ("rms_norm", {"eps": 3.5e38}, ValueError, r"eps is 3.5e\+38"),
        ("layer_norm", {"eps": 3.5e38}, ValueError, r"eps is 3.5e\+38"),
        ("rms_norm", {"eps": 10**400}, ValueError, "eps is 1000"),
        ("rms_norm", {"eps": "1"}, TypeError, "eps must be a number, got str"),
        ("layer_norm", {"bias": torch.zeros(8, 1)}, ValueError, r"bias.*\(8, 1\)"),
        ("layer_norm", {"epsilon": 1.0}, TypeError, "epsilon"),
    ],
)
def test_refusals_name_the_argument_and_its_value(kind, options, error, text):
    with pytest.raises(error, match=text):
        getattr(jitfmha, kind)(**{"x": X, **options})


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "qk_norm_rope_cache"])
def test_eps_that_equals_that_of_a_known_call(name):
    """A flag equals 1, which is an eps."""
    options = {"q_weight": X[0]} if name == "qk_norm_rope_cache" else {}
    function = functools.partial(getattr(jitfmha, name), X[None], **options)
    function(eps=1)
    with pytest.raises(TypeError, match=r"eps must be a number, got bool \(True\)"):
        function(eps=True)


@pytest.mark.parametrize("kind", ["softmax", "layer_norm"])
def test_small_calls_where_the_environment_emulates(kind, monkeypatch, rng):
    """They are torch's own on the CPU alone."""
    monkeypatch.setenv("JITFMHA_EMULATE", "gfx950")
    monkeypatch.setattr(known_calls, "CALLS_HERE", CallCache())
    monkeypatch.setattr(interface, "_is_cpu_here", interface._is_cpu_here.__wrapped__)
    monkeypatch.setattr(interface, "MOST_OF_TORCH", {torch.float32: 1 << 14})
    monkeypatch.setattr(interface, f"_{kind}_of_torch", lambda *_: pytest.fail("torch's own"))
    check_call(RowCall(kind, torch.randn(3, 64, generator=rng), None, None, None, 1e-5))
