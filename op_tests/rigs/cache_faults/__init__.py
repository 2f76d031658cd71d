"""Faults that a build cache meets on clusters, each as a scenario that can be run and counted.

A scenario is a module of this package with ``run(trial)``, or with
``run_inside(sandbox, extent)``, which runs in processes of its own for at most ``LIMIT_SECONDS``.
The suite ``cache`` prints what each found, and ``op_tests/cache/`` runs the same code over a
shorter extent.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from .callers import Trial
from .outcome import Extent, Outcome
from .sandbox import run_in_sandbox

__all__ = ["FAULTS", "Extent", "Outcome", "scenario"]

FAULTS = {
    "first_calls_at_once": "many processes make the first call at once on an empty cache",
    "killed_builders": "the builder gets SIGKILL at a random moment",
    "readers": "readers load while others publish, rebuild and evict",
    "interruptions": "fork, threads, interpreter shutdown and KeyboardInterrupt during a build",
    "damaged_files": "files of an entry truncated, zero-filled, or with one bit flipped",
    "no_space": "disk full, quota, read-only or missing home, unwritable cache, no /tmp",
    "other_hands": "a cache that others own or can write to, and planted symbolic links",
    "without_locks": "a file system without locks",
    "clocks": "clock jumps and delayed modification times",
    "upgrades": "compiler, torch, package, template or CPU changed under a shared home",
    "limit": "a cache that grows past its limit",
    "hostile_environment": "spaces, quotes and newlines in paths, a compiler with arguments",
}


def scenario(name: str) -> Callable[[Extent, Callable[[str], None], int | None], Outcome]:
    """How one of ``FAULTS`` runs; without a seed it takes a fresh one, and reports it."""
    module = import_module(f".{name}", __name__)
    if hasattr(module, "run_inside"):
        return partial(run_in_sandbox, module.__name__, module.LIMIT_SECONDS)

    def run(extent: Extent, progress: Callable[[str], None], seed: int | None) -> Outcome:
        trial = Trial(name, extent, progress, seed)
        module.run(trial)
        return trial.outcome

    return run
