"""What a kernel family answers when it is asked to serve a problem, and what comes of the answer.

Family.propose(problem, target) -> Plan, or Refusal with its reasons
Plan.build()                    renders and builds, for a device that need not be here
Plan.bind()                     -> Kernel, rendered, built and loaded
Kernel.launch_for(sizes)        -> Launch
Launch(tensors)                 runs it
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..problem.arguments import Tensors
from ..problem.features import Feature
from ..problem.problem import PlainSizes, Problem
from .target import Target


class Launch(Protocol):
    """A kernel that is bound to everything about a call but its tensors' addresses."""

    def __call__(self, tensors: Tensors) -> None:
        """Run the kernel, or start it on torch's current stream."""
        ...


class Kernel(Protocol):
    """A kernel that is built and loaded, for calls of one kind."""

    def launch_for(self, sizes: PlainSizes) -> Launch | None:
        """The launch for these lengths and strides; None where another kernel has to be planned.

        Calls whose lengths grow come by here each time: it has to be quick.
        """
        ...


class Plan(Protocol):
    """A kernel chosen for a problem on a target; nothing is built until :meth:`bind`."""

    @property
    def family(self) -> str: ...

    @property
    def kernel(self) -> str:
        """The name of the kernel, as ``explain`` shows it."""
        ...

    @property
    def source(self) -> str:
        """Where the kernel comes from: a template, or a file of a tree of code objects."""
        ...

    @property
    def is_built(self) -> bool: ...

    def remarks(self) -> list[str]:
        """What is odd about where the kernel was found, and what was passed over on the way."""
        ...

    def build(self) -> None:
        """Render and build as far as that has not been done yet; asks no device for anything."""
        ...

    def bind(self) -> Kernel:
        """Render, build and load as far as that has not been done yet."""
        ...


class Reason:
    """One sentence about why a kernel does not serve a problem, made when it is read."""

    def __init__(self, template: str, **values: object) -> None:
        self._template = template
        self._values = values

    def __str__(self) -> str:
        return self._template.format(**self._values)


class Refusal(NamedTuple):
    """Why a family does not serve a problem."""

    reasons: tuple[Reason, ...]

    def sentences(self) -> tuple[str, ...]:
        """The reasons as sentences."""
        return tuple(str(reason) for reason in self.reasons)


class Family(Protocol):
    """What a module or package of ``jitfmha.kernels`` has to have, to be a family."""

    @property
    def NAME(self) -> str: ...  # noqa: N802 - a constant of the module

    @property
    def SERVES(self) -> frozenset[Feature]:  # noqa: N802
        """The features that its kernels have. What is not here is refused by name."""
        ...

    def reasons(self, problem: Problem, target: Target) -> tuple[Reason, ...]:
        """Every rule that a problem breaks, also where it asks for more than ``SERVES``."""
        ...

    def propose(self, problem: Problem, target: Target) -> Plan | Refusal:
        """The kernel for a problem that asks for nothing but ``SERVES``, or why there is none."""
        ...
