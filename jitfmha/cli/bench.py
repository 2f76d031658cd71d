"""``python -m jitfmha bench``: suites beside their bars, and shapes beside other packages."""

from __future__ import annotations

import argparse
import csv
import io
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..bench import SUITES, gemm, rows, run_suite
from ..bench.memory import bandwidths, peak_gflops
from ..bench.over_peers import Measurement, measure
from ..bench.peers import PEERS, Peer
from ..bench.plots import PlotError, check_plot, plot_over_seqlen, plot_roofline
from ..bench.report import Comparison, Report, Row, SuiteNotAvailable
from ..bench.shapes import Shape, shapes_of
from ..bench.sizes import Sizes
from ..emulator.session import named_device
from ..jit.regular_file import write_whole
from .exit_codes import FAILED, OK, UsageError
from .output import ProgressBar, fields, print_json, show, table

_OF_SHAPES = ("peers", "device", "seconds", "csv", "plot", "roofline")
_SIZES = {"rows": "MN", "gemm": "MNK"}
_OF_SIZES = ("M", "N", "K", "dtype", "layout", "compiled")
_DTYPES_OF_ROWS = ("fp32", "bf16", "fp16")


def run(args: argparse.Namespace) -> int:
    """Run the suite or the shapes, and print the report."""
    if args.shapes is not None and len(args.shapes) == 1 and args.shapes[0] in _SIZES:
        return _run_sizes(args, args.shapes[0])
    for name in _OF_SIZES:
        if getattr(args, name):
            raise UsageError(f"{_flag(name)} is for --shapes rows and gemm alone")
    if args.shapes is not None:
        return _run_shapes(args)
    for name in _OF_SHAPES:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for --shapes alone, got {getattr(args, name)!r}")
    suite = SUITES[args.suite]
    if args.threads is not None and (args.threads < 1 or not suite.takes_threads):
        takers = " and ".join(name for name, each in SUITES.items() if each.takes_threads)
        raise UsageError(
            f"--threads must be at least 1, and is for the suites {takers}; got "
            f"{args.threads} and {args.suite!r}"
        )
    usual = 60 * (suite.quick_minutes if args.quick else suite.minutes)
    with ProgressBar(usual) as bar:
        start = time.monotonic()

        def step(text: str) -> None:
            bar.line(text)
            bar.reach(time.monotonic() - start)

        try:
            report = run_suite(
                args.suite,
                quick=args.quick,
                progress=step,
                threads=args.threads,
            )
        except SuiteNotAvailable as error:
            raise UsageError(str(error)) from None
    return _tell(args, report)


def _tell(args: argparse.Namespace, report: Report) -> int:
    if args.json:
        print_json(report.to_dict())
    else:
        _print(report)
    return OK if report.met else FAILED


def _run_sizes(args: argparse.Namespace, kind: str) -> int:
    """Of all that -M, -N and -K make together."""
    for name in ("quick", "threads", *(x for x in _OF_SHAPES if x != "device")):
        if getattr(args, name) not in (None, False):
            raise UsageError(f"--{name} is not for --shapes {kind}")
    names = _SIZES[kind]
    given = [name for name in "MNK" if getattr(args, name)]
    if given != list(names):
        needed = " and ".join(f"-{name}" for name in names)
        raise UsageError(f"--shapes {kind} needs {needed}, got {given or 'none'}")
    if kind == "rows" and (args.layout or set(args.dtype or ()) - set(_DTYPES_OF_ROWS)):
        raise UsageError(f"--shapes rows has no --layout, and --dtype of {_DTYPES_OF_ROWS}")
    is_here = args.device in (None, "cpu")
    try:
        device = None if is_here else named_device(args.device, "--device")
        shapes = list(product(*(getattr(args, name) for name in names)))
        layouts = args.layout or ("nt",)
        sizes = Sizes(shapes, args.dtype or (), layouts, args.compiled, device)
        with ProgressBar(len(shapes)) as bar:
            report = {"rows": rows.run, "gemm": gemm.run}[kind](False, bar.line, sizes)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    return _tell(args, report)


def _run_shapes(args: argparse.Namespace) -> int:
    if args.quick or args.threads is not None:
        raise UsageError("--quick and --threads are for suites, not for --shapes")
    seconds = 2.0 if args.seconds is None else args.seconds
    if not 0 <= seconds <= 3600:
        raise UsageError(f"--seconds must be from 0 to 3600, got {args.seconds}")
    shapes, peers = _shapes(args.shapes), _peers(args.peers)
    _check_files(args, shapes)
    device = _device(args.device)
    measurements: list[Measurement] = []
    with ProgressBar(len(shapes)) as bar:
        for number, shape in enumerate(shapes, 1):
            of_shape = measure(shape, peers, device, seconds=seconds)
            measurements += of_shape
            bar.line(f"[{number}/{len(shapes)}] {shape}: {_in_words(of_shape)}")
            bar.reach(number)
    where = f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    _write_files(args, measurements, device, where)
    if args.json:
        print_json({"device": where, "measurements": [_values(x) for x in measurements]})
    else:
        show(f"{where}\n")
        _print_measurements(measurements)
    is_wrong = any(x.difference is not None and x.seconds is None for x in measurements)
    return FAILED if is_wrong else OK


