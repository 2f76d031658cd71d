"""The amd-model suite's rows of decode, and the kernel that they are held against."""

import pytest
from rigs import amd_model_decode, streaming_read
from rigs.streaming_read import streaming_read_seconds

from jitfmha.amd import chips
from jitfmha.amd.node import VIRTUAL_NODE
from jitfmha.bench.report import Report


@pytest.mark.parametrize("device", VIRTUAL_NODE)
def test_reading_comes_near_what_hbm_sustains(monkeypatch, device):
    sizes = [32 << 20, 64 << 20, 1 << 30]
    sustained = chips.chip(VIRTUAL_NODE[device]).streaming_gb_s * 1e9
    rates = [size / streaming_read_seconds(device, size) for size in sizes]
    assert 0.85 * sustained < rates[0] < rates[1] < rates[2] < sustained
    assert rates[2] > 0.99 * sustained
    # With others on their way it would not be quicker.
    for workgroups in (2, 4, 6):
        monkeypatch.setattr(streaming_read, "_WORKGROUPS_OF_UNIT", workgroups)
        streaming_read_seconds.cache_clear()
        for size, rate in zip(sizes, rates, strict=True):
            assert size / streaming_read_seconds(device, size) < 1.02 * rate
    streaming_read_seconds.cache_clear()


def test_shares_are_of_that_and_of_what_hbm_sustains(monkeypatch):
    monkeypatch.setattr(amd_model_decode, "streaming_read_seconds", lambda *_: 1.0)
    report = Report("amd-model", {})
    amd_model_decode.add_rows(report, quick=True, progress=lambda _: None)
    shares = [row for row in report.rows if row.what.startswith("of what streaming reaches, ")]
    assert len(shares) == len(report.figures) == 2
    for share, figure in zip(shares, report.figures, strict=True):
        assert share.what.rpartition(", gfx")[2] == figure.what.rpartition(", gfx")[2]
        chip = share.what.partition("gfx9")[2][:2]
        call = amd_model_decode.DecodeCall(f"gfx9{chip}", 16, 4096)
        seconds = 100 / share.measured
        assert figure.measured == pytest.approx(100 * call.sustained_seconds / seconds)
