"""What the rows of the CPU suite that time us beside PyTorch's SDPA have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from .report import Comparison
from .timing import Timings

# Only a wrong kernel gets here: the accuracy tests of op_tests are the strict ones.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def verified(what: str, ours: Tensor, theirs: Tensor) -> float:
    """The largest difference. Raises ``RuntimeError`` where the results do not belong together."""
    error = (ours.float() - theirs.float()).abs().max().item()
    tolerance = TOLERANCE[ours.dtype]
    if not error <= tolerance:
        raise RuntimeError(f"{what}: the result differs from SDPA's by {error}, over {tolerance}")
    return error


def compare(
    what: str, times: Timings, flops: float, error: float, *, against: str = "SDPA", other: int = 1
) -> Comparison:
    """Our function, the first that was timed, with the function ``other``."""
    return Comparison(
        what=what,
        against=against,
        seconds=times.best(0),
        against_seconds=times.best(other),
        speedup=times.ratio(other, 0),
        gflops=flops / times.best(0) / 1e9,
        error=error,
    )