def _flag(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _shapes(texts: list[str]) -> list[Shape]:
    try:
        return [shape for text in texts for shape in shapes_of(text)]
    except (ValueError, OSError) as error:
        raise UsageError(f"--shapes: {error}") from None


def _peers(names: list[str] | None) -> list[Peer]:
    if names is None:
        return [peer for peer in PEERS.values() if peer.is_installed]
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--peers {name!r} is not known; use {', '.join(PEERS)}")
        if not PEERS[name].is_installed:
            raise UsageError(f"--peers {name!r} is not installed")
    return [PEERS[name] for name in dict.fromkeys(names)]


def _check_files(args: argparse.Namespace, shapes: list[Shape]) -> None:
    """Refuse bad files before hours are spent on measuring."""
    for file in (args.plot, args.roofline):
        if file is not None:
            try:
                check_plot(file)
            except PlotError as error:
                raise UsageError(str(error)) from None
    dtypes = {shape.dtype for shape in shapes}
    if args.roofline is not None and len(dtypes) > 1:
        raise UsageError(f"--roofline is of one data type, got {', '.join(sorted(dtypes))}")


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name!r}: {str(error).splitlines()[0]}") from None
    return device


def _in_words(measurements: list[Measurement]) -> str:
    ours, *others = measurements
    assert ours.seconds is not None
    speeds = [
        f"{other.seconds / ours.seconds:.2f}x {other.peer}"
        for other in others
        if other.seconds is not None
    ]
    return ", ".join((f"{1e3 * ours.seconds:.3f} ms", *speeds))


def _values(measurement: Measurement) -> dict[str, Any]:
    return {**asdict(measurement), "gflops": measurement.gflops}


def _print_measurements(measurements: list[Measurement]) -> None:
    rows = []
    for x in measurements:
        if x.seconds is None or x.quartiles is None:
            rows.append((str(x.shape), x.peer, "-", "-", "-", x.refusal))
            continue
        first, third = x.quartiles
        spread = f"{1e3 * first:.3f} to {1e3 * third:.3f}"
        rows.append((str(x.shape), x.peer, f"{1e3 * x.seconds:.3f}", f"{x.gflops:.1f}", spread, ""))
    show(table(("shape", "by", "median ms", "GFLOP/s", "quartiles ms", "not run"), rows))


def _write_files(
    args: argparse.Namespace, measurements: list[Measurement], device: torch.device, where: str
) -> None:
    if args.csv is not None:
        write_whole(Path(args.csv), _csv(measurements).encode())
    if args.plot is not None:
        plot_over_seqlen(measurements, args.plot, where)
    if args.roofline is not None:
        gbytes = bandwidths(device, 1 << 30, seconds=2.0)["read"]
        gflops = peak_gflops(device, measurements[0].shape.torch_dtype, seconds=2.0)
        plot_roofline(measurements, args.roofline, where, gbytes=gbytes, gflops=gflops)


def _csv(measurements: list[Measurement]) -> str:
    text = io.StringIO()
    names = [*asdict(measurements[0].shape), "peer", "seconds", "first_quartile", "third_quartile"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "gflops", "difference", "refusal"])
    for x in measurements:
        quartiles = ("", "") if x.quartiles is None else x.quartiles
        values = [*asdict(x.shape).values(), x.peer, x.seconds, *quartiles]
        writer.writerow([*values, x.gflops, x.difference, x.refusal])
    return text.getvalue()


def _print(report: Report) -> None:
    show(fields(list(report.machine.items())))
    show()
    if report.comparisons:
        headers = ("problem", "ms", "GFLOP/s", "against", "its ms", "median ratio", "difference")
        show(table(headers, [_compared(x) for x in report.comparisons]) + "\n")
    if report.figures:
        figures = [(x.what, f"{x.measured:.1f} {x.unit}") for x in report.figures]
        show(table(("what", "measured"), figures))
    if report.rows:
        show(table(("what", "measured", "bar", "met"), [_beside_its_bar(x) for x in report.rows]))


def _compared(x: Comparison) -> tuple[str, ...]:
    ours, theirs = (f"{seconds * 1e3:.3f}" for seconds in (x.seconds, x.against_seconds))
    speed, difference = f"{x.speedup:.2f}x", f"{x.error:.1e}"
    return x.what, ours, f"{x.gflops:.1f}", x.against, theirs, speed, difference


def _beside_its_bar(row: Row) -> tuple[str, ...]:
    bar = f"{'>=' if row.at_least else '<='} {_figure(row.bar, row)}"
    return row.what, _figure(row.measured, row), bar, "yes" if row.met else "NO"


def _figure(value: float, row: Row) -> str:
    if row.unit == "x":
        return f"{value:.2f}x"
    return f"{value:.1f} {row.unit}"
