"""What it takes to combine the splits of keys, as estimates of whole calls count it."""

from __future__ import annotations

from dataclasses import replace

from .key_split import LAUNCH_GAP_SECONDS, KeySplit

# Of `combine`, by the cost model, beside what its reads and writes take: with few splits, and for
# each of them. The policy that chooses how many there are counts more.
_SECONDS, _SECONDS_OF_SPLIT = 2.2e-6, 0.06e-6


def combine_seconds(key_split: KeySplit, seqlen_q: int, num_splits: int) -> float:
    """Of sequences of so many rows, with the gap between launches; 0 where there is one split."""
    if num_splits == 1:
        return 0.0
    # There is room for whole tiles, of which the rows that there are take time.
    floats = replace(key_split, ts_qo=1).workspace_floats(seqlen_q, num_splits)
    results = 4 * floats * key_split.byte_seconds
    return LAUNCH_GAP_SECONDS + _SECONDS + num_splits * _SECONDS_OF_SPLIT + results
