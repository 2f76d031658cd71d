"""Benchmark suites, ``python -m jitfmha bench``: they print every bar beside what was measured.

A suite is a module with ``run(quick, progress)`` that returns a
:class:`~jitfmha.bench.report.Report`. Those that a user runs are here; those that hold attention,
the emulator and the build cache against their bars are among the test rigs of a checkout, as
``op_tests/rigs/NAME_suite.py``. Times of two sides always come from one process and alternate,
because a shared machine drifts; a result is checked before it is timed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .report import Progress, Report, Suite, SuiteNotAvailable


@dataclass(frozen=True)
class SuiteInTheList:
    """A suite before it is imported: what it measures, and for how long on two cores of a server.

    ``from_checkout`` ones are among the test rigs, which no wheel carries; ``takes_threads`` says
    whether their number may be given.
    """

    what: str
    minutes: float
    quick_minutes: float
    from_checkout: bool = True
    takes_threads: bool = False


SUITES = {
    "cpu": SuiteInTheList(
        "the CPU kernel against torch's attention, and what first calls cost",
        *(9, 2),
        takes_threads=True,
    ),
    "cpu-drawn": SuiteInTheList(
        "60 calls of the CPU kernel drawn at random against torch's attention, with gradients, too",
        *(8, 0.6),
    ),
    "models": SuiteInTheList(
        "BERT, ViT and Llama on the CPU with our attention against the same with torch's, in bf16",
        *(12, 0.2),
        takes_threads=True,
    ),
    "memory": SuiteInTheList(
        "what the device's memory gives: read, write, copy", 0.3, 0.15, from_checkout=False
    ),
    "rows": SuiteInTheList(
        "softmax, RMSNorm and LayerNorm over rows on the CPU against torch's",
        *(2, 0.3),
        from_checkout=False,
    ),
    "gemm": SuiteInTheList(
        "products of matrices on the CPU against torch's",
        *(0.7, 0.1),
        from_checkout=False,
    ),
    "emulator": SuiteInTheList(
        "how fast the emulator executes, what its checks cost, and its build", 6, 1
    ),
    "amd-model": SuiteInTheList(
        "the ready kernels by the emulator's cost model, and the launcher", 90, 15
    ),
    "published-times": SuiteInTheList(
        "the cost model against times that others published of AITER's kernels, whose tree "
        "JITFMHA_HSA_DIR names",
        *(120, 10),
    ),
    "cache": SuiteInTheList("the build cache under faults of clusters and of shared disks", 40, 5),
    "launcher": SuiteInTheList("what the host pays for a call on an AMD GPU", 3, 0.7),
}
_CHECKOUT = Path(__file__).resolve().parents[2]


def suite(name: str) -> Suite:
    """The ``run(quick, progress)`` of a suite, which may take more, as :func:`run_suite` says.

    Raises ``SuiteNotAvailable`` if a checkout is missing.
    """
    module = name.replace("-", "_")
    run: Suite
    if not SUITES[name].from_checkout:
        run = import_module(f".{module}", __name__).run
        return run
    tests = _CHECKOUT / "op_tests"
    if not (tests / "rigs").is_dir():
        installed = " and ".join(name for name, each in SUITES.items() if not each.from_checkout)
        raise SuiteNotAvailable(
            f"the suite {name!r} needs the test rigs of a checkout, which no wheel carries (there "
            f"is no {tests / 'rigs'}); get the source of this package and run "
            f"`python -m jitfmha bench --suite {name}` in its root folder. --shapes and the suites "
            f"{installed} need none"
        )
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    run = import_module(f"rigs.{module}_suite").run
    return run


def run_suite(
    name: str,
    *,
    quick: bool,
    progress: Progress,
    threads: int | None = None,
) -> Report:
    """Run one suite of ``SUITES``; ``quick`` measures a part of it, in seconds.

    ``progress`` gets a line for each step, and ``threads`` is for suites that take them.
    Raises ``RuntimeError`` for a wrong result, and as :func:`suite` does.
    """
    if threads is None:
        return suite(name)(quick, progress)
    if not SUITES[name].takes_threads:
        raise ValueError(f"the suite {name!r} has threads of its own, got threads={threads}")
    return suite(name)(quick, progress, threads)
