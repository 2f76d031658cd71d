"""fp8 and bf8 inputs on the CPU: every code, scales in all their shapes, and refusals."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from closeness import assert_close
from descaled_calls import QkvScales, random_scales, scaled
from fresh_calls import fresh_calls
from inputs import LAYOUTS, SIZES, lay_out, prefix_sums, random_qkv
from packed_calls import RAGGED, packed
from refusals import refused
from score_features import FEATURES, Shape
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha.aiter import flash_attn_fp8_pertensor_func, flash_attn_varlen_fp8_pertensor_func
from jitfmha.planning.target import cpu_isas_here
from jitfmha.problem.float64_reference import Result, attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "bf8_e5m2": torch.float8_e5m2,
    "bf8_e5m2fnuz": torch.float8_e5m2fnuz,
}
# One pair serves all tests: each is whole vectors and a rest in every instruction set.
HDIM, HDIM_V = 37, 21
fp8_scales = partial(random_scales, size=1.0)
SCALES = ("q_descale", "k_descale", "v_descale")
# test_elements.py has the conversion in every instruction set, which needs no whole kernel.
DRAWN_DTYPE = pytest.mark.sample("dtype", list(DTYPES), 1, shared_by="fp8")
DRAWN_ISA = pytest.mark.sample("an_isa", list(cpu_isas_here()), 1, shared_by="fp8")


def inputs(rng: torch.Generator, dtype: str, *sizes: Any, **named: int) -> Any:
    return random_qkv(rng, *sizes, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype], **named)


def check(
    actual: Result,
    expected: Result,
    tensors: tuple[Tensor, Tensor, Tensor],
    scales: QkvScales,
    **bounds: float,
) -> None:
    assert_close(actual, expected, *scaled(tensors, scales), dtype=torch.bfloat16, **bounds)


@DRAWN_DTYPE
@DRAWN_ISA
def test_every_code(an_isa, dtype):
    """As torch converts it: as a value it comes out, as a key or a query it is the score."""
    with fresh_calls(an_isa):
        check_every_code(dtype)


def check_every_code(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    # An infinity has no place in a softmax; test_elements.py has it.
    codes[codes.view(DTYPES[dtype]).float().isinf()] = 0
    numbers = codes.view(DTYPES[dtype]).float()
    assert numbers.isnan().sum() == {"fp8_e4m3fn": 2, "bf8_e5m2": 6}.get(dtype, 1)
    values = torch.zeros(13 * HDIM_V, dtype=torch.uint8)
    values[:256] = codes
    v = values.view(DTYPES[dtype]).view(1, 1, 13, HDIM_V)
    ones = torch.zeros(1, 1, 256, HDIM)
    ones[..., 0] = 1
    coded = torch.zeros(1, 1, 256, HDIM)
    coded[..., 0] = numbers
    first, second = ones.to(DTYPES[dtype]), coded.to(DTYPES[dtype])
    any_v = torch.zeros(1, 1, 256, HDIM_V).to(DTYPES[dtype])
    for seqlen_q in (1, 40):
        q, k = (torch.zeros(1, n, 13, HDIM).to(DTYPES[dtype]) for n in (seqlen_q, 1))
        out = fmha_fwd(q, k, v)
        torch.testing.assert_close(out, v.bfloat16().expand_as(out), atol=0, rtol=0, equal_nan=True)
        for q, k in ((first, second), (second, first)):
            _, lse = fmha_fwd(
                *(q.expand(1, seqlen_q, 256, HDIM), k, any_v), softmax_scale=1.0, return_lse=True
            )
            expected = numbers[:, None].expand(256, seqlen_q)
            torch.testing.assert_close(lse[0], expected, atol=0, rtol=0, equal_nan=True)


@DRAWN_DTYPE
@DRAWN_ISA
def test_batch_mode(rng, an_isa, dtype):
    for sizes in SIZES:
        tensors = inputs(rng, dtype, sizes)
        with fresh_calls(an_isa):
            actual = fmha_fwd(*tensors, return_lse=True)
        check(actual, attention(*tensors), tensors, {})


@DRAWN_DTYPE
@pytest.mark.parametrize("form", ["one", "each sequence and key head", "each head"])
def test_scales(rng, dtype, form):
    for sizes in SIZES:
        tensors = inputs(rng, dtype, sizes)
        scales = fp8_scales(rng, form, *sizes[2:])
        actual = fmha_fwd(*tensors, mask="causal", return_lse=True, **scales)
        expected = attention(*tensors, mask="causal", **scales)
        check(actual, expected, tensors, scales)


@DRAWN_DTYPE
def test_one_scale_at_a_time(rng, dtype):
    """Those that are not given are 1; one of 0 makes scores, or the output, 0."""
    tensors = inputs(rng, dtype, heads_q=4, heads_k=2, seqlen_q=150)
    for name in SCALES:
        for scale in (torch.rand(2, 2, generator=rng), torch.zeros(1), torch.zeros(2, 2)):
            actual = fmha_fwd(*tensors, mask="causal", return_lse=True, **{name: scale})
            expected = attention(*tensors, mask="causal", **{name: scale})
            check(actual, expected, tensors, {name: scale})


@DRAWN_DTYPE
def test_group_mode(rng, dtype):
    call = packed(rng, *RAGGED, hdim=HDIM, hdim_v=HDIM_V, dtype=DTYPES[dtype])
    for form in ("one", "each sequence and key head"):
        scales = fp8_scales(rng, form, 4, 2, batch=6)
        options = {"mask": "causal", **scales}
        check(call.call(**options), call.expected(**options), call.qkv, scales)


@DRAWN_DTYPE
def test_with_all_features(rng, dtype):
    """Soft cap, bias and ALiBi come after the scales; a bias has the output's dtype."""
    for sizes in ((1, 300, 4, 2), (70, 131, 4, 2)):
        tensors = inputs(rng, dtype, sizes)
        seqlen_q, seqlen_k, heads_q, heads_k = sizes
        shape = Shape(2, heads_q, seqlen_q, seqlen_k, torch.bfloat16, rng)
        options: dict[str, Any] = FEATURES["everything"](shape)
        options["bias"] = options["bias"].bfloat16()
        scales = fp8_scales(rng, "each head", heads_q, heads_k)
        actual = fmha_fwd(*tensors, return_lse=True, **options, **scales)
        expected = attention(*tensors, **options, **scales)
        check(*(actual, expected, tensors, scales), dropout_p=options["dropout_p"])


