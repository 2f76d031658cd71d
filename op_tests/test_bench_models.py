"""The models that `bench --suite models` times, small ones of the same layers."""

from functools import partial

import pytest
import torch
from rigs import models_suite

from jitfmha.bench.report import Report

_ENCODER = models_suite.Layers(2, 128, 2, 2, 192)
_DECODER = models_suite.Layers(2, 256, 4, 2, 320, is_decoder=True)
_CASES = [
    models_suite.Case("encoder", _ENCODER, 3, 17, 17, 1.0),
    models_suite.Case("prefill", _DECODER, 1, 33, 33, 1.0),
    models_suite.Case("decode", _DECODER, 2, 1, 40, 1.0),
]


def _model(sizes: models_suite.Layers) -> models_suite.Model:
    return models_suite.Model(sizes).to(torch.bfloat16)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_both_sides_are_timed(case):
    report = Report("models", {})
    with torch.no_grad():
        timed = models_suite.time_model(case, _model(case.sizes), report, seconds=0.0)
    assert timed.seconds > 0 < timed.against_seconds
    assert [figure.what for figure in report.figures] == [
        f"{case.name}: {side} in a layer" for side in ("jitfmha", "SDPA")
    ]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_a_side_that_is_wrong_is_seen(case, monkeypatch):
    def mistaken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: bool) -> torch.Tensor:
        return models_suite.ATTEND["SDPA"](q, k, v.flip(1), False)

    monkeypatch.setitem(models_suite.ATTEND, "jitfmha", mistaken)
    with torch.no_grad(), pytest.raises(RuntimeError, match="differ from SDPA's"):
        models_suite.time_model(case, _model(case.sizes), Report("models", {}), seconds=0.0)


def test_decoding_continues_what_prefill_has_seen():
    """A step over the caches is the last row of all tokens at once, in float32."""
    case = models_suite.Case("decode", _DECODER, 2, 1, 40, 1.0)
    model = models_suite.Model(_DECODER)
    x, rope, _ = models_suite.inputs_of(case._replace(tokens=40))
    kept: list[models_suite.Cache] = []

    def keeping(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: bool) -> torch.Tensor:
        kept.append((k.clone(), v.clone()))
        return models_suite.ATTEND["SDPA"](q, k, v, True)

    with torch.no_grad():
        expected = model(x.float(), rope.float(), [], keeping)[:, -1:]
        for cache in kept:
            for each in cache:
                each[:, -1] = torch.nan
        step = partial(model, x[:, -1:].float(), rope[:, -1:].float(), kept)
        torch.testing.assert_close(step(models_suite.ATTEND["SDPA"]), expected)


def test_products_of_matrices_are_counted():
    sizes = models_suite.Layers(3, 64, 4, 2, 100, is_decoder=True)
    linear = sum(x.numel() for x in models_suite.Model(sizes).parameters() if x.dim() == 2)
    assert sizes.weights == linear
    case = models_suite.Case("", sizes, 2, 5, 5, 1.0)
    assert case.flops == 2 * (2 * linear * 5 + 3 * 4 * 64 * 15)
    assert case._replace(tokens=1).flops == 2 * (2 * linear + 3 * 4 * 64 * 5)
