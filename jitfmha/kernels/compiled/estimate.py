"""What calls of a compiled kernel are estimated to take, before it is compiled."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ...planning.target import AmdTarget
from ...problem.problem import Problem
from ..estimate import ForwardEstimate
from .split_choice import SplitChoice
from .traits import ForwardTraits, stacks_heads


class CompiledEstimate:
    """The seconds of calls that differ in lengths only, whether heads are stacked or not."""

    def __init__(self, problem: Problem, target: AmdTarget, traits: ForwardTraits) -> None:
        self._problem = problem
        self._target = target
        self._traits = traits
        self._packs = problem.packs
        self._estimates = cache(self._estimates_of)

    def seconds(self, seqlen_q: int, seqlen_k: int) -> float:
        """With lengths as :meth:`jitfmha.planning.plan.Plan.seconds` has them."""
        sizes = self._problem.sizes._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        problem = self._problem.with_sizes(sizes)
        estimate, splits = self._estimates(stacks_heads(problem, self._traits.tile))
        seqlen_q, seqlen_k = -(-seqlen_q // self._packs), -(-seqlen_k // self._packs)
        seconds = 0.0
        for lengths in estimate.lengths:
            # As many as pay for the longest sequences.
            longest_q = round(lengths.queries[0] * seqlen_q)
            num_splits, _ = splits.splits(longest_q, round(lengths.keys[0] * seqlen_k))
            seconds += estimate.seconds_of(lengths, seqlen_q, seqlen_k, num_splits)
            seconds += splits.combine_seconds(longest_q, num_splits)
        return seconds / len(estimate.lengths)

    def _estimates_of(self, stacks: bool) -> _Estimates:
        problem, traits = self._problem, self._traits
        row = traits.row()._replace(stacks_heads=stacks)
        estimate = ForwardEstimate(problem, self._target, "compiled", row, traits.slices)
        # As many waves share a SIMD as workgroups of four waves share a unit.
        row = row._replace(waves_of_simd=estimate.most_shared)
        return _Estimates(
            estimate, SplitChoice(problem, self._target, row, traits.slices, traits.columns)
        )


class _Estimates(NamedTuple):
    launch: ForwardEstimate
    splits: SplitChoice
