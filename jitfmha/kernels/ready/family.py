"""The ready family: code objects of ``hsa/``, or of a tree that the environment names.

A kernel is chosen in each tree that has a row for the problem, whose kernel has no limit in the
way, and whose code object is what it should be. Of our own rows, which differ in their tiles, that
with the best tile is taken.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, cast

import torch

from ...amd.chips import architecture
from ...amd.code_object import CodeObject
from ...amd.manifest import KernelDtype, KernelRow, plain_name
from ...amd.tree import Tree
from ...planning.measured import Variant
from ...planning.plan import Launch, Plan, Reason, Refusal, splits_to_time
from ...planning.specification import Algorithm, Stage
from ...planning.target import AmdTarget, Target
from ...problem.arguments import Tensors
from ...problem.features import DTYPE_FEATURES, Feature
from ...problem.memory import write_zeros
from ...problem.problem import BF16_CVTS, PlainSizes, Problem
from ..amd_plan import COMBINES, AmdPlan, algorithm_of, version_of
from ..launcher import Block, BoundKernel
from ..rules import ATTENTION, reasons_of
from .limits import DTYPE_RULE, PACKED_MASK_RULE, SIZE_RULES, are_far_from_limits, reasons_of_row
from .policy import Wanted, mask_column, row_serves
from .tile_choice import Tile, TileChoice

NAME = "ready"
SERVES = ATTENTION | {
    Feature.BF16,
    Feature.FP16,
    Feature.FP8_E4M3FNUZ,
    Feature.FP8_E4M3FN,
    Feature.DESCALES,
}

_RULES = (DTYPE_RULE, *SIZE_RULES, PACKED_MASK_RULE)
_MODES = ("gm0", "gm1")
_MASK_NAMES = ("none", "causal (top-left)", "causal (bottom-right)")


def propose(problem: Problem, target: Target) -> tuple[ReadyPlan, ...] | Refusal:
    """The kernel of each tree that serves ``problem``."""
    assert isinstance(target, AmdTarget)
    for tree in target.trees:
        tree.warn_of(tree.forward)
    found = _choose(problem, target)
    if found.choices:
        return tuple(ReadyPlan(problem, target, *each, found) for each in found.choices)
    odd = (oddity for tree in target.trees for oddity in tree.forward.why_empty)
    said = found.passed_over or reasons(problem, target)
    return Refusal(
        (*(Reason("{oddity}", oddity=oddity) for oddity in odd), *said),
        of_every_size=not any(_rows_of_any_size(tree, problem, target) for tree in target.trees),
    )


def reasons(problem: Problem, target: Target) -> tuple[Reason, ...]:
    """Every rule that ``problem`` breaks, and every tree without a kernel for it."""
    assert isinstance(target, AmdTarget)
    if not target.trees:
        return (Reason("This version ships no code objects for {arch}.", arch=target.arch),)
    broken = tuple(reasons_of(_RULES, problem, target.arch))
    if DTYPE_FEATURES[problem.dtype] not in SERVES:
        return broken  # Of other data types no tree has kernels, which is said once.
    trees = (tree for tree in target.trees if not _rows(tree, problem, target))
    return (*broken, *(_no_row(tree, problem, target) for tree in trees))


class Choice(NamedTuple):
    """A kernel that serves a problem, and what it was chosen from."""

    tree: Tree
    row: KernelRow
    code_object: CodeObject
    tiles: TileChoice

    @property
    def kernel(self) -> tuple[Tree, KernelRow]:
        return self.tree, self.row


class Found(NamedTuple):
    """The choice of each tree that has one, in order, with why trees before it were passed over.

    Attributes:
        passed_over: why trees were, all together.
        is_of_every_size: whether those have nothing for the same call with other lengths, either.
    """

    choices: tuple[tuple[Choice, tuple[Reason, ...]], ...]
    passed_over: tuple[Reason, ...]
    is_of_every_size: bool


def _choose(problem: Problem, target: AmdTarget) -> Found:
    if any(reasons_of(_RULES, problem, target.arch)):
        return Found((), (), is_of_every_size=False)
    choices: list[tuple[Choice, tuple[Reason, ...]]] = []
    passed_over: list[Reason] = []
    is_of_every_size = True
    for tree in target.trees:
        found = _choice_in(tree, problem, target)
        if isinstance(found, Choice):
            choices.append((found, tuple(passed_over)))
        else:
            passed_over.extend(found)
            is_of_every_size &= not _rows_of_any_size(tree, problem, target)
    return Found(tuple(choices), tuple(passed_over), is_of_every_size)


def _choice_in(tree: Tree, problem: Problem, target: AmdTarget) -> Choice | list[Reason]:
    rows = _rows(tree, problem, target)
    if not rows:
        return [_no_row(tree, problem, target)]
    tiles = TileChoice(rows, problem, target)
    row = tiles.tile_for(problem.seqlen_q, problem.seqlen_k).row
    limits = reasons_of_row(problem, target, row)
    if limits:
        return [Reason("{tree}: {reason}", tree=tree, reason=reason) for reason in limits]
    code_object = tree.code_object(row)
    if isinstance(code_object, Exception):
        return [Reason("{tree}: {error}", tree=tree, error=code_object)]
    return Choice(tree, row, code_object, tiles)


def _rows(tree: Tree, problem: Problem, target: AmdTarget) -> list[KernelRow]:
    """The manifest's rows for a problem: one, or where there are tiles to choose from several."""
    return _rows_of_mask(tree, problem, target, _mask_column(problem))


