"""Which problems general kernels serve, and the plan for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ... import jit
from ...amd.code_object import CodeObject
from ...amd.kernel_arguments import GENERAL_ARGUMENTS
from ...plan import Kernel, Launch, Plan, Reason, Refusal
from ...problem import Feature, Problem, Sizes
from ...target import AmdTarget, Target
from .. import tuned
from ..tuned.limits import are_far_from_limits, reasons_of_sizes, reasons_of_target
from .backward_plan import BackwardPlan, reasons_of_backward
from .backward_traits import BackwardTraits
from .launch import BoundGeneralKernel
from .traits import GeneralTraits, access_of, kernel_spec, stacks_heads

NAME = "general"
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
        Feature.BIAS,
        Feature.BOOLEAN_BIAS,
        Feature.ALIBI,
        Feature.SOFTCAP,
        Feature.SINKS,
        Feature.SINK_TOKENS,
        Feature.DROPOUT,
        Feature.PAGED_KEYS,
        Feature.NUM_SPLITS,
        Feature.BACKWARD,
    }
)
_MAX_HDIM = 256


def propose(problem: Problem, target: Target) -> Plan | Refusal:
    """The kernel for exactly what ``problem`` asks for."""
    assert isinstance(target, AmdTarget)
    reasons = (
        *reasons_of_target(problem, target),
        *reasons_of_sizes(problem),
        *_reasons_of_hdims(problem),
        *reasons_of_backward(problem),
    )
    if reasons:
        return Refusal(reasons)
    if problem.direction == "backward":
        return BackwardPlan(problem, target, BackwardTraits.of(problem, target.arch))
    return GeneralPlan(problem, target, GeneralTraits.of(problem, target.arch))


def _reasons_of_hdims(problem: Problem) -> Iterator[Reason]:
    for name, hdim in (("q and k", problem.hdim_q), ("v", problem.hdim_v)):
        if hdim > _MAX_HDIM:
            template = "It serves head dimensions up to {most}; that of {name} is {hdim}."
            yield Reason(template, most=_MAX_HDIM, name=name, hdim=hdim)


@dataclass(frozen=True)
class GeneralPlan:
    """The kernel that is compiled for one problem."""

    problem: Problem
    target: AmdTarget
    traits: GeneralTraits
    family: str = NAME

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.traits.name

    @property
    def source(self) -> str:
        """The template."""
        return "csrc_templates/amd/general_fwd.hip.in"

    @property
    def is_built(self) -> bool:
        """True when the kernel and the launcher are in the cache already."""
        from ...amd.launcher import launcher_spec  # of use where there is a GPU only

        return jit.is_built(kernel_spec(self.traits)) and jit.is_built(launcher_spec())

    def remarks(self) -> list[str]:
        """What compiles the kernel, and why that."""
        from ...jit.toolchain.device_hip import device_hip_in_words  # asks a process

        return [f"compiler for AMD GPUs: {device_hip_in_words()}"]

    def bind(self) -> Kernel:
        """Compile the kernel, build and load the launcher, and load the kernel, where needed."""
        spec = kernel_spec(self.traits)
        image = jit.read(spec)
        path = Path(spec.artifact_name)
        code_object = CodeObject(path, image, self.traits.name, GENERAL_ARGUMENTS.size)
        bound = BoundGeneralKernel(self.problem, self.target, self.traits, code_object)
        return GeneralKernel(self, bound)


class GeneralKernel:
    """A loaded kernel, for the calls of one kind that no tuned kernel serves."""

    def __init__(self, plan: GeneralPlan, bound: BoundGeneralKernel) -> None:
        self._plan = plan
        self._bound = bound
        self._is_far_from_limits = _are_far_from_limits(plan)
        self._tuned_may_serve = _tuned_may_serve(plan.problem, plan.target)

    def launch_for(self, sizes: Sizes) -> Launch | None:
        """The launch, unless another kernel is the one for these lengths and strides."""
        plan = self._plan
        problem = plan.problem.with_sizes(sizes)
        traits = plan.traits
        if (access_of(problem), stacks_heads(problem)) != (traits.access, traits.stacks_heads):
            return None
        if not self._is_far_from_limits(sizes) and any(reasons_of_sizes(problem)):
            return None
        if self._tuned_may_serve and not isinstance(tuned.propose(problem, plan.target), Refusal):
            return None
        return self._bound.launch_for(sizes)


def _are_far_from_limits(plan: GeneralPlan) -> Callable[[Sizes], bool]:
    """A quick question; False means that there may be a limit, as it does for all pages."""
    if plan.problem.is_paged:
        return lambda sizes: False
    return are_far_from_limits(plan.problem, plan.traits.row())


def _tuned_may_serve(problem: Problem, target: AmdTarget) -> bool:
    """Whether a tuned kernel may serve the same call with other lengths and strides."""
    hdims = problem.hdim_q, problem.hdim_v
    return problem.features <= tuned.SERVES and any(
        (row.hdim_q, row.hdim_v) == hdims for tree in target.trees for row in tree.rows
    )
