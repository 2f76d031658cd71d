"""How uneven packed sequences are, as far as calls tell.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

MOST_UNEVEN = 16


def halves_of_mean(longest: int, sequences: int, rows: int) -> int:
    """How many times the mean length of ``rows`` in all the longest sequence has, in halves.

    Rounded down, and at most eight times.
    """
    return min(2 * sequences * longest // max(rows, 1), MOST_UNEVEN)
