"""Which pages a sequence has: those of its row of a block table, or of its list.

Lists lie one behind the other in one dimension, as SGLang and AITER have them (``kv_indptr`` and
``kv_indices``), in place of the table. Where each begins stands in ``cu_seqlens_k_padded``, which
says of rows where those of a sequence begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor


def are_lists(block_table: Tensor) -> bool:
    """Whether there are lists in place of a table."""
    return block_table.dim() == 1


def stride_of_rows(block_table: Tensor) -> int:
    """Numbers between rows of a table, as kernels take it: -1 where there are lists."""
    return -1 if are_lists(block_table) else block_table.stride(0)


def most_pages(block_table: Tensor, batch: int) -> int:
    """How many pages a sequence has by the shape: of a table at most, of lists in the mean."""
    if are_lists(block_table):
        return -(-block_table.shape[0] // max(batch, 1))
    return block_table.shape[1]


def pages_of_sequences(block_table: Tensor, starts: Tensor) -> Iterable[Tensor]:
    """The named pages of each sequence, those behind its last one included.

    ``starts`` is ``cu_seqlens_k_padded``, whose values are read where there are lists.
    """
    if are_lists(block_table):
        return [block_table[a:b] for a, b in itertools.pairwise(starts.tolist())]
    return block_table
