"""Memory for a launch, whose ends belong to nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 256  # hipMalloc's
# An access a little past an end is outside of everything that a launch is given.
_GAP = 1 << 16


def guarded_memory(size: int, address: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """uint8 memory of ``size`` bytes that lies to multiples of 256 as ``address`` does."""
    memory = torch.empty(size + _ALIGNMENT + 2 * _GAP, dtype=torch.uint8, device=device)
    first = _GAP + (address - memory.data_ptr() - _GAP) % _ALIGNMENT
    return memory[first : first + size]
