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
    from ....amd.gradient_manifest import GradientRow, GradientTree
    from ....amd.manifest import KernelRow

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
    from ....amd.gradient_manifest import gradient_tree

    assert isinstance(target, AmdTarget)
    broken = reasons(problem, target)
    if broken:
        return Refusal(broken)
    tree = gradient_tree(target.arch) if any(x.is_shipped for x in target.trees) else None
    if tree is None:
        template = "This package has no code objects of backward kernels for {arch}."
        return Refusal((Reason(template, arch=target.arch),))
    row = chosen_row(tree, problem, target)
    if row is not None:
        return ReadyBackwardPlan(problem, target, tree, row)
    template = "{tree}: none for {dtype} and hdim {hdim_q}x{hdim_v}."
    values = {"dtype": problem.dtype, "hdim_q": problem.hdim_q, "hdim_v": problem.hdim_v}
    return Refusal((Reason(template, tree=tree, **values),))


class ReadyBackwardPlan(PlanOfCodeObjects):
    """The code object for one backward pass."""

    family = NAME
    block = "ready"

    def __init__(
        self, problem: Problem, target: AmdTarget, tree: GradientTree, row: GradientRow
    ) -> None:
        self.problem = problem
        self.target = target
        self.tree = tree
        self.row = row

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
        """What a caller may want to know of the order of sums."""
        if self.row.is_deterministic:
            return ["dq is added up in one order: workgroups wait for their turns."]
        return [
            "dq is added up in any order; deterministic=True takes kernels that have one order."
        ]

    def bind(self) -> Kernel:
        """Build and load the launcher, and load the code object."""
        from .kernel import ReadyBackwardKernel

        return ReadyBackwardKernel(self.problem, self.target, self.tree, self.row)
