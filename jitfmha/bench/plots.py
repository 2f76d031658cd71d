"""Draws measurements: time and speed over the sequence length, and a roofline.

matplotlib is an optional dependency, the extra ``plot``.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..jit.regular_file import write_whole
from .over_peers import Measurement

FORMATS = ("png", "svg", "pdf")
_INCHES = (10.0, 4.2)


class PlotError(RuntimeError):
    """A plot was asked for that cannot be made; the message says what is missing."""


def check_plot(file: str) -> None:
    """Ask before anything is measured whether ``file`` can be drawn. Raises ``PlotError`` where its
    name has another ending than ``FORMATS``, or matplotlib is not installed.
    """
    if Path(file).suffix[1:].lower() not in FORMATS:
        raise PlotError(f"{file!r} does not end in {', '.join(f'.{x}' for x in FORMATS)}")
    _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            f"plots need matplotlib ({error}); install it, or this package with its extra `plot`"
        ) from None
    return Figure


def plot_over_seqlen(measurements: Sequence[Measurement], file: str, title: str) -> None:
    """Milliseconds and GFLOP/s over the sequence length of the keys, a line for each peer.

    Bars show the quartiles. Shapes of one length that differ in something else share a line. Where
    there is one shape alone, each peer has a column.
    """
    figure = _figure_class()(figsize=_INCHES, layout="constrained")
    milliseconds, speeds = figure.subplots(1, 2)
    milliseconds.set_ylabel("milliseconds, median and quartiles")
    speeds.set_ylabel("GFLOP/s")
    draw = _columns if len({each.shape for each in measurements}) == 1 else _lines
    draw(measurements, milliseconds, speeds)
    for axes in (milliseconds, speeds):
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    _save(figure, file)


def _columns(measurements: Sequence[Measurement], milliseconds: Any, speeds: Any) -> None:
    for peer, (row,) in _by_peer(measurements).items():
        milliseconds.bar(peer, 1e3 * _seconds(row), yerr=_bars([row]), capsize=2)
        speeds.bar(peer, row.gflops)


def _lines(measurements: Sequence[Measurement], milliseconds: Any, speeds: Any) -> None:
    for peer, rows in _by_peer(measurements).items():
        lengths = [row.shape.seqlen_k for row in rows]
        times = [1e3 * _seconds(row) for row in rows]
        milliseconds.errorbar(
            lengths, times, yerr=_bars(rows), label=peer, marker="o", markersize=4, capsize=2
        )
        speeds.plot(lengths, [row.gflops for row in rows], label=peer, marker="o", markersize=4)
    milliseconds.set_yscale("log")
    _number(milliseconds.yaxis)
    speeds.set_ylim(0, None)
    for axes in (milliseconds, speeds):
        axes.set_xlabel("sequence length")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    speeds.legend(fontsize="small")


def _number(axis: Any) -> None:
    """Write numbers at 1, 2 and 5 times a power of ten: times may lie between two powers."""
    from matplotlib.ticker import LogLocator  # an optional dependency

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def plot_roofline(
    measurements: Sequence[Measurement], file: str, title: str, *, gbytes: float, gflops: float
) -> None:
    """GFLOP/s over operations per byte, below what memory (``gbytes``) and matrix products allow.

    ``measurements`` are of shapes of one data type, in which the products give ``gflops``.
    """
    figure = _figure_class()(figsize=(_INCHES[0] * 0.6, _INCHES[1]), layout="constrained")
    axes = figure.subplots()
    intensities = [m.shape.flops / m.shape.bytes for m in measurements if m.seconds is not None]
    ridge = gflops / gbytes
    ends = [min([ridge / 8, *intensities]) / 2, max([ridge * 8, *intensities]) * 2]
    roof = sorted({*ends, ridge})
    label = f"{gbytes:.0f} GB/s of memory, {gflops:.0f} GFLOP/s of torch.mm"
    axes.plot(roof, [min(gflops, gbytes * x) for x in roof], color="black", label=label)
    for peer, rows in _by_peer(measurements).items():
        axes.scatter(
            [row.shape.flops / row.shape.bytes for row in rows],
            [row.gflops for row in rows],
            label=peer,
            s=20,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    _save(figure, file)


def _by_peer(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    by_peer: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.seconds is not None:
            by_peer.setdefault(measurement.peer, []).append(measurement)
    for rows in by_peer.values():
        rows.sort(key=lambda row: row.shape.seqlen_k)
    return by_peer


def _seconds(measurement: Measurement) -> float:
    assert measurement.seconds is not None
    return measurement.seconds


def _bars(rows: Sequence[Measurement]) -> list[list[float]]:
    """How far the quartiles are from the median, below and above, in milliseconds."""
    below, above = [], []
    for row in rows:
        first, third = row.quartiles or (_seconds(row), _seconds(row))
        below.append(1e3 * (_seconds(row) - first))
        above.append(1e3 * (third - _seconds(row)))
    return [below, above]


def _save(figure: Any, file: str) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(file).suffix[1:].lower(), dpi=150)
    write_whole(Path(file), drawn.getvalue())
