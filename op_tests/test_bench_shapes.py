"""`bench --shapes`: shapes in text, measurements beside other packages, files and plots."""

import csv
import io
import math
import os
import re
import struct
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from jitfmha.bench import memory, over_peers, plots
from jitfmha.bench.over_peers import Measurement, measure
from jitfmha.bench.peers import PEERS, Peer
from jitfmha.bench.shapes import NAMED_SHAPES, Shape, shapes_of
from jitfmha.bench.timing import Timings
from jitfmha.cli.output import ProgressBar
from jitfmha.jit import status
from jitfmha.jit.regular_file import read_regular_file, write_whole

_SMALL = "batch=2,seqlen=64,heads=2,hdim=32,dtype=fp32"
_CPU = torch.device("cpu")


def test_what_a_shape_leaves_out():
    (shape,) = shapes_of("seqlen=300, heads=6,hdim=40,dtype=fp16")
    assert shape == Shape(1, 6, 6, 300, 300, 40, 40, "fp16")
    (shape,) = shapes_of("heads=8,kv_heads=2,seqlen=1,seqlen_k=77,hdim_v=64,mask=causal")
    assert shape == Shape(1, 8, 2, 1, 77, 128, 64, "bf16", "causal")
    assert str(shape) == "batch 1, seqlen 1/77, heads 8/2, hdim 128/64, bf16, causal"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("seqlen", "'seqlen'"),
        ("rows=3", "'rows=3'"),
        ("seqlen=0", "seqlen='0'"),
        ("seqlen=-4", "seqlen='-4'"),
        ("seqlen=12x", "seqlen='12x'"),
        ("seqlen=4294967296", "4294967296"),
        ("seqlen=1,seqlen=2", "seqlen is given twice"),
        ("dtype=fp8", "dtype='fp8'"),
        ("mask=left", "mask='left'"),
        ("direction=up", "direction='up'"),
        ("heads=6,kv_heads=4", "kv_heads=4"),
        ("hdim=577", "hdim=577"),
    ],
)
def test_a_bad_shape_is_named(text, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        shapes_of(text)


def test_a_file_of_shapes(tmp_path):
    file = tmp_path / "shapes"
    file.write_text("# ours\n\nseqlen=5  # short\nseqlen=7,mask=causal\n", encoding="utf-8")
    assert [shape.seqlen for shape in shapes_of(f"@{file}")] == [5, 7]
    file.write_text("seqlen=5\nseqlen=five\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: seqlen='five'"):
        shapes_of(f"@{file}")
    file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no shape"):
        shapes_of(f"@{file}")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("seqlen", "seqlen_k"), [(5, 5), (3, 8), (8, 3), (1, 1)])
def test_operations_and_bytes_are_counted(direction, seqlen, seqlen_k):
    shape = Shape(2, 6, 3, seqlen, seqlen_k, 8, 16, "fp16", "causal", direction)
    pairs = sum(j <= i + seqlen_k - seqlen for i in range(seqlen) for j in range(seqlen_k))
    products = {"forward": (1, 1), "backward": (3, 2)}[direction]
    assert shape.flops == 2 * 6 * pairs * 2 * (products[0] * 8 + products[1] * 16)
    q, out = 2 * seqlen * 6 * 8, 2 * seqlen * 6 * 16
    k, v = 2 * seqlen_k * 3 * 8, 2 * seqlen_k * 3 * 16
    moved = {"forward": q + k + v + out, "backward": 2 * (q + k + v + out)}[direction]
    assert shape.bytes == 2 * moved


def test_named_sets_are_what_they_say():
    assert all(shape.is_causal for shape in (*NAMED_SHAPES["causal"], *NAMED_SHAPES["training"]))
    assert {shape.direction for shape in NAMED_SHAPES["training"]} == {"backward"}
    assert {shape.seqlen for shape in NAMED_SHAPES["decode"]} == {1}


def test_medians_and_quartiles():
    times = Timings([[x, 2 * x] for x in (4.0, 1.0, 3.0, 2.0, 5.0)])
    assert times.median(0) == 3.0
    assert times.quartiles(0) == (2.0, 4.0)
    assert times.quartiles(1) == (4.0, 8.0)


