"""Which kernel serves a problem: the first family in order of preference that can.

The first choice costs nothing but its own check; sentences about the others are only made for
:func:`explain_problem` and for the error when nothing fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from .problem import Problem
from .target import Target


class Launch(Protocol):
    """A kernel that is built, loaded and bound to the constants of one problem."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        cu_seqlens: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        max_seqlen_q: int | None,
        descales: tuple[Tensor | None, Tensor | None, Tensor | None] | None,
    ) -> None: ...


class Plan(Protocol):
    """A kernel chosen for a problem on a target; nothing is built until :meth:`bind`."""

    @property
    def family(self) -> str: ...

    @property
    def kernel(self) -> str: ...

    @property
    def source(self) -> str:
        """Where the kernel comes from: a template, or a file of a tree of code objects."""
        ...

    @property
    def is_built(self) -> bool: ...

    def bind(self) -> Launch:
        """Render, build and load the launcher as far as that has not been done yet."""
        ...


class Family(Protocol):
    """A module of ``jitfmha.kernels``."""

    @property
    def NAME(self) -> str: ...  # noqa: N802 - a constant of the module

    def reasons_not(self, problem: Problem, target: Target) -> list[str]:
        """A sentence for each rule that keeps this family from serving the problem."""
        ...

    def plan(self, problem: Problem, target: Target) -> Plan:
        """The kernel of this family for a problem that it serves."""
        ...

    def remarks(self, problem: Problem, target: Target) -> list[str]:
        """What explain adds: everything odd about the kernels found, and which were passed over."""
        ...


@cache
def families() -> tuple[Family, ...]:
    """The families in order of preference; imported with the first call."""
    from .kernels import cpu, general, tuned

    return tuned, general, cpu


@dataclass(frozen=True)
class Explanation:
    """Where a call would run, and why nowhere else. ``str()`` gives it as sentences."""

    problem: Problem
    target: Target
    plan: Plan | None
    rejected: Mapping[str, tuple[str, ...]]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        problem, plan = self.problem, self.plan
        lines = [f"target   {self.target}", f"problem  {_describe(problem)}"]
        if plan is None:
            lines.append("kernel   none")
        else:
            built = "built" if plan.is_built else "built on first use"
            lines.append(f"kernel   {plan.kernel} (family {plan.family}, {built})")
            lines.append(f"source   {plan.source}")
        for family, reasons in self.rejected.items():
            lines.extend(f"not {family}: {reason}" for reason in reasons)
        lines.extend(f"note     {remark}" for remark in self.remarks)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        plan = self.plan
        return {
            "target": str(self.target),
            "problem": _describe(self.problem),
            "family": plan and plan.family,
            "kernel": plan and plan.kernel,
            "source": plan and plan.source,
            "built": plan and plan.is_built,
            "rejected": {family: list(reasons) for family, reasons in self.rejected.items()},
            "remarks": list(self.remarks),
        }


def select(problem: Problem, target: Target) -> Plan:
    """The preferred kernel for ``problem`` on ``target``.

    Raises ``NotImplementedError`` listing every family's reasons where none serves it.
    """
    for family in families():
        if not family.reasons_not(problem, target):
            return family.plan(problem, target)
    raise NotImplementedError(f"no kernel serves this call\n{explain_problem(problem, target)}")


def explain_problem(problem: Problem, target: Target) -> Explanation:
    """The plan for ``problem`` and, for every family that is not taken, the reasons."""
    plan: Plan | None = None
    rejected: dict[str, tuple[str, ...]] = {}
    for family in families():
        reasons = family.reasons_not(problem, target)
        if reasons:
            rejected[family.NAME] = tuple(reasons)
        elif plan is None:
            plan = family.plan(problem, target)
        else:
            rejected[family.NAME] = (f"{plan.family} is preferred.",)
    remarks = [remark for family in families() for remark in family.remarks(problem, target)]
    return Explanation(problem, target, plan, rejected, tuple(remarks))


def _describe(problem: Problem) -> str:
    if problem.mode == "gm0":
        sizes = f"batch {problem.batch}, seqlen {problem.seqlen_q} x {problem.seqlen_k}"
    else:
        sizes = f"{problem.batch} sequences, {problem.seqlen_q} x {problem.seqlen_k} packed rows"
    return (
        f"{problem.mode}, {problem.dtype}, {sizes}, heads {problem.heads_q}/{problem.heads_k}, "
        f"hdim {problem.hdim_q}x{problem.hdim_v}, mask {problem.mask}, "
        f"{'with' if problem.has_lse else 'without'} lse"
    )
