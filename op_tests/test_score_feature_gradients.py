"""Gradients through bias, ALiBi, soft cap, sinks and dropout, against the float64 reference's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fresh_calls import fresh_calls
from inputs import DTYPES, random_qkv
from reference import attention
from score_features import FEATURES, Options, Shape, for_reference
from torch import Tensor
from untyped import fmha_bwd, fmha_fwd

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [(1, 1, 1, 1), (9, 0, 2, 2), (17, 127, 7, 7), (129, 49, 2, 1)]
# Of the largest gradient: sums of rounded products.
TOLERANCE = {"fp32": 2e-5, "bf16": 4e-2, "fp16": 1e-2}


def differentiate(
    function: Any, tensors: dict[str, Tensor], options: Options, dout: Tensor, dlse: Tensor
) -> dict[str, Tensor]:
    """Gradients of the sum of ``out * dout`` and, where keys are seen, of ``lse * dlse``."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out, lse = function(**leaves, **options)
    hidden = lse == -torch.inf
    of_lse = lse.masked_fill(hidden, 0) * dlse.masked_fill(hidden, 0)
    total = (out * dout.to(out.dtype)).sum() + of_lse.sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, gradients, strict=True))


def with_lse(**arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = fmha_fwd(return_lse=True, **arguments)
    return out, lse


def check(rng: torch.Generator, feature: str, dtype: str, sizes: tuple[int, int, int, int]) -> None:
    seqlen_q, seqlen_k, heads_q, heads_k = sizes
    named = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads_q, "heads_k": heads_k}
    qkv = random_qkv(rng, hdim=37, hdim_v=21, dtype=DTYPES[dtype], **named)
    shape = Shape(2, heads_q, seqlen_q, seqlen_k, DTYPES[dtype], rng)
    options = FEATURES[feature](shape)
    of_reference = for_reference(options, shape)
    tensors = dict(zip(("q", "k", "v"), qkv, strict=True))
    for name in ("bias", "sink"):
        if name in options and options[name].dtype != torch.bool:
            tensors[name] = options.pop(name)
            del of_reference[name]
    dout = shape.randn(2, seqlen_q, heads_q, 21).to(DTYPES[dtype])
    dlse = shape.randn(2, heads_q, seqlen_q)
    actual = differentiate(with_lse, tensors, options, dout, dlse)
    doubled = {name: x.double() for name, x in tensors.items()}
    expected = differentiate(attention, doubled, of_reference, dout, dlse)
    for name, gradient in actual.items():
        reference = torch.zeros_like(doubled[name]) if expected[name] is None else expected[name]
        assert gradient.dtype == tensors[name].dtype
        assert gradient.shape == tensors[name].shape
        error = (gradient.double() - reference).abs()
        assert not error.isnan().any(), f"the gradient of {name} holds NaN"
        if error.numel():
            # The gradients of one call are of one size; each is a sum with some that cancel.
            largest = max(1.0, reference.abs().max().item())
            assert error.max().item() <= TOLERANCE[dtype] * largest, (name, sizes)


@pytest.mark.sample(
    ("feature", "dtype"), list(itertools.product(sorted(set(FEATURES) - {"everything"}), DTYPES)), 3
)
def test_one_feature(rng: torch.Generator, feature: str, dtype: str) -> None:
    for sizes in SIZES:
        check(rng, feature, dtype, sizes)


@pytest.mark.sample("dtype", list(DTYPES), 1)
def test_all_features_together(rng: torch.Generator, dtype: str) -> None:
    for sizes in SIZES:
        check(rng, "everything", dtype, sizes)


def test_all_features_together_in_an_emulated_tile_unit(rng: torch.Generator) -> None:
    with fresh_calls("amx_emulated"):
        for sizes in SIZES:
            check(rng, "everything", "bf16", sizes)


def test_broken_rules(rng: torch.Generator) -> None:
    q, k, v = random_qkv(rng)
    out, lse = fmha_fwd(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"rng_state=None: with dropout_p=0\.5"):
        fmha_bwd(out, q, k, v, out, lse, dropout_p=0.5)
    with pytest.raises(ValueError, match="dbias is wanted, but bias=None"):
        fmha_bwd(out, q, k, v, out, lse, dbias=torch.zeros(1))
    hides = torch.ones(49, dtype=torch.bool)[None, None, None]
    with pytest.raises(ValueError, match=r"dbias is wanted, but a bias of torch\.bool"):
        fmha_bwd(out, q, k, v, out, lse, bias=hides, dbias=torch.zeros(1))
    with pytest.raises(ValueError, match="dsink is wanted, but sink=None"):
        fmha_bwd(out, q, k, v, out, lse, dsink=torch.zeros(2))


def test_alibi_slopes_have_no_gradient(rng: torch.Generator) -> None:
    q, k, v = random_qkv(rng)
    with pytest.raises(NotImplementedError, match="alibi_slopes requires grad"):
        fmha_fwd(q, k, v, alibi_slopes=torch.ones(2, requires_grad=True))
