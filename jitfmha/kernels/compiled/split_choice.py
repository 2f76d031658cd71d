"""Into how many splits the keys of a compiled kernel's calls go."""

from __future__ import annotations

from functools import lru_cache

from ...amd.manifest import KernelRow
from ...planning.target import AmdTarget
from ...problem.problem import Problem
from ..estimate import band_of, machine_of
from ..ready.key_split import KeySplit, Splits
from .decode import streamed_keys
from .decode_policy import StreamedSplits
from .latent_policy import StreamedLatents
from .split_policy import CompiledSplits
from .tile_table import WAVE


class SplitChoice:
    """The splits of calls that differ in lengths only: as many as are asked for, else as pay."""

    def __init__(
        self,
        problem: Problem,
        target: AmdTarget,
        row: KernelRow,
        slices: int,
        columns: int,
        *,
        streams: bool = False,
        are_latents: bool = False,
    ) -> None:
        """Prepare for a kernel whose output is made in ``slices`` of ``columns`` each.

        Of a kernel that ``streams``, memory bounds the calls, and else what its units compute.
        """
        rows_of_query = problem.gqa if row.stacks_heads else 1
        sequences = problem.batch * problem.heads_q // rows_of_query * slices
        of_slice = row._replace(hdim_v=columns)
        split = KeySplit.of(of_slice, sequences, target.compute_units, target.arch)
        keys = streamed_keys(problem)
        of_kernel = split, keys, rows_of_query, target.arch, row.ts_kv
        speed = machine_of(target).bytes_per_second
        self.policy = CompiledSplits(
            problem.num_splits,
            problem.has_split_results,
            band_of(problem.mask),
            problem.modifiers.sink_size,
            *(rows_of_query, row.ts_qo, row.ts_kv),
            split,
            streams,
            StreamedSplits.of(*of_kernel, row.threads // WAVE, target.compute_units, speed),
            are_latents,
            StreamedLatents.of(*(split, keys, target.arch, row.ts_kv, target.compute_units, speed)),
        )
        # Lengths of a decode loop have as many tiles for a while.
        self._of_tiles = lru_cache(maxsize=64)(self.policy.of_tiles)
        # Asked in every call of gm1, mostly for the lengths of the call before.
        self.splits = lru_cache(maxsize=64)(self._splits)

    def _splits(self, seqlen_q: int, seqlen_k: int) -> Splits:
        """Choose for sequences of up to ``seqlen_q`` queries and about ``seqlen_k`` keys."""
        return self._of_tiles(seqlen_q, self.policy.tiles(seqlen_q, seqlen_k))