@DRAWN_DTYPE
@DRAWN_ISA
def test_layouts(rng, an_isa, dtype):
    """Of inputs and of the output, which is bf16; what lies between the elements is NaN."""
    q, k, v = inputs(rng, dtype, seqlen_q=70)
    for layout in LAYOUTS:
        out = lay_out(torch.zeros(2, 70, 2, HDIM_V, dtype=torch.bfloat16), layout)
        tensors = [lay_out(x.float(), layout) for x in (q, k, v)]
        laid_out = [
            torch.empty_strided(x.shape, x.stride(), dtype=DTYPES[dtype]).copy_(x) for x in tensors
        ]
        with fresh_calls(an_isa):
            assert torch.equal(fmha_fwd(*laid_out, out=out), fmha_fwd(q, k, v))


@DRAWN_DTYPE
@DRAWN_ISA
def test_outputs_that_are_not_bf16(rng, an_isa, dtype):
    """They are what a bf16 output was rounded from: few rows, many, and keys that are split."""
    with fresh_calls(an_isa):
        for seqlen_q, num_splits in ((3, 0), (70, 0), (3, 4)):
            q, k, v = inputs(rng, dtype, seqlen_q=seqlen_q, seqlen_k=600)
            plain, wide, half = (
                fmha_fwd(
                    q,
                    k,
                    v,
                    out=torch.full(q.shape[:-1] + (HDIM_V,), 7, dtype=of_out),
                    num_splits=num_splits,
                )
                for of_out in (torch.bfloat16, torch.float32, torch.float16)
            )
            assert torch.equal(wide.bfloat16(), plain)
            assert torch.equal(wide.half(), half)
            assert not torch.equal(wide, plain.float())


