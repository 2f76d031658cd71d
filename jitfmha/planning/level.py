"""In which steps lengths count where plans are chosen, and which plans are level.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from collections.abc import Sequence

# Of a length a sixteenth to a thirty-second.
_STEP_BITS = 5
# Of keys at least so many.
_LEAST_KEY_BITS = 5
# Over the least estimate, up to which plans are level, so that their order decides: little, since
# estimates are off against each other, and what is taken should be within 5 % of the quickest. What
# comes first in order is there, or takes less to begin with: the first call need not wait for a
# compiler, nor each call for work to be listed. Whether a cache has a kernel already is not looked
# at, since then a call would depend on what others did before.
LEVEL = 1.01


def key_step(seqlen_k: int) -> int:
    """How many keys are a step of sequences that have so many."""
    return 1 << max(seqlen_k.bit_length() - _STEP_BITS, _LEAST_KEY_BITS)


def whole_queries(seqlen_q: int) -> int:
    """So many queries in whole steps, so that a loop whose lengths grow seldom chooses anew."""
    step = 1 << max(seqlen_q.bit_length() - _STEP_BITS, 0)
    return -(-seqlen_q // step) * step


def whole_keys(seqlen_k: int) -> int:
    """The same of keys."""
    step = key_step(seqlen_k)
    return -(-seqlen_k // step) * step


def first_level(seconds: Sequence[float]) -> int:
    """Which plan is taken, of those that are estimated to take so long: the first of level ones."""
    level = LEVEL * min(seconds)
    for i in range(len(seconds)):
        if seconds[i] <= level:
            return i
    return 0
