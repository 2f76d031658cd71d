"""The amd-model suite's rows of latent decode; AITER's time is put in place."""

from rigs import amd_model_latent

from jitfmha.bench.report import Report


def test_rows_need_a_tree_and_compare_all_launches(monkeypatch):
    monkeypatch.delenv("JITFMHA_HSA_DIR", raising=False)
    report, told = Report("amd-model", {}), []
    amd_model_latent.add_rows(report, quick=True, progress=told.append)
    assert not report.rows
    assert not told
    monkeypatch.setenv("JITFMHA_HSA_DIR", "/a/tree")
    amd_model_latent.add_rows(report, quick=True, progress=told.append)
    assert not report.rows
    assert all("left out" in line for line in told)
    monkeypatch.setattr(amd_model_latent, "_KEYS", 256)
    monkeypatch.setattr(amd_model_latent, "_aiter_seconds", lambda *_: 1.0)
    amd_model_latent.add_rows(report, quick=True, progress=told.append)
    assert [row.met for row in report.rows] == [True, True]