def _rows_of_any_size(tree: Tree, problem: Problem, target: AmdTarget) -> list[KernelRow]:
    """The rows for the same call with any lengths: equal ones make both corners of a mask one."""
    columns = (1, 2) if problem.mask.top_left else (_mask_column(problem),)
    return [row for column in columns for row in _rows_of_mask(tree, problem, target, column)]


def _rows_of_mask(tree: Tree, problem: Problem, target: AmdTarget, mask: int) -> list[KernelRow]:
    wanted = Wanted(
        dtype=_row_dtype(problem),
        hdim_q=problem.hdim_q,
        hdim_v=problem.hdim_v,
        mask=mask,
        mode=_MODES.index(problem.mode),
        bf16_cvt=BF16_CVTS.index(problem.bf16_cvt),
    )
    has_roundings = architecture(target.arch).has_roundings(wanted.dtype)
    return [row for row in tree.forward.rows if row_serves(row, wanted, has_roundings)]


def _no_row(tree: Tree, problem: Problem, target: AmdTarget) -> Reason:
    has_roundings = architecture(target.arch).has_roundings(_row_dtype(problem))
    return Reason(
        "{tree}: no kernel for {dtype}, hdim {hdim_q}x{hdim_v}, mask {mask}, {mode}{cvt} "
        "on {chip}.",
        tree=tree,
        dtype=_row_dtype(problem),
        hdim_q=problem.hdim_q,
        hdim_v=problem.hdim_v,
        mask=_MASK_NAMES[_mask_column(problem)],
        mode=problem.mode,
        cvt=f", {problem.bf16_cvt}" if has_roundings else "",
        chip=target.chip,
    )


def _row_dtype(problem: Problem) -> KernelDtype:
    """A manifest's name for the data type of a problem; of others than these no row is."""
    return "fp8bf16" if problem.is_fp8 else cast("KernelDtype", problem.dtype)


def _mask_column(problem: Problem) -> int:
    mask = problem.mask
    return mask_column(not mask.is_none, mask.top_left, problem.seqlen_q, problem.seqlen_k)


