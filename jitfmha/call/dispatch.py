"""Which kernel serves a problem: of those that can, the one that is estimated to take least.

Each family is asked once, with one question, and gives one typed answer: plans, which say what a
call is estimated to take, or a refusal, whose sentences are made when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from math import inf
from typing import Any, NamedTuple, cast

from ..planning.measured import Measured
from ..planning.plan import Contest, Family, Plan, Reason, Refusal, Time, why_longer
from ..planning.specification import key_of
from ..planning.target import AmdTarget, CpuTarget, Target
from ..problem.features import DTYPE_FEATURES, Feature
from ..problem.problem import Direction, Problem
from ..problem.score_features import SCORE_FEATURES
from .explained import (
    NEEDS_AMD,
    NEEDS_CPU,
    Told,
    kernel_in_words,
    microseconds,
    reasons_in_words,
)


class Entrant(NamedTuple):
    """A family, as far as it is known before it is imported.

    Attributes:
        name: of the family.
        module: of the family, below ``jitfmha.kernels``.
        runs_on: the kind of target that its kernels are for.
        needs: what a refusal says of other targets.
        direction: of the problems that it is asked about; None: of both.
    """

    name: str
    module: str
    runs_on: type[CpuTarget | AmdTarget]
    needs: str
    direction: Direction | None = None

    def family(self) -> Family:
        """The family itself, imported with the first call that it may serve."""
        return cast("Family", import_module(f"..kernels.{self.module}", __package__))

    def may_serve(self, target: Target) -> bool:
        """Whether calls on ``target`` may take its kernels."""
        if isinstance(target, AmdTarget) and target.families is not None:
            return self.name in target.families and isinstance(target, self.runs_on)
        return isinstance(target, self.runs_on)

    def is_for(self, problem: Problem) -> bool:
        """Whether it knows of such problems at all."""
        return self.direction in (None, problem.direction)


# In the order that decides where estimates do not.
FAMILIES = (
    Entrant("ready", "ready", AmdTarget, NEEDS_AMD, "forward"),
    Entrant("aiter", "aiter", AmdTarget, NEEDS_AMD, "backward"),
    Entrant("ready", "ready.backward", AmdTarget, NEEDS_AMD, "backward"),
    Entrant("compiled", "compiled", AmdTarget, NEEDS_AMD),
    Entrant("cpu", "cpu", CpuTarget, NEEDS_CPU),
)


class Proposal(NamedTuple):
    """The answers of all families.

    Attributes:
        plan: the one that is taken; None where no family serves the problem.
        contest: the plans that it was chosen from, where there are any.
        refusals: by family.
    """

    plan: Plan | None
    contest: Contest | None
    refusals: tuple[tuple[str, Refusal], ...]


def propose(problem: Problem, target: Target) -> Proposal:
    """Ask each family once, and choose among their plans for ``problem``."""
    refusals: list[tuple[str, Refusal]] = []
    plans: list[Plan] = []
    for entrant in FAMILIES:
        if not (entrant.may_serve(target) and entrant.is_for(problem)):
            continue
        family = entrant.family()
        answer = refusal_of_features(family, problem) or family.propose(problem, target)
        if isinstance(answer, Refusal):
            refusals.append((entrant.name, answer))
        else:
            plans += answer
    if not plans:
        return Proposal(None, None, tuple(refusals))
    from ..planning.measured_file import measured_of  # what reads files takes 3 ms to import

    measured = measured_of(problem, target)
    if measured is not None:
        plans += _measured_variants(plans, measured)
    while True:
        contest = Contest(plans, measured)
        best = contest.best(*problem.sizes[:2])
        if len(plans) == 1 or best.can_be_built:
            break
        plans.remove(best)
        why = Reason("{kernel} would be compiled, and there is no compiler.", kernel=best.kernel)
        refusals.append((best.family, Refusal((why,), of_every_size=True)))
    if len(plans) > 1:
        for plan in plans:
            plan.contest = contest
    return Proposal(best, contest, tuple(refusals))


def _measured_variants(plans: list[Plan], measured: Measured) -> list[Plan]:
    """The plans for what was measured beside those that families propose."""
    made: dict[object, Plan] = {}
    variants = dict.fromkeys(variant for of_lengths in measured.values() for variant in of_lengths)
    for variant in variants:
        for plan in plans:
            fixed = plan.with_choice(variant) if plan.family == variant.family else None
            # Of another version of the code nothing is known.
            if fixed is not None and fixed.variant == variant:
                fixed.variant_of = plan
                made.setdefault(variant, fixed)
    return list(made.values())


def plans_for(problem: Problem, target: Target) -> tuple[Plan, ...]:
    """The plans of all families, of which calls take one or another as their lengths are.

    Those for what was measured of them are among them.

    Raises ``NotImplementedError`` listing every family's reasons where none serves the problem.
    """
    return _served(problem, target)[1].plans


def _served(problem: Problem, target: Target) -> tuple[Plan, Contest, Proposal]:
    proposal = propose(problem, target)
    plan, contest, _ = proposal
    if plan is None or contest is None:
        explanation = Explanation.of(problem, target, proposal)
        raise NotImplementedError(f"no kernel serves this call\n{explanation}")
    return plan, contest, proposal


def plan_for(problem: Problem, target: Target) -> Plan:
    """The kernel for ``problem`` on ``target``.

    Raises ``NotImplementedError`` listing every family's reasons where none serves it.
    """
    plan, _, proposal = _served(problem, target)
    # With other sizes, a family that refuses these may serve the call.
    plan.is_settled = all(refusal.of_every_size for _, refusal in proposal.refusals)
    if isinstance(target, AmdTarget) and target.records:
        from .recording import RecordedPlan  # few processes record what they launch

        return RecordedPlan(plan, target)
    return plan


class Contender(NamedTuple):
    """A plan that serves a call, and what decided whether it is taken."""

    plan: Plan
    time: Time

    @property
    def in_words(self) -> str:
        plan, seconds = self.plan, self.time.seconds
        if seconds is None:
            return f"What {plan.kernel} takes is not estimated."
        was = "was measured" if self.time.is_measured else "is estimated"
        fixed = f" with {choice}" if (choice := _fixed_choice(plan)) else ""
        return f"{plan.kernel} of {plan.source}{fixed} {was} to take {microseconds(seconds)}."


def _fixed_choice(plan: Plan) -> str:
    """What a plan always takes, because it was measured so; empty where that is nothing."""
    words = [f"num_splits={plan.num_splits}"] if plan.num_splits else []
    if plan.threads:
        words.append(f"up to {plan.threads} threads")
    return " and ".join(words)


def _quickest_of_each(contenders: Sequence[Contender]) -> list[Contender]:
    """Of each plan that a family proposed and its variants the quickest one."""
    quickest: dict[Plan, Contender] = {}
    for each in contenders:
        proposed = each.plan.variant_of or each.plan
        known = quickest.setdefault(proposed, each)
        if (each.time.seconds or inf) < (known.time.seconds or inf):
            quickest[proposed] = each
    return list(quickest.values())


class _Explained(NamedTuple):
    problem: Problem
    target: Target
    plan: Plan | None
    estimates: tuple[Contender, ...]
    rejected: dict[str, tuple[str, ...]]
    remarks: tuple[str, ...]


class Explanation(Told, _Explained):
    """Where a call would run, and why nowhere else. ``str()`` gives it as sentences.

    Attributes:
        estimates: the plans that it was chosen from, with the times that decided.
        rejected: sentences by family.
        remarks: what else there is to know about the kernels that were found.
    """

    __slots__ = ()

    @classmethod
    def of(cls, problem: Problem, target: Target, proposal: Proposal) -> Explanation:
        """The sentences for a proposal."""
        plan, contest, of_families = proposal
        estimates: tuple[Contender, ...] = ()
        if contest is not None:
            times = contest.times(problem.seqlen_q, problem.seqlen_k)
            every = map(Contender, contest.plans, times)
            # Where something is measured, what others stand for says nothing.
            is_tuned = any(each.variant_of for each in contest.plans)
            estimates = tuple(x for x in every if not is_tuned or x.time.seconds or x.plan is plan)
        said = _quickest_of_each(estimates)
        refusals = dict(of_families)
        rejected: dict[str, tuple[str, ...]] = {}
        for entrant in FAMILIES:
            beaten = tuple(x.in_words for x in said if x.plan.family == entrant.name)
            if not entrant.is_for(problem) or (plan is not None and entrant.name == plan.family):
                continue
            if entrant.name in refusals:
                refusal = refusals[entrant.name]
                rejected[entrant.name] = _every_sentence(entrant, refusal, problem, target)
            elif isinstance(target, entrant.runs_on):
                rejected[entrant.name] = beaten or ("The target leaves it out.",)
            else:
                rejected[entrant.name] = (entrant.needs.format(target=target),)
        remarks: list[str] = []
        if plan is not None:
            of_family = (x for x in said if x.plan.family == plan.family)
            choice = _fixed_choice(plan)
            least = min((x.time.seconds for x in said if x.time.seconds), default=inf)
            own = dict(estimates)[plan].seconds
            remarks = [
                *plan.remarks(),
                *([why_longer(plan)] if own and own > least else ()),
                *([f"It takes {choice}, by what was measured."] if choice else ()),
                *(x.in_words for x in of_family if x.plan is not plan),
            ]
        return cls(problem, target, plan, estimates, rejected, tuple(remarks))

    @property
    def kernel(self) -> str | None:
        """The name of the plan's; None where nothing serves the call."""
        return None if self.plan is None else self.plan.kernel

    def __str__(self) -> str:
        problem, plan = self.problem, self.plan
        lines = [f"target   {self.target}", f"problem  {_describe(problem)}"]
        if plan is None:
            lines.append("kernel   none")
        else:
            lines.append(kernel_in_words(plan.kernel, plan.family, plan.is_built))
            lines.append(f"source   {plan.source}")
            stages = plan.stages()
            lines.extend(f"stage    {stage}" for stage in stages if len(stages) > 1)
            seconds, is_measured = dict(self.estimates).get(plan, Time(None))
            if seconds is not None:
                word = "measured" if is_measured else "estimate"
                lines.append(f"{word} {microseconds(seconds)}")
        return "\n".join((*lines, *reasons_in_words(self.rejected, self.remarks)))

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        plan = self.plan
        return {
            "target": str(self.target),
            "problem": _describe(self.problem),
            "family": plan and plan.family,
            "kernel": self.kernel,
            "source": plan and plan.source,
            "built": plan and plan.is_built,
            "key": plan and key_of(self.problem, plan.stages(), _arch_of(self.target)),
            "stages": [
                {"family": stage.family, "kernel": stage.kernel, "condition": stage.condition}
                for stage in (() if plan is None else plan.stages())
            ],
            "estimates": [
                {
                    "family": each.family,
                    "kernel": each.kernel,
                    "source": each.source,
                    "num_splits": each.num_splits,
                    "threads": each.threads,
                    "microseconds": None if time.seconds is None else time.seconds * 1e6,
                    "measured": time.is_measured,
                }
                for each, time in self.estimates
            ],
            "rejected": {family: list(reasons) for family, reasons in self.rejected.items()},
            "remarks": list(self.remarks),
        }


