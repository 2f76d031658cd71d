"""The suite that holds the cost model against published times; the model itself is put in place."""

from collections.abc import Callable

import pytest
from rigs import published_times_suite
from rigs.modelled_call import NotServedError
from rigs.published_times_suite import Point, points

from jitfmha.bench import run_suite
from jitfmha.bench.report import Report, SuiteNotAvailable
from jitfmha.cli import main


def _run(monkeypatch: pytest.MonkeyPatch, ratio: Callable[[Point], float]) -> Report:
    """The report of a model that is off by so much."""
    monkeypatch.setenv("JITFMHA_HSA_DIR", "/a/tree")
    monkeypatch.setattr(
        published_times_suite, "modelled_seconds", lambda point: ratio(point) * point.seconds
    )
    return run_suite("published-times", quick=False, progress=lambda line: None)


def test_points_are_what_was_published():
    of_moonmath = [point for point in points() if point.source == "moonmath-ai"]
    seconds = [point.seconds for point in of_moonmath[3:6]]
    assert seconds == pytest.approx([14.691e-3, 13.801e-3, 12.629e-3])
    assert [point.bf16_cvt for point in of_moonmath[3:6]] == ["rtne", "rtna", "rtz"]
    (forward, backward) = (
        point
        for point in points()
        if (point.batch, point.heads_q, point.heads_k, point.seqlen) == (8, 64, 8, 8192)
        and (point.chip, point.is_causal) == ("MI300X", False)
        and point.atomic_fp32 is not True
    )
    flop = 4 * 8 * 64 * 8192**2 * 128
    assert forward.seconds == pytest.approx(flop / 577.45e12)
    assert backward.seconds == pytest.approx(2.5 * flop / 537.04e12)
    causal = next(point for point in points() if point.hdims == (192, 128) and point.is_causal)
    assert causal.seconds == pytest.approx(2 * 4 * 64 * 8192**2 * (192 + 128) / 2 / 1298e12)


def test_half_of_one_source_is_fitted():
    assert {point.source for point in points() if point.is_fitted} == {"AITER's README"}
    of_readme = [point for point in points() if point.source == "AITER's README"]
    assert 2 * sum(point.is_fitted for point in of_readme) == len(of_readme) == 94 * 6


def test_bars_are_for_points_that_are_not_fitted(monkeypatch):
    report = _run(monkeypatch, lambda point: 2.0 if point.is_fitted else 1.03)
    assert report.met
    assert len(report.rows) == 2 * 4
    assert [row.measured for row in report.rows] == pytest.approx([3.0, 0.0] * 4)
    fitted = [text for name, text in report.machine.items() if "that are fitted" in name]
    assert fitted == ["2.000, spread 0.0 %"] * 2


def test_mean_and_spread_can_miss_their_bars(monkeypatch):
    slow = _run(monkeypatch, lambda point: 1.06)
    assert [row.met for row in slow.rows] == [False, True] * 4
    scattered = _run(monkeypatch, lambda point: 1.2 if point.is_causal else 0.8)
    of_readme = [row for row in scattered.rows if "README" in row.what]
    assert [row.met for row in of_readme] == [True, False] * 2


def test_points_whose_kernels_are_refused_are_left_out(monkeypatch):
    def ratio(point: Point) -> float:
        if point.source == "moonmath-ai":
            raise NotServedError("it has a known fault")
        return 1.0

    report = _run(monkeypatch, ratio)
    assert report.machine["left out"] == "27 points whose kernels are refused"
    assert not any("moonmath" in row.what for row in report.rows)


def test_a_tree_has_to_be_named(monkeypatch, capsys):
    monkeypatch.delenv("JITFMHA_HSA_DIR", raising=False)
    with pytest.raises(SuiteNotAvailable, match="JITFMHA_HSA_DIR is not set"):
        run_suite("published-times", quick=True, progress=lambda line: None)
    assert main(["bench", "--suite", "published-times"]) == 2
    assert "JITFMHA_HSA_DIR is not set" in capsys.readouterr().err