def _wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 0 * (q + k.mean(1, keepdim=True)) + 2 * v.mean(1, keepdim=True) + 1


def _refusing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("not this\n  shape" + "." * 200)


_WRONG = Peer("wrong", lambda _shape: _wrong)
_REFUSING = Peer("refusing", lambda _shape: _refusing)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_peers_are_checked_before_they_are_timed(direction):
    (shape,) = shapes_of(f"{_SMALL},direction={direction}")
    peers = [PEERS["sdpa"], _WRONG, _REFUSING]
    ours, sdpa, wrong, refusing = measure(shape, peers, _CPU, seconds=0.0)
    assert ours.peer == "jitfmha"
    for x in (ours, sdpa):
        assert x.seconds is not None
        assert x.quartiles is not None
        assert x.gflops is not None
        assert x.quartiles[0] <= x.seconds <= x.quartiles[1]
        assert x.gflops == pytest.approx(shape.flops / x.seconds / 1e9)
    assert sdpa.difference is not None
    assert 0 < sdpa.difference < (1e-5 if direction == "forward" else 1e-4)
    assert wrong.seconds is None
    assert wrong.difference is not None
    assert wrong.difference > 0.1
    assert "another result" in wrong.refusal
    assert refusing.seconds is None
    assert refusing.difference is None
    assert refusing.refusal.startswith("RuntimeError: not this shape..")
    assert len(refusing.refusal) == 100


def test_the_other_corner_is_not_compared():
    (shape,) = shapes_of("seqlen=3,seqlen_k=9,mask=causal")
    refusal = PEERS["sdpa"].why_not(shape)
    assert refusal is not None
    assert "seqlen_k" in refusal


def test_command(run, tmp_path):
    files = {name: tmp_path / name for name in ("figures.csv", "lines.svg", "roof.png")}
    result = run(
        *("bench", "--shapes", _SMALL, f"{_SMALL},mask=causal", "--peers", "sdpa"),
        *("--seconds", "0", "--csv", str(files["figures.csv"])),
        *("--plot", str(files["lines.svg"]), "--json"),
    )
    assert result.code == 0
    assert "[2/2] batch 2, seqlen 64" in result.err
    measurements = result.json["measurements"]
    assert [(x["shape"]["mask"], x["peer"]) for x in measurements] == [
        *(("none", "jitfmha"), ("none", "sdpa"), ("causal", "jitfmha"), ("causal", "sdpa"))
    ]
    rows = list(csv.DictReader(files["figures.csv"].read_text(encoding="utf-8").splitlines()))
    assert [float(row["seconds"]) for row in rows] == [x["seconds"] for x in measurements]
    assert {row["dtype"] for row in rows} == {"fp32"}
    assert b"</svg>" in files["lines.svg"].read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"figures.csv", "lines.svg"}


def _measurement(peer: str, seqlen: int, seconds: float) -> Measurement:
    shape = Shape(seqlen=seqlen, seqlen_k=seqlen)
    return Measurement(shape, peer, seconds, (0.9 * seconds, 1.2 * seconds), 0.0)


def test_roofline(tmp_path, monkeypatch):
    """The roof is the lower of both bounds, and every shape has a point."""
    saved: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, file: saved.append(figure))
    measured = [_measurement("ours", 512, 1e-3), _measurement("theirs", 1024, 2e-3)]
    plots.plot_roofline(measured, str(tmp_path / "x.png"), "here", gbytes=10.0, gflops=100.0)
    (axes,) = saved[0].axes
    x, y = axes.lines[0].get_data()
    assert all(math.isclose(b, min(100.0, 10.0 * a)) for a, b in zip(x, y, strict=True))
    points = [tuple(p) for c in axes.collections for p in c.get_offsets()]
    expected = [(m.shape.flops / m.shape.bytes, m.gflops) for m in measured]
    assert len(points) == len(expected)
    for point, there in zip(points, expected, strict=True):
        assert point == pytest.approx(there)


