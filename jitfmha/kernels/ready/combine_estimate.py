"""What it takes to combine the splits of keys, as estimates of whole calls count it.

``python -m jitfmha export`` translates this module to C++, as it does ``key_split.py``.
"""

from __future__ import annotations

from .key_split import LAUNCH_GAP_SECONDS, KeySplit

# Of `combine`, by the cost model, beside what its reads and writes take: with few splits, and for
# each of them. The policy that chooses how many there are counts more.
_SECONDS, _SECONDS_OF_SPLIT = 2.2e-6, 0.06e-6
# Those of kernels that load many at once, and what each time more takes: 1.3e-6 to 1.5e-6 with up
# to 16 splits, 2.0e-6 to 2.4e-6 with 64 at once, and 3.0e-6 to 3.6e-6 with 66 to 128.
_SECONDS_OF_MANY, _SECONDS_OF_ROUND = 0.01e-6, 0.8e-6


def combine_seconds(key_split: KeySplit, seqlen_q: int, num_splits: int) -> float:
    """Of sequences of so many rows, with the gap between launches; 0 where there is one split."""
    if num_splits == 1:
        return 0.0
    return _seconds(key_split, seqlen_q, num_splits, num_splits * _SECONDS_OF_SPLIT)


def combine_many_seconds(
    key_split: KeySplit, seqlen_q: int, num_splits: int, at_once: int
) -> float:
    """The same of kernels that load the results of many splits ``at_once``."""
    if num_splits == 1:
        return 0.0
    rounds = (num_splits - 1) // at_once
    of_splits = num_splits * _SECONDS_OF_MANY + rounds * _SECONDS_OF_ROUND
    return _seconds(key_split, seqlen_q, num_splits, of_splits)


def _seconds(key_split: KeySplit, seqlen_q: int, num_splits: int, of_splits: float) -> float:
    # There is room for whole tiles, of which the rows that there are take time.
    results = 4 * key_split.floats_of_rows(seqlen_q, num_splits) * key_split.byte_seconds
    return LAUNCH_GAP_SECONDS + _SECONDS + of_splits + results
