"""What calls of a compiled kernel are estimated to take, before it is compiled."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ...planning.target import AmdTarget
from ...problem.problem import Problem
from ..cycles import Part
from ..estimate import forward_estimate
from ..launch_estimate import ForwardEstimate
from .list_policy import LISTING_SECONDS
from .split_choice import SplitChoice
from .split_policy import compiled_seconds
from .traits import ForwardTraits, blocks_of, forward_tile, stacks_heads


class CompiledEstimate:
    """The seconds of calls that differ in lengths only, whatever kernels these take."""

    def __init__(self, problem: Problem, target: AmdTarget, traits: ForwardTraits) -> None:
        self._problem = problem
        self._target = target
        self._traits = traits
        self._tile = forward_tile(traits.arch, traits.dtype, traits.hdim_q, traits.hdim_v)
        self._packs = problem.packs
        self._estimates = cache(self._estimates_of)

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float:
        """With lengths as :meth:`jitfmha.planning.plan.Plan.seconds` has them."""
        sizes = self._problem.sizes._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        problem = self._problem.with_sizes(sizes)
        is_listed = self._traits.lists_work
        stacks = stacks_heads(problem, self._tile, are_uneven=is_listed)
        blocks = (
            (None, None) if is_listed else blocks_of(problem, stacks, self._target.compute_units)
        )
        estimate, splits = self._estimates(stacks, *blocks)
        seqlen_q, seqlen_k = -(-seqlen_q // self._packs), -(-seqlen_k // self._packs)
        if is_listed:
            return estimate.seconds(seqlen_q, seqlen_k, 1) + LISTING_SECONDS
        return compiled_seconds(estimate, splits.policy, seqlen_q, seqlen_k)

    def num_splits(self, seqlen_q: int, seqlen_k: int) -> int:
        """Into how many parts keys go, where all sequences are equally long."""
        traits = self._traits
        kind = traits.stacks_heads, traits.row_blocks, traits.decode_blocks
        _, splits = self._estimates(*kind)
        of_one = -(-seqlen_q // self._packs), -(-seqlen_k // self._packs)
        return splits.splits(*of_one).num_splits

    def _estimates_of(
        self, stacks: bool, row_blocks: int | None, decode_blocks: int | None
    ) -> _Estimates:
        problem = self._problem
        traits = replace(
            self._traits, stacks_heads=stacks, row_blocks=row_blocks, decode_blocks=decode_blocks
        )
        row = traits.row()
        part: Part = "decode" if decode_blocks else "forward"
        estimate = forward_estimate(
            *(problem, self._target, "compiled", row, traits.slices),
            part=part,
            is_shared=traits.lists_work,
        )
        # As many waves share a SIMD as workgroups of four waves share a unit.
        row = row._replace(waves_of_simd=estimate.most_shared())
        splits = SplitChoice(
            *(problem, self._target, row, traits.slices, traits.made_columns),
            streams=traits.decode_blocks is not None,
            are_latents=bool(traits.row_blocks),
        )
        return _Estimates(estimate, splits)


class _Estimates(NamedTuple):
    launch: ForwardEstimate
    splits: SplitChoice
