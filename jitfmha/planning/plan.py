"""What a kernel family answers when it is asked to serve a problem, and what comes of the answer.

Family.propose(problem, target) -> Plan, or Refusal with its reasons
Plan.build()                    renders and builds, for a device that need not be here
Plan.bind()                     loads, too
Plan.serves(sizes)              whether it is the choice for other lengths and strides
Plan.launch_for(sizes)          -> Launch
Launch(tensors)                 runs it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from ..problem.arguments import Tensors
from ..problem.features import Feature
from ..problem.problem import PlainSizes, Problem
from .target import Target


class Launch(Protocol):
    """A kernel that is bound to everything about a call but its tensors' addresses."""

    def __call__(self, tensors: Tensors) -> None:
        """Run the kernel, or start it on torch's current stream; results are written later then.

        Raises ``HipError`` where the HIP runtime refuses the launch; on the emulator also where the
        kernel does what it must not, such as touching anything but these tensors.
        """
        ...


class Plan(ABC):
    """A kernel chosen for a problem on a target; nothing is built until :meth:`bind`.

    Attributes:
        problem: that it was chosen for.
        family: whose kernel it is.
        kernel: its name; of several kernels that of the one which makes the results.
        source: where it comes from: a template, or a file of a tree of code objects.
        seconds: what the family estimates that the call takes; None where it makes no estimate.
        is_settled: whether calls of this kind get the same plan with all sizes that it serves; else
            calls of other sizes are planned anew.
    """

    problem: Problem
    family: str
    kernel: str
    source: str
    seconds: float | None = None
    is_settled: bool = True

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether all that has to be built is in the cache already."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """What is odd about where the kernel was found, and what was passed over on the way."""

    @abstractmethod
    def build(self) -> None:
        """Render and build as far as that has not been done yet; asks no device for anything.

        Raises ``jitfmha.BuildError`` where that fails.
        """

    @abstractmethod
    def bind(self) -> None:
        """Render, build and load as far as that has not been done yet.

        Raises:
            HipError: the HIP runtime cannot be used, or refuses a code object.
            jitfmha.BuildError: something does not compile.
        """

    def serves(self, sizes: PlainSizes) -> bool:
        """Whether the family would choose the same kernel for these lengths and strides.

        Calls whose lengths grow come by here each time: it has to be quick.
        """
        return sizes == self.problem.sizes

    @abstractmethod
    def launch_for(self, sizes: PlainSizes) -> Launch:
        """The launch for lengths and strides that it serves; the plan has to be bound.

        It has to be as quick as :meth:`serves`.
        """


class Reason:
    """One sentence about why a kernel does not serve a problem, made when it is read."""

    def __init__(self, template: str, **values: object) -> None:
        self._template = template
        self._values = values

    def __str__(self) -> str:
        return self._template.format(**self._values)


class Refusal(NamedTuple):
    """Why a family does not serve a problem.

    With ``of_every_size`` it refuses the same call with any other lengths and strides, too.
    """

    reasons: tuple[Reason, ...]
    of_every_size: bool = False

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
