"""Models under the patch of SDPA, over the same without it, as the machine is and beside load.

Run in op_tests/:  python -m rigs.beside_load [SECONDS] [--threads N ...] [--load N ...]

It measures for as many seconds as it is told, beside which processes start and kernels are built.
A model is a stack of blocks, and a forward or a training step of it is what is timed. Steps of both
sides take turns, so that what disturbs the machine disturbs both, and a run's ratio is the median
of theirs. Runs are processes, as how threads lie on processors stays for one. Load is a process
that never waits on each of so many of the processors that the model's threads have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from jitfmha.integrations import sdpa
from jitfmha.jit.fresh_process import fresh_python

# Batch, tokens, width and heads of what is taken for a layer of each.
_MODELS = {"ViT-S": (1, 197, 384, 6), "BERT": (1, 128, 768, 12)}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STEPS = "forward", "training step"
_RUNS = 3  # of each row
_BAR = 0.98
_OP_TESTS = Path(__file__).parents[1]
_RUN = "import json, rigs.beside_load as rig; rig.run(**json.loads(sys.argv[1]))"


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
def _busy(processors: list[int]) -> Iterator[None]:
    """A process on each of these processors that never waits."""
    loop = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    processes = [subprocess.Popen(fresh_python(loop, str(n))) for n in processors]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _step(model: str, dtype: str, layers: int, step: str) -> Callable[[], None]:
    torch.manual_seed(0)
    batch, tokens, width, heads = _MODELS[model]
    blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers))).to(_DTYPES[dtype])
    x = torch.randn(batch, tokens, width).to(_DTYPES[dtype])

    def forward() -> None:
        with torch.no_grad():
            blocks(x)

    def train() -> None:
        blocks.zero_grad()
        blocks(x).sum().backward()

    return forward if step == "forward" else train


def _pairs(call: Callable[[], None], seconds: float) -> list[tuple[float, float]]:
    """What torch and what the patch took, one after the other; which is first changes."""

    def patched() -> None:
        with sdpa.patch():
            call()

    sides = (call, patched)
    found: list[tuple[float, float]] = []
    patched()  # builds
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        took = [0.0, 0.0]
        for side in (0, 1) if len(found) % 2 else (1, 0):
            start = time.perf_counter()
            sides[side]()
            took[side] = time.perf_counter() - start
        found.append((took[0], took[1]))
    return found[1:]  # without what is used for the first time


Row = tuple[str, str, str]
_ROWS: list[Row] = list(itertools.product(_MODELS, _DTYPES, _STEPS))


def run(threads: int, load: int, seconds: float, layers: int) -> None:
    """The pairs of each row, printed."""
    processors = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, processors)
    torch.set_num_threads(threads)
    for model, dtype, step in _ROWS:
        call = _step(model, dtype, layers, step)
        with _busy(processors[:load]):
            print(json.dumps(_pairs(call, seconds)))


def _described(runs: list[list[tuple[float, float]]]) -> tuple[float, str]:
    """The median of the ratios of the runs, and a text with it."""
    ratios = sorted(statistics.median(a / b for a, b in pairs) for pairs in runs)
    took = [1e3 * statistics.median(x) for x in zip(*itertools.chain(*runs), strict=True)]
    middle = statistics.median(ratios)
    return middle, (
        f"{middle:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}), {took[0]:.2f} and {took[1]:.2f} ms, "
        f"{sum(map(len, runs))} pairs"
    )


def main() -> None:
    """Measure every row, and print the median and the range of the ratios of its runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seconds", type=float, nargs="?", default=110, help="of measuring, in all")
    here = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({min(2, here), here}))
    parser.add_argument("--load", type=int, nargs="+", default=[0, 2], help="busy processes")
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    places = list(itertools.product(given.threads, given.load))
    seconds = given.seconds / len(places) / len(_ROWS) / _RUNS
    print(f"OMP_WAIT_POLICY: {os.environ.get('OMP_WAIT_POLICY', 'not set')}; {given.layers} layers")
    below = []
    for threads, load in places:
        told = {"threads": threads, "load": load, "seconds": seconds, "layers": given.layers}
        command = fresh_python(_RUN, json.dumps(told), first=(_OP_TESTS,))
        runs = []
        for _ in range(_RUNS):
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
            runs.append([json.loads(line) for line in output.splitlines()])
        place, ratios = f"{threads} threads, {load} busy processes", []
        for row, pairs in zip(_ROWS, zip(*runs, strict=True), strict=True):
            ratio, text = _described(list(pairs))
            ratios.append(ratio)
            what = f"{place}, {', '.join(row)}"
            print(f"{what}: {text}", flush=True)
            if ratio < _BAR:
                below.append(what)
        print(f"{place}: {statistics.geometric_mean(ratios):.2f}x, the geometric mean", flush=True)
    print(f"below {_BAR}x: {'; '.join(below) or 'none'}")


if __name__ == "__main__":
    main()
