"""``tune`` on a GPU: by its events, and calls take from then on what was quickest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_times import times_in
from untyped import explain, fmha_fwd

from jitfmha.ahead.combination import Combination
from jitfmha.ahead.tune import TunedCall, tune


@pytest.fixture(autouse=True)
def _times(tmp_path: Path) -> Iterator[None]:
    with times_in(tmp_path):
        yield


@pytest.mark.parametrize("sizes", [(4, 1, 4096), (1, 1024, 1024)], ids=["decode", "prompt"])
def test_what_was_quickest_is_taken(gpu, rng, sizes):
    batch, seqlen_q, seqlen_k = sizes
    lengths: Any = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    x = Combination("bf16", "bf16", 128, 128, batch=batch, heads_q=8, heads_k=8, **lengths)
    (done,) = tune([x], gpu, seconds=0.2)
    assert isinstance(done, TunedCall), done
    assert done.failed == ()
    assert {variant.family for variant in done.measured} == {"ready", "compiled"}
    assert all(1e-6 < seconds < 1 for seconds in done.measured.values())
    shapes = [(batch, n, 8, 128) for n in (seqlen_q, seqlen_k, seqlen_k)]
    q, k, v = (torch.randn(each, generator=rng).to(gpu, torch.bfloat16) for each in shapes)
    best = next(iter(done.measured))
    told = explain(q, k, v)
    assert (told.plan.kernel, told.plan.num_splits) == (best.kernel, best.num_splits)
    expected = fmha_fwd(q.cpu().float(), k.cpu().float(), v.cpu().float())
    error = (fmha_fwd(q, k, v).cpu().float() - expected).abs().max()
    assert error < 0.02 * expected.abs().max()
