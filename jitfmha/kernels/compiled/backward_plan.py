"""The plan for a backward pass that compiled kernels serve."""

from __future__ import annotations

from dataclasses import dataclass

from ... import jit
from ...amd.kernel_arguments import BACKWARD_ARGUMENTS
from ...amd.manifest import KernelRow
from ...planning.plan import Kernel
from ...planning.target import AmdTarget
from ...problem.problem import Problem
from .backward_launch import BackwardKernel, BoundBackward
from .backward_traits import BackwardTraits, backward_spec
from .compiled_plan import CompiledPlan


@dataclass(frozen=True)
class BackwardPlan(CompiledPlan):
    """The kernels that are compiled for one problem."""

    problem: Problem
    target: AmdTarget
    traits: BackwardTraits
    family: str = "compiled"

    @property
    def kernel(self) -> str:
        """What the names of the kernels begin with."""
        return self.traits.name

    @property
    def source(self) -> str:
        """The template."""
        return "csrc_templates/amd/compiled_bwd.hip.in"

    @property
    def spec(self) -> jit.BuildSpec:
        """The build of the kernels."""
        return backward_spec(self.traits)

    @property
    def argument_bytes(self) -> int:
        """What the interface of these kernels says."""
        return BACKWARD_ARGUMENTS.size

    def rows(self) -> tuple[KernelRow, ...]:
        """Of its kernels, in the order of their launches."""
        return tuple(self.traits.row(symbol) for symbol, _ in self.traits.kernels())

    def bind(self) -> Kernel:
        """Compile the kernels, build and load the launcher, and load them, where needed."""
        code_object = self.compiled()
        traits = self.traits
        kernels = [
            BackwardKernel(traits.row(symbol), rows, traits.tile.own_rows)
            for symbol, rows in traits.kernels()
        ]
        return BoundBackward(
            *(self.problem, self.target, "compiled", kernels, code_object), adds_dq_up=False
        )
