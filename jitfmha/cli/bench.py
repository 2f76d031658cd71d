"""``python -m jitfmha bench``: every bar of a suite beside what was measured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..bench import SUITES, run_suite
from ..bench.rig_suites import RigsNotFound
from .exit_codes import FAILED, OK, UsageError
from .output import add_json_flag, fields, print_json, progress, table

if TYPE_CHECKING:
    from ..bench.report import Report, Row


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "bench",
        help="measure a suite and hold it against its bars",
        description="Run a benchmark suite. The exit code is 1 when a bar is missed.",
    )
    parser.add_argument(
        "--suite",
        default="cpu",
        choices=SUITES,
        help="; ".join(f"{name}: {what}" for name, what in SUITES.items()) + " (default: cpu)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only a part of the suite, for a first impression"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the suite and print its report."""
    try:
        report = run_suite(args.suite, quick=args.quick, progress=progress)
    except RigsNotFound as error:
        raise UsageError(str(error)) from None
    if args.json:
        print_json(report.to_dict())
    else:
        _print(report)
    return OK if report.met else FAILED


def _print(report: Report) -> None:
    print(fields(list(report.machine.items())))
    print()
    if report.comparisons:
        print(
            table(
                ("problem", "ms", "GFLOP/s", "against", "its ms", "speed", "difference"),
                [
                    (
                        x.what,
                        f"{x.seconds * 1e3:.3f}",
                        f"{x.gflops:.1f}",
                        x.against,
                        f"{x.against_seconds * 1e3:.3f}",
                        f"{x.speedup:.2f}x",
                        f"{x.error:.1e}",
                    )
                    for x in report.comparisons
                ],
            )
        )
        print()
    print(
        table(
            ("what", "measured", "bar", "met"),
            [
                (row.what, _figure(row.measured, row), _bar(row), "yes" if row.met else "NO")
                for row in report.rows
            ],
        )
    )


def _bar(row: Row) -> str:
    return f"{'>=' if row.at_least else '<='} {_figure(row.bar, row)}"


def _figure(value: float, row: Row) -> str:
    if row.unit == "x":
        return f"{value:.2f}x"
    return f"{value:.1f} {row.unit}"
