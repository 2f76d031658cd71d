"""What a small call costs under the patch of SDPA when one like it was there before, and torch's.

Run in op_tests/:  python -m rigs.known_calls [ROUNDS]

The tensors are so small that little but the way to the kernel is measured, on one thread. Both
sides take turns, and of each the quickest round counts: what disturbs the machine only adds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from jitfmha.integrations import sdpa

_CALLS = 100  # of a round
_TORCH = F.scaled_dot_product_attention


def main() -> None:
    """Print microseconds of each kind of call, patched and without the patch, and their ratio."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    projected = torch.randn(1, 4, 3, 2, 64)
    q, k, v = (x.transpose(1, 2) for x in projected.unbind(2))
    leaf, mask = q.clone().requires_grad_(), torch.randn(4, 4)
    kinds: dict[str, Callable[[Any], Tensor]] = {
        "plain": lambda attend: attend(q, k, v),
        "causal": lambda attend: attend(q, k, v, is_causal=True),
        "mask": lambda attend: attend(q, k, v, mask),
        "three dimensions": lambda attend: attend(q[0], k[0], v[0]),
        "with gradients": lambda attend: attend(leaf, k, v),
    }
    with sdpa.patch():
        sides = _TORCH, F.scaled_dot_product_attention
    for name, call in kinds.items():
        best = [math.inf] * 2
        for _ in range(rounds):
            for side, attend in enumerate(sides):
                call(attend)
                start = time.perf_counter()
                for _ in range(_CALLS):
                    call(attend)
                best[side] = min(best[side], (time.perf_counter() - start) / _CALLS * 1e6)
        torchs, ours = best
        print(f"{name}: {ours:.1f} us, torch {torchs:.1f} us, {torchs / ours:.2f}x", flush=True)


if __name__ == "__main__":
    main()
