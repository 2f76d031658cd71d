"""Every mode and dtype on a GPU, against float64, with outputs poisoned before."""

import random
from dataclasses import replace

import pytest
import torch
from amd_problems import AmdProblem
from ready_calls import HDIMS, MODES_AND_MASKS, ReadyCall, drawn_call, edges

from jitfmha.cli import doctor

ROUNDING = 2**-8
RAGGED = ((300, 500), (0, 10), (20, 0), (129, 64), (1, 1), (513, 2000))

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.sample("number", range(4000), 200)
def test_drawn_calls(gpu, arch, rng, number):
    """Of all modes, dtypes, layouts, conversions and scales."""
    check(drawn_call(random.Random(rng.initial_seed())), gpu, arch, rng)


@pytest.mark.parametrize("call", edges(), ids=str)
def test_edges(gpu, arch, rng, call):
    check(call, gpu, arch, rng)


def check(call: ReadyCall, gpu: torch.device, arch: str, rng: torch.Generator) -> None:
    call = replace(call, chip=arch)
    if arch == "gfx950":
        call = replace(call, bf16_cvt="rtne")
    of_gpu = call.problem(rng, gpu)
    call.assert_right(of_gpu, of_gpu.run())


@pytest.mark.parametrize(("is_group", "mask"), MODES_AND_MASKS)
@pytest.mark.parametrize("hdims", HDIMS["bf16"])
def test_split_keys(gpu, arch, rng, hdims, is_group, mask):
    """Few queries and many keys: each tile of queries is shared by several workgroups."""
    call = ReadyCall(arch, "bf16", hdims, is_group, mask, (70, 9000), heads=(2, 4, 2))
    check(call, gpu, arch, rng)


@pytest.mark.parametrize("mask", [0, 2])
@pytest.mark.parametrize("longest", [None, 513, 4000])
def test_promises_that_are_kept(gpu, rng, longest, mask):
    options = {"max_seqlen_q": longest}
    call = AmdProblem(rng, lengths=RAGGED, mask=mask, gap=3, device=gpu, options=options)
    call.assert_right(call.run(), ROUNDING)


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
    call.assert_right(call.run(), ROUNDING, max_seqlen_q=longest)
    assert (surrounding[[0, 2]] == 7).all()


def test_the_doctor_finds_nothing_wrong(gpu):
    findings = [*doctor._check_gpus(), *doctor._check_hip_runtime(), *doctor._check_runs()]
    assert [each for each in findings if each.verdict == "failed"] == []
