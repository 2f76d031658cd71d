"""Which backward passes the code objects of this package serve, and the plan for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....planning.plan import Kernel, Reason, Refusal
from ....planning.target import AmdTarget, Target
from ....problem.features import Feature
from ....problem.problem import Problem
from ...ready_plan import PlanOfCodeObjects
from ...rules import reasons_of
from .choice import chosen_row
from .limits import RULES

if TYPE_CHECKING:
    from ....amd.code_object import CodeObject
    from ....amd.manifest import KernelRow, ReadyBackwardRow
    from ....amd.tree import Tree

NAME = "ready"
SERVES = frozenset(
    {
        Feature.BF16,
        Feature.FP16,
        Feature.GROUP_MODE,
        Feature.PADDED_SEQUENCES,
        Feature.CAUSAL_MASK,
        Feature.WINDOW_MASK,
        Feature.TOP_LEFT_MASK,
        Feature.LSE,
        Feature.BACKWARD,
        Feature.DETERMINISTIC,
    }
)


def reasons(problem: Problem, target: Target) -> tuple[Reason, ...]:
    """Every rule that ``problem`` breaks, whatever features it asks for."""
    assert isinstance(target, AmdTarget)
    return tuple(reasons_of(RULES, problem, target.arch))


def propose(problem: Problem, target: Target) -> ReadyBackwardPlan | Refusal:
    """The code object for ``problem``."""
    assert isinstance(target, AmdTarget)
    broken = reasons(problem, target)
    if broken:
        return Refusal(broken)
    passed_over: list[Reason] = []
    for tree in target.trees:
        tree.warn_of(tree.ready_backward)
        passed_over += (Reason("{oddity}", oddity=x) for x in tree.ready_backward.why_empty)
        if not tree.ready_backward.rows:
            continue
        row = chosen_row(tree, problem, target)
        if row is None:
            template = "{tree}: none for {dtype} and hdim {hdim_q}x{hdim_v}."
            values = {"dtype": problem.dtype, "hdim_q": problem.hdim_q, "hdim_v": problem.hdim_v}
            passed_over.append(Reason(template, tree=tree, **values))
            continue
        code_object = tree.code_object(row)
        if not isinstance(code_object, Exception):
            return ReadyBackwardPlan(problem, target, tree, row, code_object)
        passed_over.append(Reason("{tree}: {error}", tree=tree, error=code_object))
    template = "No tree has code objects of backward kernels of ours for {arch}."
    return Refusal(tuple(passed_over) or (Reason(template, arch=target.arch),))


class ReadyBackwardPlan(PlanOfCodeObjects):
    """The code object for one backward pass."""

    family = NAME
    block = "ready"

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        tree: Tree,
        row: ReadyBackwardRow,
        code_object: CodeObject,
    ) -> None:
        self.problem = problem
        self.target = target
        self.tree = tree
        self.row = row
        self.code_object = code_object

    @property
    def kernel(self) -> str:
        """The name of the kernel that makes the gradients."""
        return self.row.symbol

    @property
    def source(self) -> str:
        """The file of the code object."""
        return f"{self.row.file} of {self.tree}"

    def rows(self) -> tuple[KernelRow, ...]:
        """Of its kernels, in the order of their launches."""
        from .kernel import kernels_of

        return tuple(kernel.row for kernel in kernels_of(self.row))

    def remarks(self) -> list[str]:
        """What is odd in the trees, and in which order sums are added up."""
        odd = [oddity for tree in self.target.trees for oddity in tree.ready_backward.oddities]
        if self.row.is_deterministic:
            return [*odd, "dq is added up in one order: workgroups wait for their turns."]
        order = "dq is added up in any order; deterministic=True takes kernels that have one order."
        return [*odd, order]

    def bind(self) -> Kernel:
        """Build and load the launcher, and load the code object."""
        from .kernel import ReadyBackwardKernel

        return ReadyBackwardKernel(self.problem, self.target, self.tree, self.row, self.code_object)
