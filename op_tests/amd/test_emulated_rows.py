"""softmax, rms_norm and layer_norm on emulated GPUs, under the sanitizer, against float64."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from compiled_calls import assert_nothing_is_spilled
from drawn_rows import RowCall, draw, draw_like, drawn_index
from norm_reference import check, forward
from test_rows import check_call, check_rows_not_finite
from test_rows_gradients import check_gradients

import jitfmha
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.dtypes import DTYPE_BYTES
from jitfmha.rows import amd
from jitfmha.rows.amd import RowKernel
from jitfmha.rows.problem import KINDS, RowTraits

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
AN_ARCH = pytest.mark.sample("arch", [*FP8], 1, shared_by="rows on emulated GPUs")


def draw_units(rng, monkeypatch):
    """So many that each row has one to itself, or so few that hardly any has."""
    monkeypatch.setattr(TARGET_HERE.get(), "compute_units", (2, 1000)[drawn_index(rng, 2)])


@AN_ARCH
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_calls(kind, arch, dtypes, rng, poisoned_memory, monkeypatch):
    for dtype in dtypes:
        call = draw(rng, kind, dtype)
        quantised = (torch.int8, FP8[arch])[drawn_index(rng, 2)]
        with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
            draw_units(rng, monkeypatch)
            for _ in range(3):
                check_call(draw_like(rng, call), [quantised])
            assert not run.findings()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_longest_rows(dtype, rng, poisoned_memory):
    x, weight = torch.randn(1, 131072, generator=rng).to(dtype), torch.randn(131072, generator=rng)
    expected, off = forward("layer_norm", x, weight, weight, 1e-5)
    with jitfmha.emulate("gfx942", check=True) as run:
        check(jitfmha.layer_norm(x, weight, weight), expected, off, dtype)
        assert not run.findings()


@pytest.fixture
def few_threads(monkeypatch):
    """So few that rows of some thousand numbers have several workgroups."""
    monkeypatch.setattr(amd, "_MOST_THREADS", 256)
    monkeypatch.setattr(amd, "_LEAST_THREADS", 64)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_workgroups(kind, rng, few_threads, poisoned_memory, monkeypatch):
    """Also where the last one has a part of a load, and rows lie at no multiple of 4 bytes."""
    columns = (8193, 9004, 10242)[drawn_index(rng, 3)]
    dtype = (torch.float32, torch.bfloat16, torch.float16)[drawn_index(rng, 3)]
    arch = ("gfx942", "gfx950")[drawn_index(rng, 2)]
    call = draw(rng, kind, dtype, columns=columns, batch=(2 + drawn_index(rng, 5),))
    # Means that are not 0, so that it matters of how many numbers they are.
    call = call._replace(x=call.x + 5)
    with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
        draw_units(rng, monkeypatch)
        check_call(call, [(torch.int8, FP8[arch])[drawn_index(rng, 2)]])
        check_gradients(rng, call)
        assert not run.findings()


def test_a_softmax_whose_first_workgroup_has_no_number(rng, few_threads, poisoned_memory):
    """Also one that has none anywhere, and one with an infinite one."""
    x = torch.randn(4, 9000, generator=rng)
    x[:3, :4100] = -torch.inf
    x[1] = -torch.inf
    x[2, 5000] = torch.inf
    with jitfmha.emulate("gfx950", check=True) as run:
        out = jitfmha.softmax(x)
        assert not run.findings()
    torch.testing.assert_close(out, torch.softmax(x, -1), equal_nan=True)


def test_rows_of_eight_bits_that_are_not_finite(rng, few_threads, poisoned_memory):
    """Of a thread, of several, and of several workgroups."""
    arch = ("gfx942", "gfx950")[drawn_index(rng, 2)]
    dtype = (torch.float32, torch.bfloat16, torch.float16)[drawn_index(rng, 3)]
    norm = ("rms_norm", "layer_norm")[drawn_index(rng, 2)]
    with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
        for kind, columns, out_dtype in (
            *(("softmax", 34, torch.int8), ("softmax", 9001, torch.int8), (norm, 1, torch.int8)),
            *((norm, 34, torch.int8), (norm, 9001, torch.int8), (norm, 1000, FP8[arch])),
        ):
            check_rows_not_finite(rng, kind, dtype, columns, out_dtype)
        assert not run.findings()


@pytest.mark.parametrize("columns", [1, 4, 8, 64, 257])
def test_many_short_rows(columns, rng, poisoned_memory):
    """Several of which a workgroup has, and the last one fewer."""
    x = torch.randn(531, columns, generator=rng).bfloat16()
    expected, off = forward("softmax", x, None, None, 0)
    with jitfmha.emulate("gfx950", check=True) as run:
        check(jitfmha.softmax(x), expected, off, x.dtype)
        assert not run.findings()


@pytest.mark.parametrize(
    ("kind", "columns"), [("rms_norm", 16), ("rms_norm", 4000), ("softmax", 4000)]
)
def test_blocks_of_quantised_rows(kind, columns, rng, poisoned_memory, monkeypatch):
    """Of which a workgroup has some, at once and one after the other."""
    x, residual = torch.randn(2, 150, columns, generator=rng).bfloat16()
    weight = torch.randn(columns, generator=rng) if kind == "rms_norm" else None
    call = RowCall(kind, x, residual, weight, None, 1e-6)
    with jitfmha.emulate("gfx950", check=True, random_order=drawn_index(rng, 100)) as run:
        monkeypatch.setattr(TARGET_HERE.get(), "compute_units", 2)
        check_call(call, [torch.int8])
        assert not run.findings()


def test_quantised_rows_of_which_a_unit_has_one(rng, poisoned_memory, monkeypatch):
    """There are more of them than units, each of a workgroup, in which registers have no room."""
    x, weight, bias = torch.randn(5, 40960, generator=rng).bfloat16().split([3, 1, 1])
    with jitfmha.emulate("gfx942", check=True, random_order=drawn_index(rng, 100)) as run:
        monkeypatch.setattr(TARGET_HERE.get(), "compute_units", 2)
        call = RowCall("layer_norm", x + 5, None, weight[0], bias[0], 1e-6)
        check_call(call, [torch.int8])
        assert not run.findings()


@pytest.mark.parametrize("columns", [33, 34, 100])
def test_rows_that_are_no_whole_loads(columns, rng, poisoned_memory, monkeypatch):
    """The last load of a row begins within the one before, also of weights that take two.

    Odd rows of 16 bits are loaded number by number.
    """
    x = torch.randn(7, columns, generator=rng).half()
    call = RowCall("rms_norm", x, x.flip(0), torch.randn(columns, generator=rng), None, 1e-6)
    with jitfmha.emulate("gfx942", check=True) as run:
        check_gradients(rng, call)
        draw_units(rng, monkeypatch)
        check_call(call)
        assert not run.findings()


@AN_ARCH
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_gradients(kind, arch, dtypes, rng, poisoned_memory):
    for dtype in dtypes:
        call = draw(rng, kind, dtype)
        with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
            for _ in range(3):
                check_gradients(rng, draw_like(rng, call))
            assert not run.findings()


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        *(("layer_norm", 1400, 24), ("rms_norm", 70, 300)),
        *(("rms_norm", 30, 9001), ("layer_norm", 35, 20000)),
    ],
)
def test_gradients_of_weights_over_several_blocks(kind, rows, columns, rng, poisoned_memory):
    """Of a workgroup's rows side by side, of several waves', and of what registers do not hold."""
    call = draw(rng, kind, torch.float32, columns=columns, batch=(rows,))
    weight, bias = torch.randn(2, columns, generator=rng)
    bias = bias if kind == "layer_norm" else None
    with jitfmha.emulate("gfx942", check=True, random_order=drawn_index(rng, 100)) as run:
        check_gradients(rng, call._replace(weight=weight, bias=bias))
        assert not run.findings()


def test_gradients_by_torch(rng):
    x, weight = torch.randn(5, 40, generator=rng), torch.randn(40, generator=rng)
    results = []
    for on_gpu in (False, True):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with jitfmha.emulate("gfx950") if on_gpu else nullcontext():
            jitfmha.rms_norm(*leaves).sin().sum().backward()
        results.append([each.grad for each in leaves])
    torch.testing.assert_close(*results)


def test_rows_far_from_each_other(rng):
    """Further than a buffer reaches from the first row of a workgroup to its last one."""
    values = torch.randn(40, 4, generator=rng)
    rows = torch.empty_strided(values.shape, (1 << 25, 1)).copy_(values)
    expected, off = forward("rms_norm", rows, None, None, 1e-6)
    with jitfmha.emulate("gfx942", check=True) as run:
        check(jitfmha.rms_norm(rows), expected, off, rows.dtype)
        assert not run.findings()


def test_the_other_form_of_fp8_is_refused():
    with (
        jitfmha.emulate("gfx942"),
        pytest.raises(NotImplementedError, match=r"is fp8_e4m3fn;.*fp8_e4m3fnuz and int8"),
    ):
        jitfmha.softmax(torch.zeros(2, 8), out_dtype=torch.float8_e4m3fn)


GRADIENTS = [
    RowTraits(kind, dtype, weight_dtype, dtype, *has, has_residual)
    for kind, *has in (
        *(("softmax", False, False), ("rms_norm", True, False)),
        *(("layer_norm", True, False), ("layer_norm", False, True), ("layer_norm", True, True)),
    )
    for dtype in ("bf16", "fp16", "fp32")
    for weight_dtype in dict.fromkeys((dtype, "fp32") if any(has) else (dtype,))
    for has_residual in (False, True)
]
OF_NO_WHOLE_LOADS = RowTraits("rms_norm", "fp16", "fp32", "fp16", True, False, True)
# Two sums, and a residual beside what several loads bring.
HOLD_MOST = [
    RowTraits("layer_norm", "bf16", name, "bf16", *(True,) * 3) for name in ("bf16", "fp32")
]
SOFTMAX_OF_FLOATS = [
    RowTraits("softmax", "fp32", "fp32", "fp32", False, False, has) for has in (False, True)
]


@pytest.mark.sample(
    ("traits", "arch", "columns"),
    list(product(GRADIENTS, FP8, (34, 300, 9002))),
    0,
    always=[(OF_NO_WHOLE_LOADS, "gfx942", columns) for columns in (34, 100)],
)
def test_no_gradient_spills(traits, arch, columns):
    """Nor those of `test_rows_that_are_no_whole_loads`, which are built anyway."""
    width = amd.LOAD_BYTES // DTYPE_BYTES[traits.dtype]
    kernel = RowKernel.of(traits, "backward", arch, columns, width, is_alone=False)
    assert_nothing_is_spilled(amd.kernel_spec(kernel), kernel.name, kernel.combine_name)


@pytest.mark.sample(
    ("traits", "arch", "columns"),
    [*product(HOLD_MOST, FP8, (16384, 131072)), *product(SOFTMAX_OF_FLOATS, FP8, (16384, 20480))],
    1,
    always=[(HOLD_MOST[0], "gfx942", 16384)],
)
def test_no_gradient_of_long_rows_spills(traits, arch, columns):
    test_no_gradient_spills(traits, arch, columns)


def test_threads_of_a_row():
    traits = RowTraits("softmax", "bf16", "bf16", "bf16", *(False,) * 3)
    for columns, expected in (
        *((8, (1, 64, 1)), (32, (1, 64, 4)), (1024, (32, 64, 4)), (2048, (64, 64, 4))),
        *((8192, (256, 256, 4)), (32768, (1024, 1024, 4)), (131072, (1024, 1024, 4))),
    ):
        kernel = RowKernel.of(traits, "forward", "gfx942", columns, 8, is_alone=False)
        assert (kernel.row_lanes, kernel.threads, kernel.held) == expected
    alone = RowKernel.of(traits, "forward", "gfx942", 1024, 8, is_alone=True)
    assert (alone.row_lanes, alone.threads, alone.held) == (128, 128, 1)
    # What has 8 bits is a workgroup's where there is room for a row alone; others are for two.
    for out, expected in (("int8", (1, 5, 0)), ("bf16", (2, 3, 0))):
        norm = RowTraits("layer_norm", "bf16", "bf16", out, True, True, False)
        kernel = RowKernel.of(norm, "forward", "gfx942", 40960, 8, is_alone=False)
        assert (kernel.shares, kernel.held, kernel.of_unit) == expected
    # Gradients hold four loads of floats, which are their own sums.
    backward = RowKernel.of(SOFTMAX_OF_FLOATS[0], "backward", "gfx942", 16384, 4, is_alone=False)
    assert (backward.shares, backward.held) == (1, 4)
    # A unit reads for two where its lanes have work, or little to compute.
    for arch, dtype, columns, units in (
        *(("gfx942", "bf16", 8192, 2), ("gfx942", "bf16", 5120, 1), ("gfx942", "fp32", 5120, 2)),
        *(("gfx950", "bf16", 8192, 1), ("gfx950", "fp32", 8192, 2)),
    ):
        norm = RowTraits("layer_norm", dtype, dtype, dtype, True, True, False)
        width = amd.LOAD_BYTES // DTYPE_BYTES[dtype]
        kernel = RowKernel.of(norm, "backward", arch, columns, width, is_alone=False)
        assert kernel.units_of_block == units
