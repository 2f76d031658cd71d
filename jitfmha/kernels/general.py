"""The general family: AMD Instinct kernels that are compiled for exactly a call's traits."""

from __future__ import annotations

from ..plan import Reason, Refusal
from ..problem import Feature, Problem
from ..target import Target

NAME = "general"
# Nothing yet, but everything is refused with a better reason than that.
SERVES = frozenset(Feature)


def propose(problem: Problem, target: Target) -> Refusal:
    """No problem is served yet."""
    return Refusal((Reason("This version has no general kernels for {target}.", target=target),))
