"""The tuned family: code objects of ``hsa/``, or of a tree that the environment names.

A kernel is chosen tree by tree: the first that has a row for the problem, whose kernel has no limit
in the way, and whose code object is what it should be. Of our own rows, which differ in their
tiles, that with the best tile is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...arguments import Tensors
from ...memory import write_zeros
from ...plan import Kernel, Launch, Reason, Refusal
from ...problem import BF16_CVTS, Feature, Problem, Sizes
from ...target import AmdTarget, Target
from .limits import (
    are_far_from_limits,
    reason_of_row,
    reasons_of_sizes,
    reasons_of_target,
)
from .tile_choice import TileChoice

if TYPE_CHECKING:
    from ...amd.code_object import CodeObject
    from ...amd.launcher import BoundKernel
    from ...amd.manifest import KernelRow, Tree

NAME = "tuned"
SERVES = frozenset(
    {
        Feature.BF16,
        Feature.FP16,
        Feature.FP8_E4M3FNUZ,
        Feature.FP8_E4M3FN,
        Feature.DESCALES,
        Feature.GROUP_MODE,
        Feature.PADDED_SEQUENCES,
        Feature.CAUSAL_MASK,
        Feature.TOP_LEFT_MASK,
        Feature.LSE,
    }
)

_MODES = ("gm0", "gm1")
_MASK_NAMES = ("none", "causal (top-left)", "causal (bottom-right)")


def propose(problem: Problem, target: Target) -> TunedPlan | Refusal:
    """The kernel of the first tree that serves ``problem``."""
    assert isinstance(target, AmdTarget)
    if not target.trees:
        template = "This version ships no code objects for {arch}."
        return Refusal((Reason(template, arch=target.arch),))
    for tree in target.trees:
        tree.warn_of_oddities()
    reasons = (*reasons_of_target(problem, target), *reasons_of_sizes(problem))
    if reasons:
        return Refusal(reasons)
    passed_over: list[Reason] = []
    for tree in target.trees:
        found = _choice_in(tree, problem, target)
        if isinstance(found, Choice):
            return TunedPlan(problem, target, found, tuple(passed_over))
        passed_over.append(found)
    return Refusal(tuple(passed_over))


class Choice(NamedTuple):
    """A kernel that serves a problem, and what it was chosen from."""

    tree: Tree
    row: KernelRow
    code_object: CodeObject
    tiles: TileChoice


def _choice_in(tree: Tree, problem: Problem, target: AmdTarget) -> Choice | Reason:
    rows = _rows(tree, problem, target)
    if not rows:
        return _no_row(tree, problem, target)
    tiles = TileChoice(rows, problem, target)
    row = tiles.tile_for(problem.seqlen_q, problem.seqlen_k).row
    reason = reason_of_row(problem, target, row)
    if reason is not None:
        return Reason("{tree}: {reason}", tree=tree, reason=reason)
    code_object = tree.code_object(row)
    if isinstance(code_object, Exception):
        return Reason("{tree}: {error}", tree=tree, error=code_object)
    return Choice(tree, row, code_object, tiles)


def _rows(tree: Tree, problem: Problem, target: AmdTarget) -> list[KernelRow]:
    """The manifest's rows for a problem: one, or where there are tiles to choose from several."""
    wanted = (
        *("fp8bf16" if problem.is_fp8 else problem.dtype, problem.hdim_q, problem.hdim_v),
        *(_mask_column(problem), _MODES.index(problem.mode)),
    )
    converts = _converts(problem, target)
    return [
        row
        for row in tree.rows
        if (row.dtype, row.hdim_q, row.hdim_v, row.mask, row.mode) == wanted
        and (not converts or BF16_CVTS[row.bf16_cvt] == problem.bf16_cvt)
    ]


