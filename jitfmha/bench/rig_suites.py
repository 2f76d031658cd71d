"""The suites that stand on the test rigs, ``op_tests/rigs``, which a checkout alone has."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from .report import Suite

RIG_SUITES = {"cache": "rigs.cache_suite", "launcher": "rigs.launcher_suite"}
_FOLDER = Path(__file__).resolve().parents[2] / "op_tests"


class RigsNotFound(Exception):
    """The package runs from an installation without test rigs; the message says how to get them."""


def rig_suite(name: str) -> Suite:
    """The ``run(quick, progress)`` of one of ``RIG_SUITES``.

    Raises:
        RigsNotFound: this package is not that of a checkout.
    """
    if not (_FOLDER / "rigs").is_dir():
        raise RigsNotFound(
            f"the suite {name!r} needs the test rigs of a checkout, which no wheel carries (there "
            f"is no {_FOLDER / 'rigs'}); get the source of this package and run "
            f"`python -m jitfmha bench --suite {name}` in its root folder"
        )
    if str(_FOLDER) not in sys.path:
        sys.path.insert(0, str(_FOLDER))
    run: Suite = import_module(RIG_SUITES[name]).run
    return run