@pytest.mark.parametrize(
    ("name", "scale", "error", "words"),
    [
        ("q_descale", 1.0, TypeError, ["q_descale", "float (1.0)"]),
        ("k_descale", torch.ones(1).double(), TypeError, ["k_descale", "float64"]),
        ("v_descale", torch.ones(()), ValueError, ["v_descale", "()", "(2,)", "(3, 2)"]),
        ("k_descale", torch.ones(4), ValueError, ["k_descale", "(4,)", "(2,)", "(3, 2)"]),
        ("q_descale", torch.ones(2), ValueError, ["q_descale", "(2,)", "(4,)", "(3, 2)"]),
        ("q_descale", torch.ones(3, 4), ValueError, ["q_descale", "(3, 4)", "(3, 2)"]),
        ("out", torch.zeros(3, 33, 4, HDIM_V).double(), TypeError, ["out", "float64", "float32"]),
        ("v_descale", torch.ones(1, device="meta"), ValueError, ["v_descale is on meta"]),
    ],
)
def test_errors(rng, name, scale, error, words):
    tensors = inputs(rng, "fp8_e4m3fnuz", batch=3, heads_q=4, heads_k=2)
    for function in (fmha_fwd, explain):
        with refused(error, *words):
            function(*tensors, **{name: scale})


def test_two_formats_in_one_call(rng):
    for first, second in itertools.permutations(DTYPES, 2):
        ours, others = inputs(rng, first), inputs(rng, second)
        with refused(TypeError, f"k has dtype {DTYPES[second]}, q has {DTYPES[first]}"):
            fmha_fwd(ours[0], others[1], ours[2])


@DRAWN_DTYPE
def test_under_torch_compile(rng, dtype):
    tensors = inputs(rng, dtype, heads_q=4, heads_k=2)
    scales = fp8_scales(rng, "each head", 4, 2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor, scales: QkvScales) -> Any:
        return fmha_fwd(q, k, v, mask="causal", **scales)

    assert torch.equal(compiled(*tensors, scales), fmha_fwd(*tensors, mask="causal", **scales))


@DRAWN_DTYPE
def test_scales_belong_to_the_call(rng, dtype):
    """Calls that differ in the shape, the strides or the values of a scale alone."""
    tensors = inputs(rng, dtype, heads_q=2)
    wide = torch.rand(2, 2, 3, generator=rng)
    several = [wide[..., 0], wide[..., 1].contiguous(), wide[0, :, 2], wide[0, :1, 2]]
    for _, scale in itertools.product(range(2), several):
        actual = fmha_fwd(*tensors, mask="causal", return_lse=True, k_descale=scale)
        expected = attention(*tensors, mask="causal", k_descale=scale)
        check(actual, expected, tensors, {"k_descale": scale})


# ---- AITER's functions ---------------------------------------------------------------------------


@DRAWN_DTYPE
def test_functions_of_aiter(rng, dtype):
    tensors = inputs(rng, dtype, heads_q=4, heads_k=2, seqlen_q=40)
    scales = fp8_scales(rng, "each sequence and key head", 4, 2)
    sink = torch.randn(4, generator=rng)
    out = flash_attn_fp8_pertensor_func(
        *(*tensors, *scales.values(), True, (30, -1)), softmax_scale=0.3, sink_ptr=sink
    )
    options: dict[str, Any] = {"mask": "causal", "window_size": (30, -1), "softmax_scale": 0.3}
    assert torch.equal(out, fmha_fwd(*tensors, **scales, **options, sink=sink))
    packed = [x.flatten(0, 1) for x in tensors]
    cu_q, cu_k = prefix_sums([40, 40]), prefix_sums([49, 49])
    of_packed = flash_attn_varlen_fp8_pertensor_func(
        *(*packed, *scales.values(), cu_q, cu_k, 40, 49),
        causal=True,
        window_size=(30, -1),
        softmax_scale=0.3,
        sink_ptr=sink,
    )
    assert torch.equal(of_packed.unflatten(0, (2, 40)), out)
