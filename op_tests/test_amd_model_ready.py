"""The amd-model suite's rows of ready kernels; what the model says of calls is put in its place."""

from typing import Any

import pytest
from rigs import amd_model_ready
from rigs.modelled_call import NotServedError

from jitfmha.bench.report import Report


def _rows(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], *, tree: str, quick: bool = False
) -> tuple[Report, list[str]]:
    """The report, and what was told, of kernels that take so long; 0: there are none."""

    def modelled(kernels: str, **options: Any) -> float:
        kind = "deterministic" if options.get("deterministic") else kernels
        taken = seconds[kind] * (2 if options.get("atomic_fp32") else 1)
        if taken == 0:
            raise NotServedError("another one ran")
        return taken

    monkeypatch.setenv("JITFMHA_HSA_DIR", tree)
    for direction in ("forward", "backward"):
        monkeypatch.setattr(
            *(amd_model_ready, f"_{direction}"),
            lambda call, kernels, progress, **options: modelled(kernels, **options),
        )
    monkeypatch.setattr(
        *(amd_model_ready, "_backward_cycles"),
        lambda call, progress, deterministic: modelled("own", deterministic=deterministic),
    )
    report, told = Report("amd-model", {}), list[str]()
    amd_model_ready.add_rows(report, quick, told.append)
    return report, told


def test_rows_are_ratios(monkeypatch):
    seconds = {"own": 0.8, "named": 1.0, "deterministic": 1.2}
    report, told = _rows(monkeypatch, seconds, tree="/a/tree")
    assert told == []
    measured = {row.what: (pytest.approx(row.measured), row.bar) for row in report.rows}
    assert len(measured) == len(report.rows) == 14 + 16 + 10 + 1
    gqa = "(8, 64/8, 8192)"
    assert measured[f"own over AITER's time, gfx942 128x128 rtz, {gqa}, causal"] == (0.8, 0.9)
    assert measured[f"own over AITER's time, gfx950 192x128 rtne, {gqa}, no mask"] == (0.8, 0.95)
    # Of AITER's two ways to add up the faster one.
    backward = f"own over AITER's backward time, gfx942 192x192 rtne, {gqa}, causal"
    assert measured[backward] == (0.8, 1.0)
    what = "deterministic over default backward cycles, ready kernels, "
    assert measured[f"{what}gfx950 64x64 rtne, (1, 8/1, 2048), causal"] == (1.5, 1.25)
    (fastest,) = (row for row in report.rows if "fastest" in row.what)
    assert fastest.measured == pytest.approx(0.8 / 11.39e-3)


def test_without_a_tree_rows_are_left_out(monkeypatch):
    report, _ = _rows(monkeypatch, {"own": 1.0, "deterministic": 1.0}, tree="")
    assert len(report.rows) == 10 + 1
    assert report.machine == {
        "AITER's kernels": "their rows are left out: JITFMHA_HSA_DIR is not set"
    }


def test_calls_that_a_tree_does_not_serve_are_told(monkeypatch):
    seconds = {"own": 1.0, "named": 0.0, "deterministic": 1.0}
    report, told = _rows(monkeypatch, seconds, tree="/a/tree")
    assert not any("AITER" in row.what for row in report.rows)
    assert len(told) == 14 + 2 * 16
    assert all("left out, because another one ran" in line for line in told)


def test_a_quick_run_has_one_of_each(monkeypatch):
    seconds = {"own": 1.0, "named": 1.0, "deterministic": 1.0}
    report, _ = _rows(monkeypatch, seconds, tree="/a/tree", quick=True)
    kinds = [row.what.partition(", ")[0].partition(" gfx")[0] for row in report.rows]
    assert kinds == [
        "own over AITER's time",
        "own over AITER's backward time",
        "deterministic over default backward cycles",
    ]
