"""The cache suite: faults of clusters and of shared disks, and what must hold in spite of them."""

import os
import platform
import time

from jitfmha.bench.report import Progress, Report

from .cache_faults import FAULTS, Extent, Outcome, scenario


def run(quick: bool, progress: Progress) -> Report:
    """Run every scenario; ``quick`` runs their short forms."""
    extent = Extent.SHORT if quick else Extent.LONG
    report = Report("cache", _machine(extent))
    for name, what in FAULTS.items():
        started = time.perf_counter()
        outcome = scenario(name)(extent, progress, None)
        _add(report, what, outcome)
        progress(
            f"{what}: {len(outcome.failures)} failures in {outcome.attempts} checks, "
            f"{time.perf_counter() - started:.0f} s"
        )
        for failure in outcome.failures[:10]:
            progress(f"  {failure}")
    report.machine["load"] = f"{os.getloadavg()[0]:.1f} (1 minute average at the end)"
    return report


def _add(report: Report, what: str, outcome: Outcome) -> None:
    label = f"{what} ({outcome.attempts} checks)"
    report.at_most(label, len(outcome.failures), 0, "failures")
    report.rows += outcome.figures


def _machine(extent: Extent) -> dict[str, str]:
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "processors": str(os.cpu_count()),
        "extent": extent.value,
    }
