"""Which backward passes general kernels serve, and the plan for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ... import jit
from ...amd.code_object import CodeObject
from ...amd.kernel_arguments import BACKWARD_ARGUMENTS
from ...plan import Kernel, Reason
from ...problem import Problem
from ...target import AmdTarget
from .backward_launch import BoundBackward
from .backward_traits import BackwardTraits, backward_spec
from .traits import ELEMENT_BYTES

_DTYPES = ("bf16", "fp16")
_FIELD_END = 1 << 32  # a row's stride has 32 bits


def reasons_of_backward(problem: Problem) -> Iterator[Reason]:
    """What backward does not serve beside what forward does not."""
    gradients = problem.gradients
    if gradients is None:
        return
    if problem.dtype not in _DTYPES:
        template = "Its backward pass serves {served}; the inputs are {dtype}."
        yield Reason(template, served=", ".join(_DTYPES), dtype=problem.dtype)
    if problem.has_column_major_v:
        yield Reason("Its backward pass does not serve values with contiguous keys.")
    for name in ("dout", "dq", "dk", "dv"):
        size = getattr(gradients, name)[-3] * ELEMENT_BYTES
        if size >= _FIELD_END:
            template = (
                "The kernels take strides below 4 GiB; rows of {name} are {size} bytes apart."
            )
            yield Reason(template, name=name, size=size)


@dataclass(frozen=True)
class BackwardPlan:
    """The kernels that are compiled for one problem."""

    problem: Problem
    target: AmdTarget
    traits: BackwardTraits
    family: str = "general"

    @property
    def kernel(self) -> str:
        """What the names of the kernels begin with."""
        return self.traits.name

    @property
    def source(self) -> str:
        """The template."""
        return "csrc_templates/amd/general_bwd.hip.in"

    @property
    def is_built(self) -> bool:
        """True when the kernels and the launcher are in the cache already."""
        from ...amd.launcher import launcher_spec  # of use where there is a GPU only

        return jit.is_built(backward_spec(self.traits)) and jit.is_built(launcher_spec())

    def remarks(self) -> list[str]:
        """What compiles the kernels, and why that."""
        from ...jit.toolchain.device_hip import device_hip_in_words  # asks a process

        return [f"compiler for AMD GPUs: {device_hip_in_words()}"]

    def bind(self) -> Kernel:
        """Compile the kernels, build and load the launcher, and load them, where needed."""
        spec = backward_spec(self.traits)
        image = jit.read(spec)
        path = Path(spec.artifact_name)
        code_object = CodeObject(path, image, self.traits.name, BACKWARD_ARGUMENTS.size)
        return BoundBackward(self.problem, self.target, self.traits, code_object)
