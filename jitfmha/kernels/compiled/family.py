"""Which problems compiled kernels serve, and the plans for one, forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ... import jit
from ...amd.code_object import CodeObject
from ...amd.kernel_arguments import BACKWARD_ARGUMENTS, COMPILED_ARGUMENTS
from ...amd.manifest import KernelRow
from ...jit.shared_struct import SharedStruct
from ...planning.measured import Variant
from ...planning.plan import Plan, Reason, Refusal, splits_to_time
from ...planning.specification import Algorithm, Stage, family_of
from ...planning.target import AmdTarget, Target
from ...problem.problem import PlainSizes, Problem, element_bytes
from ..amd_plan import COMBINES, AmdPlan
from ..backward_estimate import backward_seconds
from ..launcher import BoundKernel
from ..ready.key_split import ONE_SPLIT
from ..ready.limits import SIZE_RULES, are_far_from_limits
from ..rules import reasons_of
from .backward_launch import BackwardLaunch, backward_launch, load_kernels
from .backward_traits import BackwardTraits, backward_spec, part_of
from .estimate import CompiledEstimate
from .launch import ForwardLaunch, NumberModifiers
from .modifiers import modifier_constants
from .rules import RULES
from .split_choice import SplitChoice
from .tile_table import Tile
from .traits import (
    ForwardTraits,
    forward_tile,
    have_same_traits,
    kernel_spec,
    row_of_built,
)
from .turns import rows_of_pages
from .work_list import list_workspace, listed_work, may_list_work

NAME = "compiled"


def reasons(problem: Problem, target: Target) -> tuple[Reason, ...]:
    """Every rule that ``problem`` breaks, whatever features it asks for."""
    assert isinstance(target, AmdTarget)
    return tuple(reasons_of(RULES, problem, target.arch))


def propose(problem: Problem, target: Target) -> tuple[Plan, ...] | Refusal:
    """The kernel for exactly what ``problem`` asks for, and the one with persistent workgroups."""
    assert isinstance(target, AmdTarget)
    broken = reasons(problem, target)
    if broken:
        return Refusal(broken)
    if problem.direction == "backward":
        return (BackwardPlan(problem, target),)
    plan = ForwardPlan(problem, target)
    if not plan.may_list_work(problem):
        return (plan,)
    listed = ForwardPlan(problem, target, lists_work=True)
    # Without estimates the first one is taken: where keys are in pages.
    return (listed, plan) if problem.is_paged else (plan, listed)


def algorithm_of_tile(tile: Tile) -> Algorithm:
    """How a compiled kernel computes, whose tiles have whole rows of slices of the result."""
    columns = tile.hdim_q, tile.hdim_v
    if tile.kernel in ("dq", "dk"):
        columns = tile.hdim_q // tile.slices, tile.hdim_v
    elif tile.slices > 1:
        columns = tile.hdim_q, tile.hdim_v // tile.slices
    sides = tile.tile_q, tile.tile_k, *columns, tile.tile_k, tile.hdim_q
    return Algorithm(NAME, sides)


class CompiledPlan(AmdPlan):
    """A plan whose kernels, which take ``arguments``, are compiled when it is bound."""

    family = NAME
    arguments: SharedStruct

    @property
    @abstractmethod
    def spec(self) -> jit.BuildSpec:
        """The build of its kernels."""

    @property
    def version(self) -> str:
        return self.spec.digest

    @property
    def specs(self) -> Sequence[jit.BuildSpec]:
        return [self.spec, *super().specs]

    @property
    def can_be_built(self) -> bool:
        from ...jit.toolchain.device_hip import find_device_hip  # asks a process

        try:
            find_device_hip()
        except jit.CompilerNotFound:
            return jit.is_built(self.spec)
        return True

    def remarks(self) -> list[str]:
        from ...jit.toolchain.device_hip import device_hip_in_words  # asks a process

        return [f"compiler for AMD GPUs: {device_hip_in_words()}"]

    def compiled(self) -> CodeObject:
        spec = self.spec
        path, image = Path(spec.artifact_name), jit.read(spec)
        return CodeObject(path, image, self.kernel, self.arguments.size)


class ForwardPlan(CompiledPlan):
    """The kernel that is compiled for one problem."""

    arguments = COMPILED_ARGUMENTS

    def __init__(self, problem: Problem, target: AmdTarget, *, lists_work: bool = False) -> None:
        traits = ForwardTraits.of(problem, target.arch, target.compute_units, lists_work=lists_work)
        source = f"csrc_templates/amd/{traits.template}.in"
        super().__init__(problem, target, "compiled", traits.name, source)
        self.traits = traits
        self._tile = forward_tile(traits.arch, traits.dtype, traits.hdim_q, traits.hdim_v)
        self._slices = traits.slices
        self._are_far_from_limits = are_far_from_limits(problem, traits.row())
        self._estimate: CompiledEstimate | None = None
        self._has_same_traits = have_same_traits(problem, traits, target.compute_units)

    @property
    def spec(self) -> jit.BuildSpec:
        return kernel_spec(self.traits)

    def rows(self) -> tuple[KernelRow, ...]:
        return (self.traits.row(),)

    def stages(self) -> tuple[Stage, ...]:
        traits, problem = self.traits, self.problem
        algorithm = algorithm_of_tile(traits.tile)
        main = Stage(family_of(problem), self.kernel, algorithm)
        if traits.lists_work:
            return Stage("fwd_list", traits.list_name, Algorithm(NAME)), main
        combine = Stage(COMBINES, traits.combine_name, Algorithm(NAME))
        if problem.num_splits > 1 or problem.has_split_results:
            return main, combine
        if problem.is_paged and problem.num_splits == 0:
            return main, combine._replace(condition="where keys are split, as their number decides")
        num_splits = problem.num_splits or self._estimated().num_splits(*problem.sizes[:2])
        if num_splits == 1:
            return (main,)
        parts = main._replace(family="fwd_splitkv")
        return parts, combine._replace(condition=f"of about {num_splits} splits")

    def bind(self) -> None:
        problem, target, traits = self.problem, self.target, self.traits
        code_object = self.compiled()
        row = row_of_built(traits, code_object.image)
        self._row, self._listed = row, None
        if traits.lists_work:
            self._listed = listed_work(problem, target, row, traits.list_name)
        self._bound = BoundKernel(problem, target, self.block, row, code_object, self._listed)
        self._splits = SplitChoice(
            *(problem, target, row, traits.slices, traits.made_columns),
            streams=traits.decode_blocks is not None,
            are_latents=bool(traits.row_blocks),
        )
        constants, slices = modifier_constants(problem), self._slices
        self._modifiers = cache(lambda column: NumberModifiers.of(constants, (slices, column)))
        self._is_paged = problem.is_paged
        self._kv_bytes = element_bytes(problem).kv

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float | None:
        if self.problem.is_paged:
            return None  # how many keys there are nobody says
        return self._estimated().seconds(seqlen_q, seqlen_k)

    def _estimated(self) -> CompiledEstimate:
        if self._estimate is None:
            self._estimate = CompiledEstimate(self.problem, self.target, self.traits)
        return self._estimate

    def may_list_work(self, problem: Problem) -> bool:
        """Whether there is a plan with persistent workgroups beside this one, for these sizes.

        In a batch whose sequences are equally long few rows see the same keys. Where keys are in
        pages nobody estimates what either takes: there it is the plan of calls that have neither
        the kernel for few rows nor the one whose waves take turns.
        """
        if not may_list_work(problem, self._tile, streams=self.traits.streams):
            return False
        if problem.mode == "gm1" and not problem.is_paged:
            return True
        plain = ForwardTraits.of(problem, self.traits.arch, self.target.compute_units)
        return not (plain.decode_blocks or plain.takes_turns)

    def variants(self, seqlen_q: int, seqlen_k: int) -> list[Plan]:
        splits = splits_to_time(seqlen_k // self.problem.packs)
        names = (Variant(NAME, self.kernel, "", num_splits) for num_splits in splits)
        return [plan for name in names if (plan := self.with_choice(name)) is not None]

    def with_choice(self, variant: Variant) -> ForwardPlan | None:
        if variant.kernel != self.kernel or variant.num_splits == 0 or self.traits.lists_work:
            return None
        problem = self.problem._replace(num_splits=variant.num_splits)
        plan = ForwardPlan(problem, self.target)
        plan.num_splits = variant.num_splits
        return plan

    def serves(self, sizes: PlainSizes) -> bool:
        contest = self.contest
        if contest is not None and contest.best(sizes[0], sizes[1]) is not self:
            return False
        traits, target = self.traits, self.target
        is_listed = traits.lists_work
        if not is_listed and self._has_same_traits(sizes) and self._are_far_from_limits(sizes):
            return True
        problem = self.problem.with_sizes(sizes)
        if is_listed and not self.may_list_work(problem):
            return False
        same = ForwardTraits.of(problem, target.arch, target.compute_units, lists_work=is_listed)
        return same == traits and not any(reasons_of(SIZE_RULES, problem, target.arch))

    def launch_for(self, sizes: PlainSizes) -> ForwardLaunch:
        seqlen_q, seqlen_k, q, k, v, out = sizes
        kernel, page_size = self._bound, seqlen_k
        pages = (0, 0)
        if self._is_paged:
            # The launcher is told of the rows of a page, the kernel of pages too.
            pages = k[0] * self._kv_bytes, v[0] * self._kv_bytes
            if self.traits.takes_turns:
                pages = rows_of_pages(self.problem, sizes)
            sizes = seqlen_q, seqlen_k, q, k[1:], v[1:], out
        splits = ONE_SPLIT
        if self._listed:
            splits = list_workspace(self.problem, seqlen_q, self._listed, self._row)
        elif kernel.is_group:
            # What the caller does not tell: sequences count as equally long.
            seqlen_k = -(-seqlen_k // self.problem.batch)
        else:
            splits = self._splits.splits(seqlen_q, seqlen_k)
        launch = kernel.launch_for(sizes, splits, None)
        modifiers = self._modifiers(v[-1] * self._kv_bytes)
        choice = None if self._listed else self._splits
        return ForwardLaunch(launch, choice, seqlen_k, pages, page_size, modifiers)


class BackwardPlan(CompiledPlan):
    """The kernels that are compiled for one backward pass."""

    arguments = BACKWARD_ARGUMENTS

    def __init__(self, problem: Problem, target: AmdTarget) -> None:
        traits = BackwardTraits.of(problem, target.arch)
        source = "csrc_templates/amd/compiled_bwd.hip.in"
        super().__init__(problem, target, "compiled", traits.name, source)
        self.traits = traits

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float | None:
        if self.traits.dtype == "fp32" or self.traits.streams:
            return None  # no other family has such kernels
        rows, others = self.traits.tile.own_rows, len(self.traits.kernels()) - 1
        return backward_seconds(
            *(self.problem, self.target, "compiled", rows, seqlen_q, seqlen_k), edges=others
        )

    @property
    def spec(self) -> jit.BuildSpec:
        return backward_spec(self.traits)

    def rows(self) -> tuple[KernelRow, ...]:
        return tuple(kernel.row for kernel in self.traits.kernels())

    def stages(self) -> tuple[Stage, ...]:
        made = []
        for row in self.rows():
            tile = self.traits.tile_of(part_of(row.symbol))
            assert tile is not None
            made.append(Stage("bwd_dq_dk_dv", row.name, algorithm_of_tile(tile)))
        return tuple(made)

    def bind(self) -> None:
        self._kernels = load_kernels(self, self.traits.kernels(), self.compiled())

    def launch_for(self, sizes: PlainSizes) -> BackwardLaunch:
        problem = self.problem.with_sizes(sizes)
        adds_bias = problem.modifiers.bias not in (None, "bool")
        return backward_launch(problem, self._kernels, adds_dq_up=False, shifts_rows=adds_bias)
