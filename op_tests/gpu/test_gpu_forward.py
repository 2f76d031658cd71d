"""Every mode and dtype on a GPU, against float64, with outputs poisoned before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amd_problems import FP8, AmdProblem
from inputs import LAYOUTS, lay_out
from untyped import explain

from jitfmha.cli import doctor

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
RAGGED = ((300, 500), (0, 10), (20, 0), (129, 64), (1, 1), (513, 2000))
MODES_AND_MASKS = [("gm0", 0), ("gm0", 1), ("gm0", 2), ("gm1", 0), ("gm1", 2)]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def problem(rng: torch.Generator, gpu: torch.device, mode: str, **changes: Any) -> AmdProblem:
    shape: dict[str, Any] = {"lengths": RAGGED}
    if mode == "gm0":
        shape = {"lengths": ((300, 500),), "batch": 2}
    return AmdProblem(rng, device=gpu, **{"heads": (4, 2)} | shape | changes)


@pytest.mark.parametrize(("mode", "mask"), MODES_AND_MASKS)
@pytest.mark.parametrize(
    ("dtype", "hdims"),
    [
        *((torch.bfloat16, hdims) for hdims in ((64, 64), (128, 128), (192, 128))),
        *((torch.float16, hdims) for hdims in ((64, 64), (128, 128))),
    ],
)
def test_modes_and_dtypes(gpu, rng, dtype, hdims, mode, mask):
    call = problem(rng, gpu, mode, dtype=dtype, hdims=hdims, mask=mask)
    call.assert_right(call.run(), ROUNDING[dtype])


@pytest.mark.parametrize("bf16_cvt", ["rtna", "rtz"])
def test_conversions(gpu, rng, bf16_cvt):
    call = problem(rng, gpu, "gm0", mask=2, options={"bf16_cvt": bf16_cvt})
    call.assert_right(call.run(), 2 * ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("descales", [None, "one"])
@pytest.mark.parametrize("mode", ["gm0", "gm1"])
def test_fp8(gpu, arch, rng, mode, descales):
    call = problem(rng, gpu, mode, dtype=FP8[arch], softmax_scale=0.05, descales=descales)
    if explain(call.q, call.k, call.v, **call.arguments).plan is None:
        pytest.skip("JITFMHA_HSA_DIR names no tree with kernels for fp8")
    call.assert_right(call.run(), 2**-3)


@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("hdims", [(64, 64), (128, 128), (192, 128)])
def test_split_keys(gpu, rng, hdims, mask):
    """Few queries and many keys: each tile of queries is shared by several workgroups."""
    call = AmdProblem(
        rng, hdims=hdims, lengths=((70, 9000),), batch=1, heads=(4, 2), mask=mask, device=gpu
    )
    call.assert_right(call.run(), ROUNDING[torch.bfloat16])
    if mask != 1:
        lengths = ((70, 9000), (1, 700), (129, 4096))
        call = AmdProblem(rng, hdims=hdims, lengths=lengths, mask=mask, device=gpu)
        call.assert_right(call.run(), ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("mask", [0, 2])
@pytest.mark.parametrize("longest", [None, 513, 4000])
def test_promises_that_are_kept(gpu, rng, longest, mask):
    call = problem(rng, gpu, "gm1", mask=mask, gap=3, options={"max_seqlen_q": longest})
    call.assert_right(call.run(), ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("mask", [0, 2])
@pytest.mark.parametrize("longest", [1, 128, 300])
def test_promises_that_are_broken(gpu, rng, longest, mask):
    """Rows below the promise are right, and nothing beside the output is touched.

    The keys are split, so that there is a workspace to write past the end of.
    """
    lengths = ((700, 1024), (40, 3000), (300, 64))
    call = AmdProblem(
        rng, lengths=lengths, mask=mask, device=gpu, options={"max_seqlen_q": longest}
    )
    surrounding = torch.full((3, *call.q.shape), 7.0, dtype=call.dtype, device=gpu)
    call.arguments["out"] = surrounding[1]
    call.assert_right(call.run(), ROUNDING[torch.bfloat16], max_seqlen_q=longest)
    assert (surrounding[[0, 2]] == 7).all()


@pytest.mark.parametrize("out_layout", list(LAYOUTS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_strides(gpu, rng, layout, out_layout):
    call = problem(rng, gpu, "gm0", mask=2, layout=layout)
    poison = torch.full(call.q.shape, torch.nan, dtype=call.dtype, device=gpu)
    call.arguments["out"] = lay_out(poison, out_layout)
    call.assert_right(call.run(), ROUNDING[torch.bfloat16])


def test_the_doctor_finds_nothing_wrong(gpu):
    findings = [*doctor._check_gpus(), *doctor._check_hip_runtime(), *doctor._check_runs()]
    assert [each for each in findings if each.verdict == "failed"] == []
