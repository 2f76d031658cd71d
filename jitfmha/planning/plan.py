"""What a kernel family answers when it is asked to serve a problem, and what comes of the answer.

Family.propose(problem, target) -> plans, or Refusal with its reasons
Plan.seconds(lengths)           what a call is estimated to take, by which plans are chosen
Plan.build()                    renders and builds, for a device that need not be here
Plan.bind()                     loads, too
Plan.serves(sizes)              whether it is the choice for other lengths and strides
Plan.launch_for(sizes)          -> Launch
Launch(tensors)                 runs it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
        is_named: whether its kernels are of a tree that the user names.
        is_settled: whether calls of this kind get the same plan with all sizes that it serves; else
            calls of other sizes are planned anew.
        contest: which it takes part in with the plans of others that serve the problem, too; None
            where there are none.
    """

    problem: Problem
    family: str
    kernel: str
    source: str
    is_named: bool = False
    is_settled: bool = True
    contest: Contest | None = None

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether all that has to be built is in the cache already."""

    @property
    def can_be_built(self) -> bool:
        """Whether its kernels are there, or a compiler for them is."""
        return True

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

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float | None:
        """What the same call with these lengths is estimated to take with the family's kernel.

        That need not be the kernel of this plan. Lengths are those of sizes, in gm1 of all
        sequences together. None where the family makes no estimate.
        """
        return None

    def serves(self, sizes: PlainSizes) -> bool:
        """Whether the same kernel would be chosen for these lengths and strides.

        Calls whose lengths grow come by here each time: it has to be quick.
        """
        return sizes == self.problem.sizes

    @abstractmethod
    def launch_for(self, sizes: PlainSizes) -> Launch:
        """The launch for lengths and strides that it serves; the plan has to be bound.

        It has to be as quick as :meth:`serves`.
        """


_NAMED_BONUS = 1.1
"""How many times as long kernels of a tree that the user names may take."""


_MOST_CHOSEN = 4096
# Lengths count in steps, so that a loop whose lengths grow seldom has to choose anew: of a
# sixteenth to a thirty-second of them, and of keys at least so many.
_STEP_BITS, _LEAST_KEY_BITS = 5, 5


class Contest:
    """The plans that serve calls of one kind, and which of them takes least for which lengths.

    What was chosen is remembered for as many steps of lengths.

    Attributes:
        plans: in order of preference, which decides where there are no estimates, or equal ones.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        problem = self.plans[0].problem
        # Sequences of a pack count as equally long.
        self._packs = problem.packs
        self._chosen: dict[tuple[int, int], Plan] = {}
        # Of the last choice: queries, the keys behind which its step begins, those with which it
        # ends, and the plan.
        self._last = -1, 0, 0, self.plans[0]

    def best(self, seqlen_q: int, seqlen_k: int) -> Plan:
        """The plan that takes least; lengths are as :meth:`Plan.seconds` has them.

        It has to be quick, since every new length comes by here.
        """
        last_q, before, end, plan = self._last
        if seqlen_q == last_q and before < seqlen_k <= end:
            return plan
        lengths = self._whole_steps(seqlen_q, seqlen_k)
        plan = self._remembered(lengths)
        end = lengths[1]
        before = end - (self._packs << _key_bits(max(end // self._packs - 1, 0)))
        self._last = seqlen_q, before, end, plan
        return plan

    def _remembered(self, lengths: tuple[int, int]) -> Plan:
        plan = self._chosen.get(lengths)
        if plan is None:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            plan = self._chosen[lengths] = self._least(*lengths)
        return plan

    def seconds(self, seqlen_q: int, seqlen_k: int) -> tuple[float | None, ...]:
        """What each plan is estimated to take with these lengths in whole steps, which decide."""
        lengths = self._whole_steps(seqlen_q, seqlen_k)
        return tuple(plan.seconds(*lengths) for plan in self.plans)

    def _whole_steps(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        packs = self._packs
        if packs > 1:
            seqlen_q, seqlen_k = -(-seqlen_q // packs), -(-seqlen_k // packs)
        bits_q = max(seqlen_q.bit_length() - _STEP_BITS, 0)
        bits_k = _key_bits(seqlen_k)
        seqlen_q, seqlen_k = -(-seqlen_q >> bits_q) << bits_q, -(-seqlen_k >> bits_k) << bits_k
        return seqlen_q * packs, seqlen_k * packs

    def _least(self, seqlen_q: int, seqlen_k: int) -> Plan:
        first, *others = self.plans
        if not others:
            return first
        least = rank_of(first, seqlen_q, seqlen_k)
        if least is None:
            return first
        for plan in others:
            rank = rank_of(plan, seqlen_q, seqlen_k)
            if rank is not None and rank < least:
                first, least = plan, rank
        return first


def _key_bits(seqlen_k: int) -> int:
    """Of a step of keys: its binary logarithm."""
    return max(seqlen_k.bit_length() - _STEP_BITS, _LEAST_KEY_BITS)


def rank_of(plan: Plan, seqlen_q: int, seqlen_k: int) -> float | None:
    """The seconds that count: naming a tree means something where others are a little quicker."""
    seconds = plan.seconds(seqlen_q, seqlen_k)
    return seconds / _NAMED_BONUS if plan.is_named and seconds is not None else seconds


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

    def propose(self, problem: Problem, target: Target) -> Sequence[Plan] | Refusal:
        """The kernels for a problem that asks for nothing but ``SERVES``, or why there are none.

        One of each tree of code objects, in order of preference; of other families one.
        """
        ...
