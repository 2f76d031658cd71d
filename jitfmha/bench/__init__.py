"""Benchmark suites, ``python -m jitfmha bench``: they print every bar beside what was measured.

A suite is a module with ``run(quick, progress)`` that returns a
:class:`~jitfmha.bench.report.Report`. Times of two sides always come from one process and
alternate, because a shared machine drifts; a result is checked before it is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .report import Progress, Report, Suite
from .rig_suites import RIG_SUITES, rig_suite


@dataclass(frozen=True)
class SuiteInTheList:
    """A suite before it is imported.

    Attributes:
        what: what it measures.
        minutes, quick_minutes: how long it takes on two cores of a server, whole and in part.
    """

    what: str
    minutes: float
    quick_minutes: float


SUITES = {
    "cpu": SuiteInTheList(
        "the CPU kernel against torch's attention, and what first calls cost", 9, 2
    ),
    "memory": SuiteInTheList("what the device's memory gives: read, write, copy", 0.3, 0.15),
    "emulator": SuiteInTheList(
        "how fast the emulator executes, what its checks cost, and its build", 6, 1
    ),
    "amd-model": SuiteInTheList(
        "the tuned kernels by the emulator's cost model, and the launcher", 90, 15
    ),
    "published-times": SuiteInTheList(
        "the cost model against times that others published of AITER's kernels, whose tree "
        "JITFMHA_HSA_DIR names",
        *(120, 10),
    ),
    "cache": SuiteInTheList(
        "the build cache under faults of clusters and of shared disks (from a checkout)", 40, 5
    ),
    "launcher": SuiteInTheList(
        "what the host pays for a call on an AMD GPU (from a checkout)", 3, 0.7
    ),
}


def suite(name: str) -> Suite:
    """The ``run(quick, progress)`` of one of ``SUITES``.

    Raises:
        RigsNotFound: it needs the test rigs of a checkout, and this is none.
    """
    if name in RIG_SUITES:
        return rig_suite(name)
    run: Suite = import_module(f".{name.replace('-', '_')}", __name__).run
    return run


def run_suite(name: str, *, quick: bool, progress: Progress, threads: int | None = None) -> Report:
    """Run one suite of ``SUITES``; ``quick`` measures a part of it, in seconds.

    ``progress`` gets a line for each step, and ``threads`` is for the suite ``cpu`` alone (None:
    2). Raises ``RuntimeError`` for a wrong result, and as :func:`suite` does.
    """
    if threads is None:
        return suite(name)(quick, progress)
    if name != "cpu":
        raise ValueError(f"the suite {name!r} has threads of its own, got threads={threads}")
    from . import cpu  # The command line is fast without it.

    return cpu.run(quick, progress, threads)
