"""Backward passes on a GPU by kernels that come ready and by compiled ones, against float64."""

from typing import Any

import pytest
import torch
from backward_calls import POISON, BackwardCall
from untyped import fmha_bwd, fmha_fwd

# Of the size of a gradient, as root mean squares.
TOLERANCE = 0.006
RAGGED = ((300, 500), (0, 10), (20, 0), (129, 64), (1, 1), (257, 700))
MODES_AND_MASKS = [("gm0", 0), ("gm0", 1), ("gm0", 2), ("gm1", 0), ("gm1", 1), ("gm1", 2)]
READY_HDIMS = [(64, 64), (128, 128)]
# No kernel that comes ready has these in a fixed order.
COMPILED_HDIMS = [(40, 24), (80, 80)]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def backward(
    rng: torch.Generator, gpu: torch.device, mode: str, *, deterministic: bool, **changes: Any
) -> BackwardCall:
    """Of two query heads for each key head; between sequences lie rows of NaN."""
    shape: dict[str, Any] = {"lengths": RAGGED, "gap": 3}
    if mode == "gm0":
        shape = {"lengths": ((300, 500),), "batch": 2}
    options = {"deterministic": deterministic}
    call = BackwardCall(rng, device=gpu, heads=(4, 2), options=options, **shape | changes)
    call.poison_unused_rows()
    return call


@pytest.mark.parametrize(
    ("mode", "mask"), [*MODES_AND_MASKS, ("gm0", "t:20,10"), ("gm1", "b:40,0")]
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hdims", [*READY_HDIMS, *COMPILED_HDIMS])
def test_gradients(gpu, rng, hdims, dtype, deterministic, mode, mask):
    call = backward(
        rng, gpu, mode, deterministic=deterministic, hdims=hdims, dtype=dtype, mask=mask
    )
    families = ("ready", "aiter") if hdims in READY_HDIMS else ("compiled",)
    assert call.explain().plan.family in families
    call.run()
    call.assert_right(TOLERANCE)


@pytest.mark.parametrize("mask", [0, 2])
@pytest.mark.parametrize("mode", ["gm0", "gm1"])
@pytest.mark.parametrize("hdims", [*READY_HDIMS, *COMPILED_HDIMS])
def test_deterministic_gradients_have_the_same_bits(gpu, rng, hdims, mode, mask):
    """Several workgroups of keys add to the same rows of dq."""
    lengths = ((700, 1500),) if mode == "gm0" else ((700, 1500), (40, 900), (300, 64))
    call = backward(rng, gpu, mode, deterministic=True, hdims=hdims, mask=mask, lengths=lengths)
    first = {name: x.clone() for name, x in call.run().items()}
    call.assert_right(TOLERANCE)
    for _ in range(4):
        for x in call.gradients.values():
            x.fill_(POISON)
        for name, x in call.run().items():
            assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("mode", ["gm0", "gm1"])
@pytest.mark.parametrize("hdims", [(128, 128), (80, 80)])
def test_new_gradients(gpu, rng, hdims, mode):
    """The second call goes the short way; unused rows of new gradients are 0."""
    call = backward(rng, gpu, mode, deterministic=True, hdims=hdims, mask=2)
    for _ in range(2):
        read = (call.dout, call.q, call.k, call.v, call.out, call.lse)
        gradients = fmha_bwd(*read, **call.arguments)
        for name, x in zip(call.gradients, gradients, strict=True):
            used = call.used_rows(name)
            if used is not None:
                assert not x[~used].any(), name
                x[~used] = POISON
            call.gradients[name] = x
        call.assert_right(TOLERANCE)


@pytest.mark.parametrize(("mode", "mask"), MODES_AND_MASKS)
def test_autograd(gpu, rng, mode, mask):
    changes = {} if mode == "gm0" else {"gap": 0}
    call = backward(rng, gpu, mode, deterministic=False, mask=mask, **changes)
    options = {name: x for name, x in call.arguments.items() if name != "deterministic"}
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
        out = fmha_fwd(*leaves, **options)
        call.gradients = dict(
            zip(call.gradients, torch.autograd.grad(out, leaves, call.dout), strict=True)
        )
        call.assert_right(TOLERANCE)
