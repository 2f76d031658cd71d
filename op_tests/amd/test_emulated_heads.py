"""qk_norm_rope_cache on emulated GPUs, under the sanitizer, against float64."""

from itertools import product

import pytest
import torch
from compiled_calls import assert_nothing_is_spilled
from drawn_rows import drawn_index
from head_calls import check_call, draw_call, draw_kind
from packed_pages import packed_keys, packed_values
from test_emulated_rows import draw_units
from test_heads import check_not_finite

import jitfmha
from jitfmha.planning.target import TARGET_HERE
from jitfmha.problem.dtypes import DTYPE_NAMES
from jitfmha.rows.heads.amd import HeadKernel, kernel_spec, widest_load
from jitfmha.rows.heads.problem import HeadTraits

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


@pytest.mark.sample("arch", [*FP8], 1)
def test_drawn_calls(arch, dtypes, rng, poisoned_memory, monkeypatch):
    for dtype in dtypes:
        kind = draw_kind(rng, dtype, [torch.int8, FP8[arch]])
        with jitfmha.emulate(arch, check=True, random_order=drawn_index(rng, 100)) as run:
            for _ in range(3):
                draw_units(rng, monkeypatch)
                check_call(draw_call(rng, kind), inplace=bool(drawn_index(rng, 2)))
            assert not run.findings()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_packed_pages(dtype, rng, poisoned_memory):
    """Tokens of one piece, of several, and of none; columns of values for more than two turns."""
    q, k = (torch.randn(2, 13, heads, 64, generator=rng).bfloat16() for heads in (4, 3))
    pages = [torch.randn(5, 16, 3, hdim, generator=rng).to(dtype) for hdim in (64, 136)]
    given = {
        "q": q,
        "k": k,
        "v": torch.randn(2, 13, 3, 136, generator=rng).bfloat16(),
        "k_cache": packed_keys(pages[0]),
        "v_cache": packed_values(pages[1]),
        "cache_seqlens": torch.tensor([0, 6]).int(),
    }
    slots = torch.randperm(80, generator=rng)[:26].view(2, 13)
    with jitfmha.emulate("gfx950", check=True) as run:
        check_call(given | {"block_table": torch.tensor([[3, 0], [1, 4]]).int()})
        check_call(given | {"slots": slots.masked_fill(slots % 5 == 0, -1)})
        assert not run.findings()


def test_no_heads_are_not_launched():
    q = torch.zeros(3, 0, 16)
    with jitfmha.emulate("gfx950"):
        assert jitfmha.qk_norm_rope_cache(q, q_weight=torch.ones(16))[0].shape == q.shape


@pytest.mark.parametrize(("heads", "heads_k", "compute_units"), [(1, 1, 304), (8, 4, 2)])
def test_a_part_of_a_head_is_rotated(
    heads, heads_k, compute_units, rng, poisoned_memory, monkeypatch
):
    """Also where waves have heads of one token, workgroups several blocks and the last none."""
    tables = {name: torch.rand(14, 16, generator=rng) for name in ("cos", "sin")}
    lengths = torch.tensor([4, 0, 8]).int()
    q, k, v = (torch.randn(3, 6, n, 128, generator=rng) for n in (heads, heads_k, heads_k))
    caches = torch.randn(2, 3, 16, heads_k, 128, generator=rng)
    given = {"q": q, "k": k, "v": v, "interleaved": False, "cache_seqlens": lengths, **tables}
    given |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
    with jitfmha.emulate("gfx942", check=True, random_order=drawn_index(rng, 100)) as run:
        monkeypatch.setattr(TARGET_HERE.get(), "compute_units", compute_units)
        check_call(given)
        assert not run.findings()


@pytest.mark.sample("arch", [*FP8], 1)
def test_numbers_that_are_not_finite(arch):
    with jitfmha.emulate(arch, check=True) as run:
        for dtype in (FP8[arch], torch.int8):
            check_not_finite(dtype)
        assert not run.findings()


@pytest.mark.sample(
    ("arch", "is_interleaved", "heads", "has_turns", "dtype", "of_tables"),
    [
        (arch, is_interleaved, *of_workgroups, *dtypes)
        for arch in FP8
        for is_interleaved in (False, True)
        for of_workgroups in product((1, 8), (False, True))
        if of_workgroups != (1, True) or not is_interleaved  # which has one turn
        for dtypes in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    ],
    2,
)
def test_nothing_is_spilled(arch, is_interleaved, heads, has_turns, dtype, of_tables):
    """Of heads that are normalised, rotated and rounded to bytes."""
    dtypes = dtype, of_tables, of_tables, DTYPE_NAMES[FP8[arch]]
    traits = HeadTraits(*dtypes, is_interleaved, is_packed=is_interleaved and not has_turns)
    width = widest_load(dtype, (128,))
    kernel = HeadKernel(traits, arch, (128, 128), 64, (True, True), width, heads, has_turns)
    assert_nothing_is_spilled(kernel_spec(kernel), kernel.name)


def test_the_other_form_of_fp8_is_refused():
    x, cache = torch.zeros(1, 1, 8), torch.zeros(1, 1, 1, 8).to(torch.float8_e4m3fn)
    slots = torch.zeros(1, dtype=torch.int64)
    with (
        jitfmha.emulate("gfx942"),
        pytest.raises(NotImplementedError, match=r"is fp8_e4m3fn;.*fp8_e4m3fnuz and int8"),
    ):
        jitfmha.qk_norm_rope_cache(k=x, v=x, k_cache=cache, v_cache=cache.clone(), slots=slots)
