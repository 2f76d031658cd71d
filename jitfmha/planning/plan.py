"""What a kernel family answers when it is asked to serve a problem, and what comes of the answer.

Family.propose(problem, target) -> plans, or Refusal with its reasons
Plan.seconds(lengths)           what a call is estimated to take, by which plans are chosen
Plan.variants(lengths)          the same family's other tiles and key splits, to be timed
Plan.stages()                   the kernels that a call launches one after the other
Plan.specs                      what has to be built, for a device that need not be here
Plan.bind()                     loads, too
Plan.serves(sizes)              whether it is the choice for other lengths and strides
Plan.launch_for(sizes)          -> Launch
Launch(tensors)                 runs it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from .. import jit
from ..problem.arguments import MAX_NUM_SPLITS, Tensors
from ..problem.features import Feature
from ..problem.problem import PlainSizes, Problem
from ..version import __version__
from .level import LEVEL, first_level, key_step, whole_keys, whole_queries
from .measured import Lengths, Measured, Variant, nearest
from .specification import Algorithm, Stage, family_of
from .target import Target


class LengthsNotPlain(Exception):
    """What a CPU kernel ends in before it writes: lengths are wrong, or leave rows over."""


class Launch(Protocol):
    """A kernel that is bound to everything about a call but its tensors' addresses."""

    def __call__(self, tensors: Tensors) -> None:
        """Run the kernel, or start it on torch's current stream; results are written later then.

        Raises ``HipError`` where the HIP runtime refuses the launch; on the emulator also where the
        kernel does what it must not, such as touching anything but these tensors. On the CPU
        ``LengthsNotPlain``, where lengths are not checked.
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
        variant_of: the plan whose family's choice it fixes, because times of it are known; None of
            plans that families propose.
        num_splits: that it always takes; 0: chosen by the lengths, or not at all.
        threads: of the CPU, that it takes at most; 0: as many as the family takes.
    """

    problem: Problem
    family: str
    kernel: str
    source: str
    is_named: bool = False
    is_settled: bool = True
    contest: Contest | None = None
    variant_of: Plan | None = None
    num_splits: int = 0
    threads: int = 0

    @property
    def version(self) -> str:
        """Of the code that runs: what was measured of another one says nothing about it."""
        return __version__

    @property
    def variant(self) -> Variant | None:
        """What it is measured as; None where lengths choose its kernel: its variants are."""
        return Variant(self.family, self.kernel, self.version, self.num_splits, self.threads)

    @property
    @abstractmethod
    def specs(self) -> Sequence[jit.BuildSpec]:
        """What has to be built before it runs, rendered."""

    @property
    def is_built(self) -> bool:
        """Whether all that has to be built is in the cache already."""
        return all(map(jit.is_built, self.specs))

    @property
    def can_be_built(self) -> bool:
        """Whether its kernels are there, or a compiler for them is."""
        return True

    @abstractmethod
    def remarks(self) -> list[str]:
        """What is odd about where the kernel was found, and what was passed over on the way."""

    @abstractmethod
    def bind(self) -> None:
        """Render, build and load as far as that has not been done yet.

        Raises:
            HipError: the HIP runtime cannot be used, or refuses a code object.
            jitfmha.BuildError: something does not compile.
        """

    def stages(self) -> tuple[Stage, ...]:
        """The kernels that a call with the problem's sizes launches, in their order."""
        return (Stage(family_of(self.problem), self.kernel, Algorithm(self.family)),)

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float | None:
        """What the same call with these lengths is estimated to take with the family's kernel.

        That need not be the kernel of this plan. Lengths are those of sizes, in gm1 of all
        sequences together. None where the family makes no estimate.
        """
        return None

    def variants(self, seqlen_q: int, seqlen_k: int) -> Sequence[Plan]:
        """The family's other ways to serve the call that are worth timing with these lengths.

        They differ in tile, key splits or threads. Lengths are those of :meth:`seconds`.
        """
        return ()

    def with_choice(self, variant: Variant) -> Plan | None:
        """The plan that takes the kernel, splits and threads of ``variant``, of the same family.

        None where that is no choice of this plan's family, or no other than this plan's.
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


class Time(NamedTuple):
    """What a call takes with a plan: measured with lengths of the same step, or estimated.

    ``seconds`` is None where nobody knows, or where other plans stand for this one.
    """

    seconds: float | None
    is_measured: bool = False


class Contest:
    """The plans that serve calls of one kind, and which of them takes least for which lengths.

    What was chosen is remembered for as many steps of lengths.

    Attributes:
        plans: in order of preference, which decides where there are no estimates, or equal ones.
    """

    def __init__(self, plans: Sequence[Plan], measured: Measured | None = None) -> None:
        """Choose among ``plans``; with what was ``measured`` of them, and of their variants."""
        self.plans = tuple(plans)
        problem = self.plans[0].problem
        # Sequences of a pack count as equally long.
        self._packs = problem.packs
        of_steps: dict[Lengths, dict[Variant, float]] = {}
        for lengths, seconds in (measured or {}).items():
            of_steps.setdefault(self._whole_steps(*lengths), {}).update(seconds)
        self._measured: Measured = of_steps
        # By lengths that were measured: what plans are estimated to take with them.
        self._estimated: dict[Lengths, dict[Plan, float | None]] = {}
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
        before = end - self._packs * key_step(max(end // self._packs - 1, 0))
        self._last = seqlen_q, before, end, plan
        return plan

    def _remembered(self, lengths: tuple[int, int]) -> Plan:
        plan = self._chosen.get(lengths)
        if plan is None:
            if len(self._chosen) >= _MOST_CHOSEN:
                self._chosen.clear()
            plan = self._chosen[lengths] = self._least(*lengths)
        return plan

    def times(self, seqlen_q: int, seqlen_k: int) -> tuple[Time, ...]:
        """What each plan takes with these lengths in whole steps, which decide."""
        return self._times(*self._whole_steps(seqlen_q, seqlen_k))

    def _whole_steps(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        packs = self._packs
        if packs > 1:
            seqlen_q, seqlen_k = -(-seqlen_q // packs), -(-seqlen_k // packs)
        return whole_queries(seqlen_q) * packs, whole_keys(seqlen_k) * packs

    def _least(self, seqlen_q: int, seqlen_k: int) -> Plan:
        first, *others = self.plans
        if not others:
            return first
        times = self._times(seqlen_q, seqlen_k)
        if times[0].seconds is None and nearest(self._measured, seqlen_q, seqlen_k) is None:
            return first
        known = [
            (_rank(plan, time.seconds), plan, time)
            for plan, time in zip(self.plans, times, strict=True)
            if time.seconds is not None
        ]
        if not known:
            return first
        _, best, time = min(known, key=lambda each: each[0])
        if best.is_named or time.is_measured:
            return best
        unnamed = [(rank, plan) for rank, plan, _ in known if not plan.is_named]
        return unnamed[first_level([rank for rank, _ in unnamed])][1]

    def _times(self, seqlen_q: int, seqlen_k: int) -> tuple[Time, ...]:
        plans = self.plans
        there = nearest(self._measured, seqlen_q, seqlen_k)
        if there is None:
            estimates = (x.seconds(seqlen_q, seqlen_k) if not x.variant_of else None for x in plans)
            return tuple(map(Time, estimates))
        of_variants = self._measured[there]
        named = ((x, x.variant) for x in plans)
        seen = {x: of_variants[name] for x, name in named if name and name in of_variants}
        # What is measured stands for the plan whose choice of a kernel it fixes.
        replaced = {x.variant_of for x in seen if x.variant_of and x.variant_of.variant is None}

        def time_of(plan: Plan) -> Time:
            if plan in seen and there == (seqlen_q, seqlen_k):
                return Time(seen[plan], is_measured=True)
            if plan in seen or not (plan.variant_of or plan in replaced):
                return Time(self._corrected(plan, seen, there, seqlen_q, seqlen_k))
            return Time(None)

        return tuple(map(time_of, plans))

    def _corrected(
        self, plan: Plan, seen: Mapping[Plan, float], there: Lengths, seqlen_q: int, seqlen_k: int
    ) -> float | None:
        """The plan's estimate, as far off as it is with the lengths of ``seen``, or others' are."""
        from statistics import median  # takes 4 ms to import

        estimate = plan.seconds(seqlen_q, seqlen_k)
        if estimate is None:
            # As much longer as there are more products.
            longer = seqlen_q * seqlen_k / (max(there[0], 1) * max(there[1], 1))
            return seen[plan] * longer if plan in seen else None
        known = self._estimated.setdefault(there, {})
        for x in seen.keys() - known.keys():
            known[x] = x.seconds(*there)
        of_plans = ((x, known[x]) for x in ((plan,) if plan in seen else seen))
        off = [seen[x] / seconds for x, seconds in of_plans if seconds]
        return estimate * median(off) if off else estimate


def _rank(plan: Plan, seconds: float) -> float:
    """The seconds that count: naming a tree means something where others are a little quicker."""
    return seconds / _NAMED_BONUS if plan.is_named else seconds


def why_longer(plan: Plan) -> str:
    """Why a plan is taken although another one is estimated to take less, in words."""
    if plan.is_named:
        return f"Kernels of a tree that is named may take {_NAMED_BONUS - 1:.0%} longer."
    return f"Estimates up to {LEVEL - 1:.0%} over the least are level; it is preferred to others."


_LEAST_KEYS_OF_SPLIT = 128


def splits_to_time(seqlen_k: int) -> tuple[int, ...]:
    """The numbers of splits that are worth timing for so many keys: powers of two."""
    most = min(seqlen_k // _LEAST_KEYS_OF_SPLIT, MAX_NUM_SPLITS)
    return tuple(1 << bits for bits in range(most.bit_length()))


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
