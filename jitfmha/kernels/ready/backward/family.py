"""Which backward passes the code objects of this package serve, and the plan for one."""

from __future__ import annotations

from functools import cached_property

from ....amd.chips import Arch
from ....amd.code_object import CodeObject
from ....amd.manifest import KernelRow, ReadyBackwardRow
from ....amd.tree import Tree
from ....planning.measured import Variant
from ....planning.plan import Launch, Plan, Reason, Refusal
from ....planning.specification import Stage
from ....planning.target import AmdTarget, Target
from ....problem.features import Feature
from ....problem.problem import PlainSizes, Problem
from ...amd_plan import AmdPlan, algorithm_of, version_of
from ...backward_estimate import backward_seconds
from ...compiled.backward_launch import backward_launch, load_kernels
from ...rules import ATTENTION, BACKWARD, reasons_of
from ..policy import fills_gpu
from .kernels import kernels_of, turns_of
from .limits import RULES

NAME = "ready"
SERVES = ATTENTION | BACKWARD | {Feature.BF16, Feature.FP16, Feature.WINDOW_MASK}


def reasons(problem: Problem, target: Target) -> tuple[Reason, ...]:
    """Every rule that ``problem`` breaks, whatever features it asks for."""
    assert isinstance(target, AmdTarget)
    return tuple(reasons_of(RULES, problem, target.arch))


def propose(problem: Problem, target: Target) -> tuple[ReadyBackwardPlan] | Refusal:
    """Choose the code object for ``problem``, or say why there is none."""
    assert isinstance(target, AmdTarget)
    broken = reasons(problem, target)
    if broken:
        return Refusal(broken)
    passed_over: list[Reason] = []
    for tree in target.trees:
        tree.warn_of(tree.ready_backward)
        passed_over += (Reason("{oddity}", oddity=x) for x in tree.ready_backward.why_empty)
        if not tree.ready_backward.rows:
            continue
        row = _chosen_row(tree, problem, target)
        if row is None:
            template = "{tree}: none for {dtype} and hdim {hdim_q}x{hdim_v}."
            values = {"dtype": problem.dtype, "hdim_q": problem.hdim_q, "hdim_v": problem.hdim_v}
            passed_over.append(Reason(template, tree=tree, **values))
            continue
        code_object = tree.code_object(row)
        if not isinstance(code_object, Exception):
            return (ReadyBackwardPlan(problem, target, tree, row, code_object),)
        passed_over.append(Reason("{tree}: {error}", tree=tree, error=code_object))
    template = "No tree has code objects of backward kernels of ours for {arch}."
    return Refusal(tuple(passed_over) or (Reason(template, arch=target.arch),))


def _chosen_row(tree: Tree, problem: Problem, target: AmdTarget) -> ReadyBackwardRow | None:
    """The row with the most keys of a workgroup of those that fill the GPU, or else the fewest."""
    chosen = None
    lines = problem.heads_k * (1 if problem.mode == "gm1" else problem.batch)
    for row in tree.ready_backward.rows:
        if _row_serves(row, problem, target.arch):
            chosen = row
            if fills_gpu(lines, problem.seqlen_k, row.keys, target.compute_units):
                break
    return chosen


def _row_serves(row: ReadyBackwardRow, problem: Problem, arch: Arch) -> bool:
    return (
        row.dtype == problem.dtype
        and (row.hdim_q, row.hdim_v) == (problem.hdim_q, problem.hdim_v)
        and row.is_masked == (not problem.mask.is_none)
        and row.mode == int(problem.mode == "gm1")
        and row.is_deterministic == problem.is_deterministic
        and row.rounds(problem.bf16_cvt, arch)
    )


class ReadyBackwardPlan(AmdPlan):
    """The code object for one backward pass, with its three kernels."""

    family = NAME

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        tree: Tree,
        row: ReadyBackwardRow,
        code_object: CodeObject,
    ) -> None:
        super().__init__(problem, target, "ready", row.symbol, f"{row.file} of {tree}")
        self.is_named = not tree.is_shipped
        self.tree = tree
        self.row = row
        self.code_object = code_object

    @cached_property
    def version(self) -> str:
        return version_of((self.code_object,))

    def variants(self, seqlen_q: int, seqlen_k: int) -> list[Plan]:
        names = (Variant(NAME, row.symbol, "") for row in self.tree.ready_backward.rows)
        return [plan for name in names if (plan := self.with_choice(name)) is not None]

    def with_choice(self, variant: Variant) -> ReadyBackwardPlan | None:
        problem, target = self.problem, self.target
        for row in self.tree.ready_backward.rows:
            is_it = row.symbol == variant.kernel and _row_serves(row, problem, target.arch)
            if not is_it or row is self.row or variant.num_splits:
                continue
            code_object = self.tree.code_object(row)
            if not isinstance(code_object, Exception):
                return ReadyBackwardPlan(problem, target, self.tree, row, code_object)
        return None

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float:
        problem, target = self.problem, self.target
        return backward_seconds(problem, target, "ready", self.row.keys, seqlen_q, seqlen_k)

    def rows(self) -> tuple[KernelRow, ...]:
        return tuple(kernel.row for kernel in kernels_of(self.row))

    def stages(self) -> tuple[Stage, ...]:
        families = ("bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq")
        rows = zip(families, self.rows(), strict=True)
        return tuple(Stage(x, row.name, algorithm_of(row, NAME)) for x, row in rows)

    def remarks(self) -> list[str]:
        odd = [oddity for tree in self.target.trees for oddity in tree.ready_backward.oddities]
        if self.row.is_deterministic:
            return [*odd, "dq is added up in one order: workgroups wait for their turns."]
        order = "dq is added up in any order; deterministic=True takes kernels that have one order."
        return [*odd, order]

    def bind(self) -> None:
        self._kernels = load_kernels(self, kernels_of(self.row), self.code_object)

    def launch_for(self, sizes: PlainSizes) -> Launch:
        problem = self.problem.with_sizes(sizes)
        turns = turns_of(self.row, problem) if self.row.is_deterministic else 0
        return backward_launch(problem, self._kernels, adds_dq_up=True, turns=turns).__call__