class ReadyPlan(AmdPlan):
    """The code object that is chosen for one problem."""

    family = NAME

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        choice: Choice,
        passed_over: tuple[Reason, ...],
        found: Found,
    ) -> None:
        row = choice.row
        block: Block = "aiter" if row.abi == "aiter" else "ready"
        super().__init__(problem, target, block, row.name, f"{row.file} of {choice.tree}")
        self.choice = choice
        self.passed_over = passed_over
        self.is_named = not choice.tree.is_shipped
        self._row = row
        self._tile_for = choice.tiles.tile_for
        self._served: tuple[PlainSizes, Tile] = problem.sizes, self._tile_for(*problem.sizes[:2])
        self._found = found
        self._kernels = [each.kernel for each, _ in found.choices]
        self._trees_are_settled = found.is_of_every_size
        self._is_group = problem.mode == "gm1"
        self._is_top_left = problem.mask.top_left
        self._are_far_from_limits = are_far_from_limits(problem, row)

    @cached_property
    def version(self) -> str:
        return version_of((self.choice.code_object,))

    @property
    def variant(self) -> Variant | None:
        return None if len(self.choice.tiles.rows) > 1 else super().variant

    def variants(self, seqlen_q: int, seqlen_k: int) -> list[Plan]:
        splits = splits_to_time(seqlen_k // self.problem.packs)
        names = (
            Variant(NAME, row.name, "", num_splits)
            for row in self.choice.tiles.rows
            for num_splits in (0, *splits)
        )
        return [plan for name in names if (plan := self.with_choice(name)) is not None]

    def with_choice(self, variant: Variant) -> ReadyPlan | None:
        tree, _, _, tiles = self.choice
        row = next((row for row in tiles.rows if row.name == variant.kernel), None)
        if row is None or (variant.num_splits and not row.can_split_keys):
            return None
        if variant.num_splits == 0 and len(tiles.rows) == 1:
            return None  # that is this plan
        code_object = tree.code_object(row)
        if isinstance(code_object, Exception) or reasons_of_row(self.problem, self.target, row):
            return None
        fixed = TileChoice([row], self.problem, self.target, variant.num_splits)
        choice = Choice(tree, row, code_object, fixed)
        plan = ReadyPlan(self.problem, self.target, choice, self.passed_over, self._found)
        plan.num_splits = variant.num_splits
        return plan

    def rows(self) -> tuple[KernelRow, ...]:
        return (self.choice.row,)

    def stages(self) -> tuple[Stage, ...]:
        _, splits, splits_of = self._tile_for(*self.problem.sizes[:2])
        if splits_of is not None:
            splits = splits_of(-(-self.problem.seqlen_q // self.problem.packs))
        algorithm = algorithm_of(self._row, NAME)
        combine = self._row.combine_symbol
        if splits.num_splits == 1 or combine is None:
            return (Stage("fwd", self.kernel, algorithm),)
        parts = Stage("fwd_splitkv", self.kernel, algorithm)
        return parts, Stage(COMBINES, plain_name(combine), Algorithm(NAME))

    def remarks(self) -> list[str]:
        odd = [oddity for tree in self.target.trees for oddity in tree.forward.oddities]
        return [*odd, *(str(reason) for reason in self.passed_over)]

    def bind(self) -> None:
        _, row, code_object, _ = self.choice
        self._bound = BoundKernel(self.problem, self.target, self.block, row, code_object)

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float:
        return self.choice.tiles.seconds(seqlen_q, seqlen_k)

    def serves(self, sizes: PlainSizes) -> bool:
        seqlen_q, seqlen_k, _, _, _, _ = sizes
        contest = self.contest
        if contest is not None and contest.best(seqlen_q, seqlen_k) is not self:
            return False
        tile = self._tile_for(seqlen_q, seqlen_k)
        if tile.row is not self._row:
            return False
        # For launch_for, which mostly follows: to look for the tile again takes 0.2 us.
        self._served = sizes, tile
        if self._is_top_left and (seqlen_q != seqlen_k) != (self._row.mask == 1):
            return False
        if self._trees_are_settled and self._are_far_from_limits(sizes):
            return True
        problem = self.problem.with_sizes(sizes)
        if self.variant_of is not None and reasons_of_row(problem, self.target, self._row):
            return False
        found = _choose(problem, self.target)
        return [choice.kernel for choice, _ in found.choices] == self._kernels

    def launch_for(self, sizes: PlainSizes) -> Launch:
        seqlen_q, seqlen_k, _, _, _, _ = sizes
        if seqlen_k == 0 and not self._is_group:
            return write_no_attention
        served, tile = self._served
        if served is not sizes:
            tile = self._tile_for(seqlen_q, seqlen_k)
        _, splits, splits_of = tile
        # A bound method is called 0.1 us quicker than what has a __call__.
        return self._bound.launch_for(sizes, splits, splits_of).__call__


def write_no_attention(tensors: Tensors) -> None:
    """Write the result of calls without keys, which is known: there is nothing to read."""
    write_zeros(tensors.out)
    if tensors.lse is not None:
        tensors.lse.fill_(-torch.inf)