def _no_row(tree: Tree, problem: Problem, target: AmdTarget) -> Reason:
    return Reason(
        "{tree}: no kernel for {dtype}, hdim {hdim_q}x{hdim_v}, mask {mask}, {mode}{cvt} "
        "on {chip}.",
        tree=tree,
        dtype="fp8bf16" if problem.is_fp8 else problem.dtype,
        hdim_q=problem.hdim_q,
        hdim_v=problem.hdim_v,
        mask=_MASK_NAMES[_mask_column(problem)],
        mode=problem.mode,
        cvt=f", {problem.bf16_cvt}" if _converts(problem, target) else "",
        chip=target.chip,
    )


def _converts(problem: Problem, target: AmdTarget) -> bool:
    """Whether there is a kernel for each way from float32 to bf16.

    gfx950 rounds in hardware. fp16 kernels have no bf16 inside, and fp8 ones no choice.
    """
    return problem.dtype == "bf16" and target.arch == "gfx942"


def _mask_column(problem: Problem) -> int:
    """The manifest's number for the mask: where both corners are one, bottom-right serves both."""
    if problem.mask.is_none:
        return 0
    return 1 if problem.mask.top_left and problem.seqlen_q != problem.seqlen_k else 2


class TunedPlan:
    """One code object for one problem."""

    family = NAME

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        choice: Choice,
        passed_over: tuple[Reason, ...],
    ) -> None:
        self.problem = problem
        self.target = target
        self.choice = choice
        self.passed_over = passed_over

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.choice.row.name

    @property
    def source(self) -> str:
        """The tree and the file in it."""
        return f"{self.choice.row.file} of {self.choice.tree}"

    @property
    def is_built(self) -> bool:
        """True when the launcher is in the cache already."""
        from ... import jit
        from ...amd.launcher import launcher_spec  # of use where there is a GPU only

        return jit.is_built(launcher_spec())

    def remarks(self) -> list[str]:
        """What is odd in the trees, and why preferred ones do not serve the problem."""
        odd = [oddity for tree in self.target.trees for oddity in tree.oddities]
        return [*odd, *(str(reason) for reason in self.passed_over)]

    def bind(self) -> Kernel:
        """Build and load the launcher, and load the code object."""
        from ...amd.launcher import BoundKernel  # of use where there is a GPU only

        choice = self.choice
        bound = BoundKernel(self.problem, self.target, choice.row, choice.code_object)
        return TunedKernel(self, bound)


class TunedKernel:
    """A loaded kernel, for the calls of one kind that it is the best one for."""

    def __init__(self, plan: TunedPlan, bound: BoundKernel) -> None:
        problem, row = plan.problem, plan.choice.row
        self._plan = plan
        self._bound = bound
        self._row = row
        self._tile_for = plan.choice.tiles.tile_for
        self._is_group = problem.mode == "gm1"
        self._is_top_left = problem.mask.top_left
        self._is_second_choice = bool(plan.passed_over)
        self._is_far_from_limits = are_far_from_limits(problem, row)

    def launch_for(self, sizes: Sizes) -> Launch | None:
        """The launch, unless another kernel is the best one for these lengths and strides."""
        seqlen_q, seqlen_k, _, _, _, _ = sizes
        if (
            self._is_second_choice
            or not self._is_far_from_limits(sizes)
            or (self._is_top_left and (seqlen_q != seqlen_k) != (self._row.mask == 1))
        ) and not self._is_chosen_for(sizes):
            return None
        if seqlen_k == 0 and not self._is_group:
            return write_no_attention
        row, splits, splits_of = self._tile_for(seqlen_q, seqlen_k)
        if row is not self._row:
            return None
        return self._bound.launch_for(sizes, splits, splits_of)

    def _is_chosen_for(self, sizes: Sizes) -> bool:
        """Whether this tree and row are chosen where everything is asked from the beginning."""
        plan = self._plan
        answer = propose(plan.problem.with_sizes(sizes), plan.target)
        if isinstance(answer, Refusal):
            return False
        return answer.choice.tree is plan.choice.tree and answer.choice.row == self._row


def write_no_attention(tensors: Tensors) -> None:
    """Where there are no keys the result is known, and there is nothing to read."""
    write_zeros(tensors.out)
    if tensors.lse is not None:
        tensors.lse.fill_(-torch.inf)
