"""Pages that lists name, on the emulator with its sanitizer."""

from itertools import product
from typing import Any

import pytest
import torch
from amd_problems import FP8
from closeness import is_same
from page_lists import PageLists
from ready_calls import CHIPS
from untyped import explain, fmha_fwd

from jitfmha import emulate

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Words of the kernels' names, and calls that they serve: queries of each sequence, and more.
_KINDS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "_decode": ([1, 1, 1, 1, 1], {"heads": (8, 2), "hdim": 64}),
    "_latent": ([2, 1, 2, 0, 2], {"heads": (16, 1), "hdim": 320, "rank": 300}),
    "_listed": ([150, 1, 2, 0, 1], {"heads": (2, 2), "hdim": 96}),
    # Of head dimension 64, gfx950 has other kernels where there is no mask.
    "_turns": ([257, 300, 290, 256, 257], {"heads": (1, 1), "hdim": 128}),
    "": ([30, 20, 40, 0, 1], {"heads": (2, 1), "hdim": 96}),
}
# Splits to ask for, in whose place how many there are depends on the room between lists, and the
# last bits on that. Work that is listed has none.
_SPLITS = {"_listed": 0, "": 3}
_LENGTHS_K = [0, 1, 129, 40, 301]


@pytest.mark.sample(("chip", "kind", "page_size"), [*product(CHIPS, _KINDS, (1, 16, 64, 128))], 3)
def test_drawn_calls(rng, seed, chip, kind, page_size):
    """Two of each kernel: in float64, and to the last bit what a table of the same pages gives."""
    for _ in range(2):
        check_drawn_call(rng, seed, chip, kind, page_size)


def check_drawn_call(rng: torch.Generator, seed: int, chip: str, kind: str, page_size: int) -> None:
    lengths_q, given = _KINDS[kind]
    order = torch.randperm(len(_LENGTHS_K), generator=rng).tolist()
    lengths_k = [_LENGTHS_K[i] for i in order]
    it = PageLists(rng, lengths_q, lengths_k, page_size, dtype=torch.bfloat16, **given)
    options = {"mask": 2 * (seed % 2), "softmax_scale": 0.1}
    splits = _SPLITS.get(kind, 1)
    calls = (it.groups, splits if kind == "" else 0), (it.groups, splits), (it.by_table, splits)
    with emulate(chip, check=True, random_order=seed) as run:
        for groups, num_splits in calls:
            told = explain(it.q, it.k, it.v, **groups, **options, num_splits=num_splits)
            assert kind in told.plan.kernel
        chosen, actual, by_table = (
            fmha_fwd(it.q, it.k, it.v, return_lse=True, **groups, **options, num_splits=num_splits)
            for groups, num_splits in calls
        )
        assert run.findings() == ()
    for each in (chosen, actual):
        it.check(each, **options)
    assert is_same(actual, by_table)


@pytest.mark.sample("chip", CHIPS, 1)
@pytest.mark.parametrize("page_size", [1, 16])
def test_scales_of_tokens(rng, chip, page_size):
    it = PageLists(rng, [1, 1, 1], [0, 70, 9], page_size, (4, 2), 64, dtype=FP8[chip])
    scales = {f"{x}_descale": torch.rand(*it.k.shape[:-1], 1, generator=rng) + 0.5 for x in "kv"}
    with emulate(chip, check=True) as run:
        actual, by_table = (
            fmha_fwd(it.q, it.k, it.v, return_lse=True, **groups, **scales)
            for groups in (it.groups, it.by_table)
        )
        assert run.findings() == ()
    assert is_same(actual, by_table)
    assert actual[0].isfinite().all()
