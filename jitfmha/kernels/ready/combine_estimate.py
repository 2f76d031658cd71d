"""What it takes to combine the splits of keys, as estimates of whole calls count it.

``python -m jitfmha export`` translates this module to C++, as it does ``key_split.py``.
"""

from __future__ import annotations

from .key_split import LAUNCH_GAP_SECONDS, KeySplit

# Of `combine`, by the cost model, beside what its reads and writes take: with few splits, and for
# each of them. The policy that chooses how many there are counts more.
_SECONDS, _SECONDS_OF_SPLIT = 2.2e-6, 0.06e-6
# Of each split that a workgroup loads beside others, by the cost model.
_SECONDS_BESIDE = 0.01e-6
_COMBINED_ROWS = 16


def combine_seconds(key_split: KeySplit, seqlen_q: int, num_splits: int) -> float:
    """Of sequences of so many rows, with the gap between launches; 0 where there is one split."""
    if num_splits == 1:
        return 0.0
    results = _results_seconds(key_split, seqlen_q, num_splits)
    return LAUNCH_GAP_SECONDS + _SECONDS + num_splits * _SECONDS_OF_SPLIT + results


def combine_fours_seconds(
    key_split: KeySplit,
    rows: int,
    num_splits: int,
    columns: int,
    at_once: int,
    slots: int,
    on_the_way: float,
) -> float:
    """The same where all waves have the same rows (csrc_templates/amd/combine_fours.h).

    Args:
        rows: of each sequence.
        columns: of a workgroup, which has them of 16 rows.
        at_once: splits that a workgroup loads together.
        slots: workgroups that the GPU runs at a time.
        on_the_way: seconds from asking for results until they are there.
    """
    if num_splits == 1:
        return 0.0
    blocks = key_split.sequences * -(-rows // _COMBINED_ROWS)
    workgroups = blocks * -(-key_split.hdim_v // columns)
    # Arguments and the first results are asked for, and the output is stored, in as long as two
    # rounds of loads take. Others bring more splits, or the bytes of all take longer than these.
    rounds = 2 * -(-workgroups // slots) * on_the_way
    others = num_splits * _SECONDS_BESIDE + ((num_splits - 1) // at_once) * on_the_way
    # The kernel before writes what is read here, each in half of a byte's seconds.
    half = _results_seconds(key_split, rows, num_splits) / 2
    return LAUNCH_GAP_SECONDS + half + rounds + max(half, others)


def _results_seconds(key_split: KeySplit, rows: int, num_splits: int) -> float:
    # There is room for whole tiles, of which the rows that there are take time.
    return 4 * key_split.floats_of_rows(rows, num_splits) * key_split.byte_seconds
