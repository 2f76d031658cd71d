"""The amd-model suite's rows of the choice among families; the model is mostly put in its place."""

import itertools

import pytest
from rigs import amd_model_choice
from rigs.amd_model_choice import DrawnCall, drawn_calls

from jitfmha.bench.report import Report


def rows(monkeypatch: pytest.MonkeyPatch, seconds: list[dict[str, float]]) -> Report:
    """The report where "ready" is taken, and calls take as long as one after the other here."""
    given = itertools.cycle(seconds)
    monkeypatch.setattr(DrawnCall, "seconds", lambda call: ("ready", next(given)))
    report = Report("amd-model", {})
    amd_model_choice.add_rows(report, quick=True, progress=lambda text: None)
    return report


def test_the_share_and_the_worst(monkeypatch):
    near, far, alone = (
        {"ready": 1.05, "compiled": 1.0},
        {"ready": 3.0, "compiled": 2.0},
        {"ready": 1},
    )
    share, worst = rows(monkeypatch, [near, near, alone, far]).rows
    assert "of 9 drawn calls" in share.what
    assert share.measured == pytest.approx(100 * 6 / 9)
    assert share.bar == 95
    assert (worst.measured, worst.bar) == (pytest.approx(1.5), 1.25)


def test_calls_of_all_kinds_are_drawn(seed):
    calls = list(drawn_calls(seed, 200))
    assert calls == list(drawn_calls(seed, 200))
    for name, least in (("chip", 3), ("dtype", 3), ("hdims", 4), ("mode", 2), ("mask", 2)):
        assert len({getattr(call, name) for call in calls}) >= least, name
    assert any(call.is_backward for call in calls)
    assert any(call.lengths[0][0] == 1 < call.lengths[0][1] for call in calls)
    assert any(len(set(call.lengths)) > 1 for call in calls)


def test_a_call_is_timed_with_the_kernels_of_each_family():
    call = DrawnCall("gfx942", "bf16", (128, 128), (4, 8, 1), ((1, 512),), "gm0", 2)
    taken, seconds = call.seconds()
    assert seconds.keys() == {"ready", "compiled"}
    assert seconds[taken] <= 1.05 * min(seconds.values())
    assert all(1e-6 < each < 1e-3 for each in seconds.values())
    assert str(call) == "forward, gfx942 bf16 128x128, (4, 8/1, 1x512), causal"
