"""What the examples share: where they run, and attention in plain torch to compare with."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

import jitfmha

_HERE = "cuda" if torch.version.hip and torch.cuda.is_available() else "cpu"


def run(example: Callable[[torch.device], None]) -> None:
    """Run it on the device that the command line names; gfx942 and gfx950 are emulated."""
    about = (sys.modules[example.__module__].__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", choices=("cpu", "cuda", "gfx942", "gfx950"), default=_HERE)
    name = parser.parse_args().device
    is_emulated = name.startswith("gfx")
    torch.manual_seed(0)
    with jitfmha.emulate(name) if is_emulated else nullcontext():
        example(torch.device("cpu" if is_emulated else name))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    change: Callable[[Tensor], Tensor] = lambda scores: scores,
    drop: Callable[[Tensor], Tensor] = lambda p: p,
) -> Tensor:
    """Attention ``(b, sq, hq, hdim)`` in float64, which writes all scores out.

    ``change`` gets the scaled scores ``(b, hq, sq, sk)`` and gives those of the softmax, to which
    it may add columns; ``drop`` gets the probabilities.
    """
    shared = q.shape[2] // k.shape[2]
    q, k, v = q.double(), *(x.double().repeat_interleave(shared, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    p = drop(change(scores).softmax(-1).nan_to_num(0))  # a row without keys is 0
    return torch.einsum("bhqk,bkhd->bqhd", p[..., : k.shape[1]], v)


def compare(name: str, found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Print how far the result is from what was expected; end with 1 where rounding is less.

    Probabilities and results are rounded once each, by half an eps of their dtype at most.
    """
    difference = ((found.double() - expected).norm() / expected.norm()).item()
    print(f"{name:40} {tuple(found.shape)!s:22} off by {difference:.1e}")
    if not difference <= torch.finfo(dtype or found.dtype).eps:
        sys.exit(f"{name} is wrong")
