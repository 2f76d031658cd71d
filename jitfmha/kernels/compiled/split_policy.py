"""Into how many splits the keys of a compiled kernel's calls go, and what such calls take.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..launch_estimate import Band, ForwardEstimate
from ..ready.combine_estimate import combine_seconds
from ..ready.key_split import ONE_SPLIT, KeySplit, Splits
from .decode_policy import StreamedSplits
from .latent_policy import StreamedLatents


@dataclass(frozen=True)
class CompiledSplits:
    """The splits of calls that differ in lengths only: as many as are asked for, else as pay.

    Attributes:
        asked_for: 0: as many as pay.
        leaves_parts: whether the result of each split is wanted.
        rows_of_query: query heads that are rows of the same tiles.
        streams: whether memory bounds the calls, and else what units compute.
        streamed: how they are split then.
        are_latents: whether the kernel is that of latents.
        latents: how these are split then.
    """

    asked_for: int
    leaves_parts: bool
    band: Band
    sink_size: int
    rows_of_query: int
    ts_qo: int
    ts_kv: int
    key_split: KeySplit
    streams: bool
    streamed: StreamedSplits
    are_latents: bool
    latents: StreamedLatents

    def tiles(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many tiles of keys the queries of a tile see at most."""
        seen = seqlen_k
        if self.band.left >= 0 and self.band.right >= 0:
            queries = min(seqlen_q, -(-self.ts_qo // self.rows_of_query))
            seen = min(seen, self.sink_size + self.band.left + self.band.right + queries)
        return -(-seen // self.ts_kv)

    def of_tiles(self, seqlen_q: int, tiles: int) -> Splits:
        """Choose for sequences of up to ``seqlen_q`` queries that see so many tiles of keys.

        More splits than there are tiles of keys would only leave empty results to be combined, but
        a caller who wants each split's results gets as many as were asked for.
        """
        rows = seqlen_q * self.rows_of_query
        if self.asked_for > 0:
            most = self.asked_for if self.leaves_parts else max(tiles, 1)
            num_splits = min(self.asked_for, most)
            if num_splits == 1 and not self.leaves_parts:
                return ONE_SPLIT
            return Splits(num_splits, self.key_split.workspace_floats(rows, num_splits))
        if self.streams:
            return self.streamed.splits(seqlen_q, tiles)
        if self.are_latents:
            return self.latents.splits(rows, tiles)
        return self.key_split.splits(rows, tiles)

    def seconds_to_combine(self, seqlen_q: int, num_splits: int) -> float:
        """What it takes to combine them, for sequences of up to ``seqlen_q`` queries."""
        if self.streams:
            return self.streamed.combine_seconds(seqlen_q, num_splits)
        rows = seqlen_q * self.rows_of_query
        if self.are_latents:
            return self.latents.combine_seconds(rows, num_splits)
        return combine_seconds(self.key_split, rows, num_splits)


def compiled_seconds(
    estimate: ForwardEstimate, splits: CompiledSplits, seqlen_q: int, seqlen_k: int
) -> float:
    """What calls take whose sequences have so many queries and keys on average."""
    seconds = 0.0
    for lengths in estimate.call.lengths:
        # As many as pay for the longest sequences.
        longest_q = round(lengths.queries[0] * seqlen_q)
        tiles = splits.tiles(longest_q, round(lengths.longest_keys * seqlen_k))
        num_splits = splits.of_tiles(longest_q, tiles).num_splits
        seconds += estimate.seconds_of(lengths, seqlen_q, seqlen_k, num_splits)
        seconds += splits.seconds_to_combine(longest_q, num_splits)
    return seconds / len(estimate.call.lengths)
