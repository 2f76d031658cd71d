"""The plan for a problem that compiled kernels serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ... import jit
from ...amd.kernel_arguments import COMPILED_ARGUMENTS
from ...amd.manifest import KernelRow
from ...planning.plan import Kernel, Launch, Plan, Reason, Refusal
from ...planning.target import AmdTarget, Target
from ...problem.problem import PlainSizes, Problem
from .. import ready
from ..ready.limits import SIZE_RULES, are_far_from_limits
from ..rules import reasons_of
from .backward_plan import BackwardPlan
from .backward_traits import BackwardTraits
from .compiled_plan import CompiledPlan
from .launch import BoundForward
from .rules import RULES
from .traits import ForwardTraits, access_of, kernel_spec, stacks_heads

NAME = "compiled"


def reasons(problem: Problem, target: Target) -> tuple[Reason, ...]:
    """Every rule that ``problem`` breaks, whatever features it asks for."""
    assert isinstance(target, AmdTarget)
    return tuple(reasons_of(RULES, problem, target.arch))


def propose(problem: Problem, target: Target) -> Plan | Refusal:
    """The kernel for exactly what ``problem`` asks for."""
    assert isinstance(target, AmdTarget)
    broken = reasons(problem, target)
    if broken:
        return Refusal(broken)
    if problem.direction == "backward":
        return BackwardPlan(problem, target, BackwardTraits.of(problem, target.arch))
    return ForwardPlan(problem, target, ForwardTraits.of(problem, target.arch))


@dataclass(frozen=True)
class ForwardPlan(CompiledPlan):
    """The kernel that is compiled for one problem."""

    problem: Problem
    target: AmdTarget
    traits: ForwardTraits
    family: str = NAME

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.traits.name

    @property
    def source(self) -> str:
        """The template."""
        return "csrc_templates/amd/compiled_fwd.hip.in"

    @property
    def spec(self) -> jit.BuildSpec:
        """The build of the kernel."""
        return kernel_spec(self.traits)

    @property
    def argument_bytes(self) -> int:
        """What the interface of these kernels says."""
        return COMPILED_ARGUMENTS.size

    def rows(self) -> tuple[KernelRow, ...]:
        """Of its kernel."""
        return (self.traits.row(),)

    def bind(self) -> Kernel:
        """Compile the kernel, build and load the launcher, and load the kernel, where needed."""
        code_object = self.compiled()
        bound = BoundForward(self.problem, self.target, self.traits, code_object)
        return ForwardKernel(self, bound)


class ForwardKernel:
    """A loaded kernel, for the calls of one kind that no ready kernel serves."""

    def __init__(self, plan: ForwardPlan, bound: BoundForward) -> None:
        self._plan = plan
        self._bound = bound
        self._tile = plan.traits.tile
        self._is_far_from_limits = _are_far_from_limits(plan)
        self._ready_may_serve = _ready_may_serve(plan.problem, plan.target)

    def launch_for(self, sizes: PlainSizes) -> Launch | None:
        """The launch, unless another kernel is the one for these lengths and strides."""
        plan = self._plan
        problem, traits, tile = plan.problem.with_sizes(sizes), plan.traits, self._tile
        if access_of(problem, tile) != traits.access:
            return None
        if stacks_heads(problem, tile) != traits.stacks_heads:
            return None
        launch = self._bound.launch_for(problem.sizes)
        if not self._is_far_from_limits(sizes, launch.launch.sizes) and any(
            reasons_of(SIZE_RULES, problem, traits.arch)
        ):
            return None
        if self._ready_may_serve and not isinstance(ready.propose(problem, plan.target), Refusal):
            return None
        return launch


def _are_far_from_limits(plan: ForwardPlan) -> Callable[[PlainSizes, bytes], bool]:
    """A quick question; False means that there may be a limit, as it does for all pages."""
    if plan.problem.is_paged:
        return lambda sizes, packed: False
    return are_far_from_limits(plan.problem, plan.traits.row())


def _ready_may_serve(problem: Problem, target: AmdTarget) -> bool:
    """Whether a ready kernel may serve the same call with other lengths and strides."""
    hdims = problem.hdim_q, problem.hdim_v
    return problem.features <= ready.SERVES and any(
        (row.hdim_q, row.hdim_v) == hdims for tree in target.trees for row in tree.forward.rows
    )
