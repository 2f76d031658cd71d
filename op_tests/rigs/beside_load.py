"""Blocks of models under the patch of SDPA, over the same without it, beside two busy processes.

Run in op_tests/, with OMP_WAIT_POLICY=passive too:  python -m rigs.beside_load [SECONDS OF EACH]
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from jitfmha.integrations import sdpa
from jitfmha.jit.fresh_process import fresh_python

# Batch, tokens, width and heads of what is taken for a layer of each.
_BLOCKS = {"ViT-S": (1, 197, 384, 6), "BERT": (1, 128, 768, 12)}
_DTYPES = (torch.float32, torch.bfloat16)
_THREADS = 2
_DRAWS = 300  # of the interval around a ratio


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        # Looked up in each call, as models do: the patch replaces it there.
        attend = nn.functional.scaled_dot_product_attention
        out = attend(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
        x = x + self.out(out.flatten(2))
        result: Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return result


@contextmanager
def _busy(processors: range) -> Iterator[None]:
    """A process on each of these processors that never waits."""
    loop = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    processes = [subprocess.Popen(fresh_python(loop, str(n))) for n in processors]
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _pairs(call: Callable[[], None], seconds: float) -> list[tuple[float, float]]:
    """What torch and what the patch took, one after the other; which is first changes."""

    def patched() -> None:
        with sdpa.patch():
            call()

    sides = (call, patched)
    found: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        took = [0.0, 0.0]
        for side in (0, 1) if len(found) % 2 else (1, 0):
            start = time.perf_counter()
            sides[side]()
            took[side] = time.perf_counter() - start
        found.append((took[0], took[1]))
    return found[2:]  # the first ones build


def _described(pairs: list[tuple[float, float]]) -> str:
    def ratio(some: list[tuple[float, float]]) -> float:
        return sum(a for a, _ in some) / sum(b for _, b in some)

    drawn = sorted(ratio(random.choices(pairs, k=len(pairs))) for _ in range(_DRAWS))
    middle = [1e3 * statistics.median(side) for side in zip(*pairs, strict=True)]
    return (
        f"{ratio(pairs):.2f}x (90 %: {drawn[_DRAWS // 20]:.2f} to {drawn[-_DRAWS // 20]:.2f}), "
        f"medians {middle[0]:.1f} and {middle[1]:.1f} ms, {len(pairs)} pairs"
    )


def main() -> None:
    """Measure every block, first as the machine is, and then beside the load."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    print(f"OMP_WAIT_POLICY: {os.environ.get('OMP_WAIT_POLICY', 'not set')}")
    for is_loaded, (name, sizes), dtype in itertools.product(
        (False, True), _BLOCKS.items(), _DTYPES
    ):
        batch, tokens, width, heads = sizes
        block = _Block(width, heads).to(dtype)
        x = torch.randn(batch, tokens, width).to(dtype)

        def forward(block: _Block = block, x: Tensor = x) -> None:
            with torch.no_grad():
                block(x)

        def step(block: _Block = block, x: Tensor = x) -> None:
            block.zero_grad()
            block(x).sum().backward()

        for what, call in (("forward", forward), ("training step", step)):
            with _busy(range(_THREADS if is_loaded else 0)):
                found = _described(_pairs(call, seconds))
            where = "beside load" if is_loaded else "as it is"
            print(f"{name}, {dtype}, {what}, {where}: {found}", flush=True)


if __name__ == "__main__":
    main()
