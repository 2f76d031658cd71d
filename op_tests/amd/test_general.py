"""The general kernels through the launcher, on the emulator with the sanitizer on.

A run takes a few drawn calls; `--exhaustive` takes thousands.
"""

from __future__ import annotations

import random

import pytest
import torch
from general_calls import ARCHS, check, draw, run
from reference import assert_close, attention
from untyped import explain, fmha_fwd

from jitfmha import emulate, jit
from jitfmha.amd.code_object import kernel_metadata
from jitfmha.amd.elf import Elf
from jitfmha.chips import Arch
from jitfmha.kernels.general.family import SERVES
from jitfmha.kernels.general.traits import GeneralTraits, kernel_spec
from jitfmha.problem import Feature

_THOUSANDS = 4000


@pytest.mark.sample("number", range(_THOUSANDS), 8)
def test_drawn_calls(request: pytest.FixtureRequest, rng: torch.Generator, number: int) -> None:
    check(draw(random.Random(rng.initial_seed())), rng)


@pytest.mark.sample(
    ("arch", "hdims", "is_masked", "rows_are_far"),
    [
        (arch, hdims, is_masked, rows_are_far)
        for arch in ARCHS
        for hdims in ((256, 256), (255, 251), (192, 128), (160, 160), (128, 128), (127, 96))
        for is_masked in (False, True)
        for rows_are_far in (False, True)
    ],
    2,
)
def test_nothing_is_spilled(
    arch: Arch, hdims: tuple[int, int], is_masked: bool, rows_are_far: bool
) -> None:
    """Registers that go to scratch memory would be in every loop's way."""
    traits = GeneralTraits(
        arch, "bf16", *hdims, "gm1", "rtne", is_masked=is_masked, rows_are_far=rows_are_far
    )
    metadata = kernel_metadata(Elf(jit.read(kernel_spec(traits))), traits.name)
    assert metadata is not None
    spilled = (".vgpr_spill_count", ".sgpr_spill_count", ".private_segment_fixed_size")
    assert [metadata[name] for name in spilled] == [0, 0, 0]


def test_a_tuned_kernel_is_the_first_choice() -> None:
    """Also for a call that a general kernel served before with other strides."""
    q, v = (torch.zeros(1, 40, 1, hdim, dtype=torch.bfloat16) for hdim in (64, 96))
    with emulate("gfx942"):
        assert explain(q, q, q).plan.family == "tuned"
        assert explain(q, q, v).plan.family == "general"


CALLS: dict[Feature, dict[str, object]] = {
    Feature.BIAS: {"bias": torch.zeros(4)[None, None, None]},
    Feature.BOOLEAN_BIAS: {"bias": torch.ones(1, 1, 1, 4, dtype=torch.bool)},
    Feature.ALIBI: {"alibi_slopes": torch.zeros(2)},
    Feature.SOFTCAP: {"logit_softcap": 3.0},
    Feature.SINKS: {"sink": torch.zeros(2)},
    Feature.SINK_TOKENS: {"sink_size": 2, "window_size": (1, 0)},
    Feature.DROPOUT: {"dropout_p": 0.5},
    Feature.NUM_SPLITS: {"num_splits": 2},
}


@pytest.mark.parametrize("feature", [feature for feature in CALLS if feature not in SERVES])
def test_what_is_not_served_is_refused_by_name(feature: Feature) -> None:
    q = torch.zeros(1, 4, 2, 96, dtype=torch.bfloat16)
    with emulate("gfx950"), pytest.raises(NotImplementedError) as raised:
        fmha_fwd(q, q, q, **CALLS[feature])
    assert f"not general: It does not serve {feature.value}." in str(raised.value)


def test_wide_heads_are_refused_by_name() -> None:
    q, v = (torch.zeros(1, 4, 1, hdim, dtype=torch.bfloat16) for hdim in (257, 300))
    with emulate("gfx950"), pytest.raises(NotImplementedError) as raised:
        fmha_fwd(q, q, v)
    for name, hdim in (("q and k", 257), ("v", 300)):
        assert f"head dimensions up to 256; that of {name} is {hdim}." in str(raised.value)


def test_rows_that_are_far_apart(rng: torch.Generator) -> None:
    """A tile's keys reach further than a buffer's offsets; and back to rows that do not."""
    far = 1 << 25  # elements: 32 of them are 2 GiB apart
    memory = torch.empty(33 * far, dtype=torch.bfloat16)
    k = memory.as_strided((1, 33, 1, 24), (0, far, 24, 1))
    q, v = (torch.randn(1, 33, 1, 24, generator=rng).bfloat16() for _ in range(2))
    k.copy_(torch.randn(1, 33, 1, 24, generator=rng))
    for keys in (k, k.contiguous(), k):
        actual = run("gfx942", q, keys, v)
        assert_close(actual, attention(q, keys, v), q, keys, v)
