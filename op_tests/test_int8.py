"""int8 inputs: of the first product, and of both. test_eight_bit_keys.py has keys alone."""

from functools import partial
from typing import Any

import pytest
import torch
from closeness import assert_close
from descaled_calls import (
    check_both_products,
    check_rounding_towards_zero,
    random_scales,
    scaled,
)
from fresh_calls import fresh_calls
from inputs import SIZES, random_qkv
from packed_calls import packed
from refusals import refused
from score_features import FEATURES, Shape
from torch import Tensor
from untyped import explain, fmha_fwd

from jitfmha.planning.target import cpu_isas_here
from jitfmha.problem.float64_reference import attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HDIM, HDIM_V = 37, 21
DRAWN_ISA = pytest.mark.sample("an_isa", list(cpu_isas_here()), 1, shared_by="int8")


def int8_inputs(rng: torch.Generator, *sizes: Any, **named: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers over the whole range, both ends included."""
    shapes = random_qkv(rng, *sizes, hdim=HDIM, hdim_v=HDIM_V, **named)
    q, k, v = (torch.randint(-128, 128, x.shape, generator=rng, dtype=torch.int8) for x in shapes)
    return q, k, v


@DRAWN_ISA
@pytest.mark.parametrize("form", ["one", "each sequence and key head"])
def test_first_product(rng, an_isa, form):
    for sizes in SIZES:
        tensors = int8_inputs(rng, sizes)
        scales = random_scales(rng, form, *sizes[2:])
        with fresh_calls(an_isa):
            actual = fmha_fwd(*tensors, mask="causal", return_lse=True, **scales)
        expected = attention(*tensors, mask="causal", **scales)
        assert_close(actual, expected, *scaled(tensors, scales), dtype=torch.bfloat16)


def test_dot_products_are_exact(rng):
    """The score of a single key is its lse; the largest one is 2**23."""
    for seqlen_q in (1, 40):
        q = torch.randint(-128, 128, (1, seqlen_q, 9, 512), generator=rng, dtype=torch.int8)
        k = torch.randint(-128, 128, (1, 1, 9, 512), generator=rng, dtype=torch.int8)
        q[:, :, 0], k[:, :, 0] = -128, -128
        v = torch.randint(-128, 128, (1, 1, 9, 8), generator=rng, dtype=torch.int8)
        out, lse = fmha_fwd(q, k, v, softmax_scale=1.0, return_lse=True)
        exact = torch.einsum("bihd,bjhd->bhi", q.long(), k.long())
        assert exact[0, 0, 0] == 2**23
        assert torch.equal(lse.double(), exact.double())
        assert torch.equal(out, v.bfloat16().expand_as(out))


# ---- Both products -------------------------------------------------------------------------------


@DRAWN_ISA
@pytest.mark.parametrize("form", ["one", "each sequence and key head", "each head"])
def test_both_products(rng, an_isa, form):
    for sizes in SIZES:
        _, seqlen_k, heads_q, heads_k = sizes
        tensors = int8_inputs(rng, sizes)
        # Scales for each query head are compiled apart; p_descale alone has all shapes here.
        of_inputs = "one" if form == "each head" else form
        scales = random_scales(rng, of_inputs, heads_q, heads_k)
        shape = {"one": (1,), "each head": (heads_q,)}.get(form, (2, heads_k))
        is_one_tile = seqlen_k <= 128
        # Below 1 / 127 the largest probabilities are cut, for which the bound has no room.
        others = torch.rand(shape, generator=rng) / 64 + (0.004 if is_one_tile else 0.008)
        for p_descale in (torch.full(shape, 1 / 127), others):
            scales["p_descale"] = p_descale
            with fresh_calls(an_isa):
                actual = fmha_fwd(*tensors, mask="causal", return_lse=True, **scales)
            check_both_products(actual, tensors, scales, is_one_tile, mask="causal")


def test_both_products_in_group_mode_with_all_features(rng):
    call = packed(rng, [1, 40, 0, 17], [70, 100, 4, 17], hdim=HDIM, hdim_v=HDIM_V)
    call.q, call.k, call.v = (x[0] for x in int8_inputs(rng, (58, 191, 4, 2), batch=1))
    shape = Shape(4, 4, 58, 100, torch.bfloat16, rng, is_group=True)
    options: dict[str, Any] = FEATURES["everything"](shape)
    options["bias"] = options["bias"].bfloat16()
    scales = random_scales(rng, "each head", 4, 2)
    options |= scales | {"p_descale": torch.full((4, 2), 1 / 127)}
    (out, _), (expected, _) = call.call(max_seqlen_k=100, **options), call.expected(**options)
    # A step here and there, of at most 1/127 of a row's largest probability.
    largest = scaled(call.qkv, scales)[2].abs().max() / (1 - options["dropout_p"])
    assert (out.double() - expected).abs().max() <= 0.06 * largest


def test_probabilities_are_rounded_towards_zero():
    options = {"mask": "b:9,9", "v_descale": torch.ones(1)}
    check_rounding_towards_zero((HDIM, HDIM_V), partial(fmha_fwd, **options))


# ---- Refusals ------------------------------------------------------------------------------------

INT8, BF16 = torch.int8, torch.bfloat16
ONE = torch.ones(1)
ERRORS: list[tuple[tuple[torch.dtype, ...], dict[str, object], type[Exception], list[str]]] = [
    ((INT8, BF16, BF16), {}, TypeError, ["k has dtype torch.bfloat16", "int8"]),
    ((BF16, INT8, BF16), {}, TypeError, ["v has dtype", "k has torch.int8"]),
    ((BF16, BF16, INT8), {}, TypeError, ["v has dtype", "k has torch.bfl"]),
    ((torch.float8_e4m3fn, INT8, INT8), {}, TypeError, ["k has dtype torch.int8", "float8_e4m3fn"]),
    ((BF16, INT8, INT8), {"q_descale": ONE}, ValueError, ["q_descale", "torch.bfloat16"]),
    ((BF16, INT8, INT8), {"p_descale": ONE}, ValueError, ["p_descale", "torch.bfloat16"]),
    ((INT8, INT8, INT8), {"p_descale": 0.5}, TypeError, ["p_descale", "0.5"]),
    ((INT8, INT8, INT8), {"p_descale": torch.ones(3)}, ValueError, ["p_descale", "(3,)", "(4,)"]),
    (
        (INT8, INT8, INT8),
        {"out": torch.zeros(2, 33, 4, 21).double()},
        TypeError,
        ["out", "bfloat16"],
    ),
]


@pytest.mark.parametrize(("dtypes", "changes", "error", "words"), ERRORS)
def test_errors(rng, dtypes, changes, error, words):
    tensors = int8_inputs(rng, heads_q=4, heads_k=2)
    q, k, v = (x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True))
    for function in (fmha_fwd, explain):
        with refused(error, *words):
            function(q, k, v, **changes)


def test_gradients_are_refused_before_anything_runs(rng):
    _, k, v = int8_inputs(rng)
    q = torch.randn(2, 33, 2, HDIM, generator=rng).requires_grad_()
    with pytest.raises(NotImplementedError, match="backward pass serves fp32, bf16, fp16; k and v"):
        fmha_fwd(q, k, v)