def _arch_of(target: Target) -> str:
    return target.arch if isinstance(target, AmdTarget) else target.isa


def _every_sentence(
    entrant: Entrant, refusal: Refusal, problem: Problem, target: Target
) -> tuple[str, ...]:
    """Why a family refuses, with what it was not asked because of features that it lacks."""
    family = entrant.family()
    if problem.features <= family.SERVES:
        return refusal.sentences()
    broken = Refusal(family.reasons(problem, target))
    return tuple(dict.fromkeys((*refusal.sentences(), *broken.sentences())))


def explain_problem(problem: Problem, target: Target) -> Explanation:
    """The plan for ``problem`` and, for every family that is not taken, the reasons."""
    return Explanation.of(problem, target, propose(problem, target))


def refusal_of_features(family: Family, problem: Problem) -> Refusal | None:
    """What a problem asks for and a family does not declare; None where there is nothing."""
    missing = problem.features - family.SERVES
    if not missing:
        return None
    served = [name for name, feature in DTYPE_FEATURES.items() if feature in family.SERVES]
    values = {
        "mask": problem.mask,
        "dtype": problem.dtype,
        "served": ", ".join(served) or "no dtype",
    }
    return Refusal(
        tuple(
            Reason(_TEMPLATES.get(feature, _ANY_FEATURE), feature=feature.value, **values)
            for feature in sorted(missing, key=lambda feature: feature.name)
        ),
        of_every_size=True,
    )


