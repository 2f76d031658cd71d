"""Every mask: causal from either corner, windows, generic coordinates, and windows with a sink.

Run it with:  python examples/features/masks.py [--device cpu|cuda|gfx942|gfx950]
"""

import math
from collections.abc import Callable

import torch
from plain import attention, compare, run
from torch import Tensor

import jitfmha

# What each shows: of query i, key j, and how many keys there are more than queries.
MASKS: dict[int | str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "none": lambda i, j, more: i == i,
    1: lambda i, j, more: j <= i,
    "causal": lambda i, j, more: j <= i + more,
    "t:20,5": lambda i, j, more: (i - 20 <= j) & (j <= i + 5),
    "b:20,5": lambda i, j, more: (i + more - 20 <= j) & (j <= i + more + 5),
    "g:20,5": lambda i, j, more: (i - 20 < j) & (j < i + 5),
}


def main(device: torch.device) -> None:
    q = torch.randn(1, 60, 4, 64, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 1, 90, 4, 64, dtype=torch.bfloat16, device=device)
    i, j = torch.arange(60, device=device)[:, None], torch.arange(90, device=device)

    def hidden_but(seen: Tensor) -> Tensor:
        return attention(q, k, v, change=lambda scores: scores.masked_fill(~seen, -math.inf))

    for mask, shows in MASKS.items():
        seen = shows(i, j, 90 - 60).expand(60, 90)
        compare(f"mask={mask!r}", jitfmha.fmha_fwd(q, k, v, mask=mask), hidden_but(seen))

    # A window of 16 keys to the left, which never hides the first four keys.
    out = jitfmha.fmha_fwd(q, k, v, mask="causal", window_size=(16, 0), sink_size=4)
    diagonal = i + 90 - 60
    seen = (j <= diagonal) & ((j >= diagonal - 16) | (j < 4))
    compare("a causal window with a sink_size", out, hidden_but(seen))


if __name__ == "__main__":
    run(main)
