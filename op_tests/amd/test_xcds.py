"""How many XCDs a device has, and that every tile is computed once however many there are."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from amd_problems import AmdProblem
from rigs.recording_runtime import RecordingRuntime
from untyped import fmha_fwd

from jitfmha import emulate
from jitfmha.amd.kernel_arguments import JITFMHA_ARGUMENTS
from jitfmha.planning.target import TARGET_HERE

NUMBER_OF_XCCS, INVALID_VALUE = 10018, 1
ROUNDING = 2**-8
# Heads of q and of k, the mask, and whether keys are split.
CALLS = [((6, 2), 2, False), ((5, 1), 0, False), ((7, 7), 2, True), ((4, 4), 0, True)]
RAGGED = ((300, 500), (0, 10), (20, 0), (129, 64), (1, 1))


def xcds_of_launch(runtime: RecordingRuntime) -> tuple[int, int, int]:
    """XCDs, heads of one, and heads of a group, as the kernel is told."""
    *_, launch = runtime.launches()
    arguments = launch.arguments(JITFMHA_ARGUMENTS)
    assert arguments["xcds.reciprocal"] == (2**32 - 1) // arguments["xcds.divisor"]
    assert launch.grid[0] % arguments["xcds.divisor"] == 0
    return arguments["xcds.divisor"], arguments["xcd_heads"], arguments["group_heads"]


def call(batch: int, heads: int, mask: int = 0) -> None:
    q = torch.zeros(batch, 512, heads, 128, dtype=torch.bfloat16)
    fmha_fwd(q, q, q, mask=mask)


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize(
    ("chip", "device", "answer", "xcds"),
    [
        ("MI300X", 0, None, 8),
        ("MI300A", 0, None, 6),
        ("MI308X", 0, None, 4),
        ("MI350P", 0, None, 4),
        ("MI300X", 1, 8, 8),
        ("MI300X", 2, 1, 1),  # a partition of one XCD
        ("MI355X", 1, 4, 4),  # a partition of four
        ("MI300X", 3, 512, 8),  # before ROCm 7.0 the number is that of another attribute
        ("MI300A", 3, 0, 6),
    ],
)
def test_the_device_tells(runtime, chip, device, answer, xcds):
    """A runtime that does not know, or answers nonsense, is not believed."""
    if answer is not None:
        runtime.set_attribute(device, NUMBER_OF_XCCS, answer)
    with runtime.stands_for(runtime.target(chip, device)):
        call(batch=1, heads=24 * (device + 1))
    assert xcds_of_launch(runtime)[0] == xcds


@pytest.mark.usefixtures("ready_first")
@pytest.mark.parametrize(
    ("batch", "heads", "mask", "expected"),
    [
        (1, 32, 0, (8, 4, 1)),
        (1, 32, 2, (8, 4, 4)),  # the longest tiles of all heads of an XCD first
        (4, 32, 2, (8, 16, 4)),
        (2, 4, 0, (8, 1, 1)),
        (2, 12, 2, (8, 3, 3)),
        (1, 12, 2, (4, 3, 3)),  # two XCDs have three heads
        (1, 1, 2, (1, 1, 1)),  # every XCD has a share of the tiles
    ],
)
def test_heads_are_shared_out_evenly(runtime, batch, heads, mask, expected):
    with runtime.stands_for(runtime.target("MI300X")):
        call(batch, heads, mask)
    assert xcds_of_launch(runtime) == expected


@contextmanager
def emulated_with(xcds: int) -> Iterator[None]:
    """A chip with less XCDs than its like, which the device therefore does not contradict."""
    with emulate("gfx942", check=True):
        here = TARGET_HERE.get()
        here.chip = here.chip._replace(xcds=xcds)
        yield


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.sample(("xcds", "case"), list(product((1, 2, 3, 6, 7), CALLS)), 8)
def test_any_number_of_xcds(rng, xcds, case):
    """In gm0, with keys that are split or not, and in gm1."""
    heads, mask, splits = case
    seqlen_k = 700 if splits else 90
    for lengths, batch in ((((300, seqlen_k),), 2), (RAGGED, None)):
        problem = AmdProblem(rng, heads=heads, lengths=lengths, batch=batch, mask=mask)
        with emulated_with(xcds):
            actual = problem.run()
        problem.assert_right(actual, ROUNDING)