_ANY_FEATURE = "It does not serve {feature}."
# Where there is more to say.
_TEMPLATES: dict[Enum, str] = {
    **dict.fromkeys(
        (Feature.CAUSAL_MASK, Feature.WINDOW_MASK, Feature.TOP_LEFT_MASK),
        "It does not serve {feature}; the mask is {mask}.",
    ),
    **dict.fromkeys(DTYPE_FEATURES.values(), "It serves {served}; the inputs are {dtype}."),
}


_MODIFIERS = (
    *(feature for row in SCORE_FEATURES for feature in row.features),
    *(Feature.DROPOUT, Feature.NUM_SPLITS),
)


def _describe(problem: Problem) -> str:
    if problem.mode == "gm0":
        sizes = f"batch {problem.batch}, seqlen {problem.seqlen_q} x {problem.seqlen_k}"
    elif problem.is_paged:
        sizes = (
            f"{problem.batch} sequences, {problem.seqlen_q} packed rows x pages of "
            f"{problem.seqlen_k} keys"
        )
    else:
        sizes = f"{problem.batch} sequences, {problem.seqlen_q} x {problem.seqlen_k} packed rows"
    asked = (feature.value for feature in _MODIFIERS if feature in problem.features)
    modifiers = "".join(f", {text}" for text in asked)
    direction = "" if problem.direction == "forward" else "backward, "
    return (
        f"{direction}{problem.mode}, {problem.dtypes_in_words}, {sizes}, "
        f"heads {problem.heads_q}/{problem.heads_k}, "
        f"hdim {problem.hdim_q}x{problem.hdim_v}, mask {problem.mask}, "
        f"{'with' if problem.has_lse else 'without'} lse{modifiers}"
    )
