"""Which calls with keys in pages have queries and pages for waves that take turns.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

_PAGE_REACH = 1 << 31  # bytes of a packed page that a buffer has


def rows_between_pages(page: int, row: int, page_size: int, hdim: int) -> int:
    """How many rows there are from a page to the next one; 0: no whole ones.

    By the strides between pages and rows. To kernels, single rows are ``hdim`` apart.
    """
    apart = row if page_size > 1 else hdim
    if apart <= 0:
        return 0
    rows = page // apart
    return rows if rows * apart == page else 0


def may_take_turns(
    seqlen_q: int, packs: int, tile_q: int, rows_of_keys: int, rows_of_values: int
) -> bool:
    """Whether the queries of sequences that count as equally long fill a tile.

    And whether pages of keys are as many rows apart as those of values, in which the kernel counts.
    """
    are_alike = rows_of_keys > 0 and rows_of_keys == rows_of_values
    return are_alike and seqlen_q >= tile_q * packs


def may_take_turns_in_packed_pages(
    seqlen_q: int, packs: int, tile_q: int, rows_of_keys: int, rows_of_values: int, page_bytes: int
) -> bool:
    """The same of packed pages, of which one has so many bytes of a key head's keys."""
    are_whole = rows_of_keys > 0 and rows_of_values > 0
    return are_whole and seqlen_q >= tile_q * packs and page_bytes < _PAGE_REACH
