"""The first call of a user: attention on small tensors, whose result is known beforehand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import jitfmha
from jitfmha import jit

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class AttentionCall:
    """Inputs in fp32, and what must come out."""

    q: Tensor
    k: Tensor
    v: Tensor
    expected: Tensor

    @classmethod
    def draw(cls, seed: int, *, seqlen: int = 48, hdim: int = 32) -> AttentionCall:
        """Random inputs; the result is computed in fp64 from the definition."""
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, seqlen, 2, hdim, generator=generator) for _ in range(3))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * hdim**-0.5
        expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).float()
        return cls(q, k, v, expected)

    def make(self) -> dict[str, object]:
        """Call, check and report: how long, since when, whether built here, for how long waited.

        Raises:
            RuntimeError: the result is wrong.
        """
        with _timed_waits() as waits:
            began = time.monotonic()
            out = jitfmha.fmha_fwd(self.q, self.k, self.v)
            ended = time.monotonic()
        error = (out - self.expected).abs().max().item()
        if not error <= _TOLERANCE:
            raise RuntimeError(f"the result is wrong: it differs by {error:.3g}")
        events = jit.build_log()
        return {
            "began": began,
            "ended": ended,
            "how": [event.how for event in events],
            "name": events[0].name if events else "",
            "waited": sum(waits),
        }


@contextmanager
def _timed_waits() -> Iterator[list[float]]:
    """Collects how long this process waited for its turns to build."""
    turn: Any = import_module("jitfmha.jit.cache.turn")
    waits: list[float] = []
    real = turn.wait_for_turn

    def timed(*arguments: object) -> object:
        began = time.monotonic()
        found = real(*arguments)
        waits.append(time.monotonic() - began)
        return found

    turn.wait_for_turn = timed
    try:
        yield waits
    finally:
        turn.wait_for_turn = real
