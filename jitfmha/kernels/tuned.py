"""The tuned family: code objects of ``hsa/`` for AMD Instinct GPUs, built ahead."""

from __future__ import annotations

from typing import NoReturn

from ..problem import Problem
from ..target import AmdTarget, Target

NAME = "tuned"


def reasons_not(problem: Problem, target: Target) -> list[str]:
    """Why the tuned code objects do not serve ``problem``."""
    if not isinstance(target, AmdTarget):
        return [f"It needs an AMD Instinct GPU (gfx942 or gfx950); the target is {target}."]
    return [f"This version ships no code objects for {target.arch}."]


def plan(problem: Problem, target: Target) -> NoReturn:
    """No problem is served yet, so none can be planned."""
    raise NotImplementedError(f"the tuned family has no kernel for {target}")