def test_plots_have_a_point_for_each_time(tmp_path, monkeypatch):
    file = tmp_path / "x.png"
    measured = [
        *(_measurement("ours", 1024, 4e-3), _measurement("ours", 512, 1e-3)),
        Measurement(Shape(), "theirs", refusal="not here"),
    ]
    plots.plot_over_seqlen(measured, str(file), "here")
    width, height = struct.unpack(">II", file.read_bytes()[16:24])
    assert width > height > 300
    saved: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, file: saved.append(figure))
    plots.plot_over_seqlen(measured, str(file), "here")
    line = saved[0].axes[0].lines[0]
    assert [tuple(p) for p in line.get_xydata()] == [(512, 1.0), (1024, 4.0)]
    measured = [_measurement("ours", 512, 1e-3), _measurement("theirs", 512, 3e-3)]
    plots.plot_over_seqlen(measured, str(file), "one shape alone")
    assert [bar.get_height() for bar in saved[1].axes[0].patches] == [1.0, 3.0]


def test_a_wrong_result_is_a_failure(run, monkeypatch):
    monkeypatch.setitem(PEERS, "wrong", _WRONG)
    result = run("bench", "--shapes", _SMALL, "--peers", "wrong", "--seconds", "0")
    assert result.code == 1
    assert "another result" in result.out


def test_plots_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(plots.PlotError, match="extra `plot`"):
        plots.check_plot("x.png")


def test_memory(monkeypatch):
    monkeypatch.setattr(memory, "_QUICK_BYTES", 1 << 20)
    lines: list[str] = []
    report = memory.run(True, lines.append)
    assert [figure.what for figure in report.figures] == ["read", "write", "copy, both directions"]
    assert all(figure.measured > 0 for figure in report.figures)
    assert report.met
    assert len(lines) == 3


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "x.csv"
    write_whole(file, b"first")

    def full(descriptor: int) -> None:
        os.truncate(descriptor, 2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        write_whole(file, b"second")
    monkeypatch.undo()
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file]


def test_pipes_and_links_stay_what_they_are(tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "x.csv"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"first")
    assert os.read(reading, 9) == b"first"
    os.close(reading)
    link.symlink_to(file)
    for content in (b"first", b"second"):
        write_whole(link, content)
        assert file.read_bytes() == content
    assert pipe.is_fifo()
    assert link.is_symlink()
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        write_whole(tmp_path, b"first")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "x.csv"
    file.write_bytes(bytes(9))
    assert read_regular_file(file, 9) == bytes(9)
    with pytest.raises(OSError, match="more than 8 bytes"):
        read_regular_file(file, 8)


def test_the_seed_of_inputs_is_one_for_all_peers():
    (shape,) = shapes_of(_SMALL)
    first, second = (over_peers._step(PEERS["sdpa"], shape, _CPU)() for _ in range(2))
    assert torch.equal(first[0], second[0])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_with_the_time_left(monkeypatch):
    monkeypatch.setattr(sys, "stderr", _Terminal())
    with ProgressBar() as bar:
        for done in (1, 2):
            bar.line(f"step {done}")
            bar.reach(done, 4)
        shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "step 2\n" in shown
    assert " 50% " in shown
    assert "left" in shown


def test_a_bar_counts_what_has_a_unit(monkeypatch):
    monkeypatch.setattr(sys, "stderr", _Terminal())
    with ProgressBar(unit="launchers") as bar:
        # How many there are is not known yet.
        assert " so far" in sys.stderr.getvalue()  # type: ignore[attr-defined]
        assert "launchers" not in sys.stderr.getvalue()  # type: ignore[attr-defined]
        bar.reach(7, 24)
        with status.building("one of them", ""):
            status.say("a line of its own")
        shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    status.say("the last line")
    assert "7 of 24 launchers  29% " in shown
    # Above the bar, which is drawn anew.
    assert "\rjitfmha: a line of its own\n" in shown
    assert sys.stderr.getvalue().endswith("jitfmha: the last line\n")  # type: ignore[attr-defined]


def test_lines_alone_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressBar(3) as bar:
        bar.line("step")
        bar.reach(5)
    assert sys.stderr.getvalue() == "step\n"  # type: ignore[attr-defined]
