"""The general family: AMD Instinct kernels that are compiled for exactly a call's traits."""

from __future__ import annotations

from typing import NoReturn

from ..problem import Problem
from ..target import AmdTarget, Target

NAME = "general"


def reasons_not(problem: Problem, target: Target) -> list[str]:
    """Why the general kernels do not serve ``problem``."""
    if not isinstance(target, AmdTarget):
        return [f"It needs an AMD Instinct GPU (gfx942 or gfx950); the target is {target}."]
    return [f"This version has no general kernels for {target.arch}."]


def remarks(problem: Problem, target: Target) -> list[str]:
    """Nothing is found on a disk, so nothing is odd."""
    return []


def plan(problem: Problem, target: Target) -> NoReturn:
    """No problem is served yet, so none can be planned."""
    raise NotImplementedError(f"the general family has no kernel for {target}")
