"""Which backward passes a tree of code objects serves, and the plan for one.

Trees are asked in order: the first that has kernels for the problem, whose strides and known faults
are not in the way, and whose code objects are what they should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from ...amd.manifest import AiterBackwardRow, AiterKind
from ...amd.tree import Tree
from ...planning.plan import Launch, Reason, Refusal
from ...planning.specification import Algorithm, Stage
from ...planning.target import AmdTarget, Target
from ...problem.features import Feature
from ...problem.problem import PlainSizes, Problem
from ..amd_plan import AmdPlan, version_of
from ..backward_estimate import backward_seconds
from ..ready.limits import DTYPE_RULE, PACKED_MASK_RULE, SIZE_RULES
from ..rules import ATTENTION, BACKWARD, reasons_of
from .choice import BackwardChoice, choose, reasons_of_problem
from .launch import AiterBackwardLaunch
from .layouts import reasons_of_strides

NAME = "aiter"
SERVES = ATTENTION | BACKWARD | {Feature.BF16, Feature.FP16, Feature.WINDOW_MASK}


def propose(problem: Problem, target: Target) -> tuple[AiterBackwardPlan] | Refusal:
    """The kernels of the first tree that serves ``problem``."""
    assert isinstance(target, AmdTarget)
    for tree in target.trees:
        tree.warn_of(tree.aiter_backward)
    broken = reasons(problem, target)
    if broken:
        return Refusal(broken)
    passed_over: list[Reason] = []
    for tree in _trees(target):
        found = choose(tree, problem, target)
        if isinstance(found, BackwardChoice):
            why = (*passed_over, *found.passed_over)
            return (AiterBackwardPlan(problem, target, found, why),)
        passed_over.append(found)
    return Refusal(tuple(passed_over))


def reasons(problem: Problem, target: Target) -> tuple[Reason, ...]:
    """Every rule that ``problem`` breaks, whatever features it asks for."""
    assert isinstance(target, AmdTarget)
    if not _trees(target):
        template = (
            "No tree of code objects has backward kernels for {arch}; JITFMHA_HSA_DIR can name one."
        )
        return (Reason(template, arch=target.arch),)
    return (
        *reasons_of((DTYPE_RULE, *SIZE_RULES, PACKED_MASK_RULE), problem, target.arch),
        *reasons_of_strides(problem),
        *reasons_of_problem(problem, target),
    )


def _trees(target: AmdTarget) -> list[Tree]:
    """The trees with kernels, or with manifests of some that cannot be used."""
    return [
        tree for tree in target.trees if tree.aiter_backward.rows or tree.aiter_backward.left_out
    ]


_STAGES: Mapping[AiterKind, str] = {
    "odo": "bwd_dot_do_o",
    "dqdkdv": "bwd_dq_dk_dv",
    "dq_convert": "bwd_convert_dq",
    "dq_shuffle": "bwd_convert_dq",
}


class AiterBackwardPlan(AmdPlan):
    """The code objects for one backward pass, of exactly these lengths and strides."""

    family = NAME

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        choice: BackwardChoice,
        passed_over: tuple[Reason, ...],
    ) -> None:
        row = choice.row
        super().__init__(problem, target, "aiter", row.name, f"{row.file} of {choice.tree}")
        self.is_named = not choice.tree.is_shipped
        self.choice = choice
        self.passed_over = passed_over

    @cached_property
    def version(self) -> str:
        return version_of(code_object for _, code_object in self.choice.kernels)

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float:
        return backward_seconds(
            *(self.problem, self.target, "aiter", self.choice.row.ts, seqlen_q, seqlen_k),
            edges=len(self.choice.kernels) - 1,
            has_lines_of_queries=True,
        )

    def rows(self) -> tuple[AiterBackwardRow, ...]:
        return tuple(row for row, _ in self.choice.kernels)

    def stages(self) -> tuple[Stage, ...]:
        return tuple(Stage(_STAGES[row.kind], row.name, Algorithm(NAME)) for row in self.rows())

    def remarks(self) -> list[str]:
        odd = [oddity for tree in self.target.trees for oddity in tree.aiter_backward.oddities]
        return [*odd, *(str(reason) for reason in self.passed_over)]

    def bind(self) -> None:
        self._launch = AiterBackwardLaunch(self.problem, self.target, self.choice)

    def launch_for(self, sizes: PlainSizes) -> Launch:
        assert self.serves(sizes)
        return self._launch
