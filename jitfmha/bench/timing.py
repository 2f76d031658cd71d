"""Times functions in alternation, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

# By dtype, how far results of two sides may be apart. Only a wrong kernel gets there: the accuracy
# tests of op_tests are the strict ones.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def machine_here() -> dict[str, str]:
    """What times here depend on, as reports tell it."""
    return {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f} (1 minute average at the start)",
    }


@dataclass(frozen=True)
class Timings:
    """Seconds per call, ``rounds[r][i]`` being function i in round r."""

    rounds: list[list[float]]

    def best(self, i: int) -> float:
        """The shortest time of function i: what it takes when nothing disturbs it."""
        return min(times[i] for times in self.rounds)

    def median(self, i: int) -> float:
        return median(times[i] for times in self.rounds)

    def quartiles(self, i: int) -> tuple[float, float]:
        """The times of function i below which a quarter and three quarters of the rounds are."""
        first, _, third = quantiles((times[i] for times in self.rounds), n=4, method="inclusive")
        return first, third

    def ratio(self, i: int, j: int) -> float:
        """Time of function i over that of function j, the median of the rounds.

        Both times of a round are neighbours, so a machine that is slow for a while cancels out.
        """
        return median(times[i] / times[j] for times in self.rounds)


def alternate(
    functions: Sequence[Callable[[], object]],
    *,
    min_seconds: float,
    min_rounds: int = 3,
    calls: int = 1,
    before_round: Callable[[], object] = lambda: None,
) -> Timings:
    """Time ``calls`` calls of each function in turn, A B A B, after one warming call of each.

    Stops when ``min_rounds`` rounds are done and ``min_seconds`` have passed. ``before_round`` is
    called before the warming calls and before each round, and is not timed.
    """
    before_round()
    for function in functions:
        function()
    rounds: list[list[float]] = []
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + min_seconds
        while len(rounds) < min_rounds or time.perf_counter() < end:
            before_round()
            rounds.append([_seconds(function, calls) for function in functions])
    finally:
        if was_collecting:
            gc.enable()
    return Timings(rounds)


def compiled_side(theirs: Callable[[], object], wanted: bool) -> list[Callable[[], object]]:
    """The function of torch's compiled by ``torch.compile``, alone in a list, where it is wanted.

    Nothing that was compiled before counts against torch's limit of shapes.
    """
    if not wanted:
        return []
    torch.compiler.reset()
    return [torch.compile(theirs, dynamic=False)]


def beside_torch(times: Timings) -> str:
    """How many times as long torch's function takes as ours, and compiled, if that was timed."""
    others = zip(("torch", "torch.compile"), range(1, len(times.rounds[0])), strict=False)
    return ", ".join(f"{times.ratio(i, 0):.2f}x {name}" for name, i in others)


def finished(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The step, waiting for the GPU if it runs on one."""

    def run_and_wait() -> None:
        step()
        torch.cuda.synchronize(device)

    return run_and_wait if device.type == "cuda" else step


def _seconds(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls
