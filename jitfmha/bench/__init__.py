"""Benchmark suites, ``python -m jitfmha bench``: they print every bar beside what was measured.

A suite is a module with ``run(quick, progress)`` that returns a
:class:`~jitfmha.bench.report.Report`. Times of two sides always come from one process and
alternate, because a shared machine drifts; a result is checked before it is timed.
"""

from __future__ import annotations

from importlib import import_module

from .report import Progress, Report, Suite
from .rig_suites import RIG_SUITES, rig_suite

SUITES = {
    "cpu": "the CPU kernel against torch's attention, and what first calls cost",
    "emulator": "how fast the emulator executes, what its checks cost, and its build",
    "amd-model": "the tuned kernels by the emulator's cost model, and the launcher",
    "cache": "the build cache under faults of clusters and of shared disks (from a checkout)",
    "launcher": "what the host pays for a call on an AMD GPU (from a checkout)",
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


def run_suite(name: str, *, quick: bool, progress: Progress) -> Report:
    """Run one suite of ``SUITES``; ``quick`` measures a part of it, in seconds.

    ``progress`` gets a line for each step. Raises ``RuntimeError`` for a wrong result, and as
    :func:`suite` does.
    """
    return suite(name)(quick, progress)
