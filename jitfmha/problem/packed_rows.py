"""Which rows of packed tensors belong to which sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def sequences_of_rows(
    rows: int, cu_seqlens: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Say of each row of a packed tensor its sequence, its place in it, and whether it has one.

    A row that belongs to no sequence has the number of the one before it.
    """
    row = torch.arange(rows, dtype=torch.int32, device=starts.device)
    if starts.shape[0] == 1:  # no sequence at all
        return torch.zeros_like(row), row, torch.zeros_like(row, dtype=torch.bool)
    sequence = torch.searchsorted(starts[1:], row, right=True).clamp(max=starts.shape[0] - 2)
    within = row - starts[sequence]
    return sequence, within, within < cu_seqlens.diff()[sequence]
