"""The general family: AMD Instinct kernels that are compiled for exactly a call's traits."""

from __future__ import annotations

from ..plan import Reason, Refusal
from ..problem import Feature, Problem
from ..target import AmdTarget, Target

NAME = "general"
SERVES: frozenset[Feature] = frozenset()


def refusal_of_target(target: Target) -> Refusal:
    """There are no general kernels yet, and they will be for AMD Instinct GPUs only."""
    if isinstance(target, AmdTarget):
        template = "This version has no general kernels for {target}."
    else:
        template = "It needs an AMD Instinct GPU (gfx942 or gfx950); the target is {target}."
    return Refusal((Reason(template, target=target),))


def propose(problem: Problem, target: Target) -> Refusal:
    """No problem is served yet."""
    return refusal_of_target(target)
