"""Backward passes by kernels of a tree, and their float64 answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from inputs import lay_out
from packed_calls import Sequences
from torch import Tensor
from untyped import explain_bwd, fmha_bwd

from jitfmha.call.backward import BackwardArguments, make_backward_problem
from jitfmha.call.dispatch import Explanation
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.float64_reference import attention, attention_packed
from jitfmha.problem.problem import Problem

POISON = -77.0
CPU = torch.device("cpu")


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Those of q, k and v in float64; the options are those of ``attention``."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    results = attention(*leaves, **options)
    outer = [dout.double(), torch.zeros_like(results[1]) if dlse is None else dlse.double()]
    return torch.autograd.grad(results, leaves, outer)


@dataclass
class BackwardCall:
    """The arguments of one backward pass and its exact gradients.

    ``lengths`` are (seqlen_q, seqlen_k) of each sequence; gm0 takes them from the first, ``batch``
    times. ``gap`` unused rows follow each sequence of gm1. ``layouts`` are those of q, k, v, dout,
    dq, dk and dv in gm0. Tensors are on ``device``; those of the CPU run wherever the test emulates
    them.
    """

    rng: torch.Generator
    dtype: torch.dtype = torch.bfloat16
    hdims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (2, 1)
    lengths: Sequence[tuple[int, int]] = ((70, 90),)
    batch: int | None = None
    mask: int | str = 0
    layouts: Mapping[str, str] = field(default_factory=dict)
    gap: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    device: torch.device = CPU

    def __post_init__(self) -> None:
        (hq, hk), (dq, dv) = self.heads, self.hdims
        self.arguments: dict[str, Any] = {"mask": self.mask, **self.options}
        if self.is_group:
            lengths_q, lengths_k = ([pair[side] for pair in self.lengths] for side in (0, 1))
            self.sequences = Sequences((lengths_q, lengths_k), self.gap)
            rows_q, rows_k = ((rows,) for rows in self.sequences.rows)
            groups = self.sequences.groups
            self.arguments |= {name: x.to(self.device) for name, x in groups.items()}
        else:
            rows_q, rows_k = ((self.batch, n) for n in self.lengths[0])
        self.q, self.k = self._random("q", *rows_q, hq, dq), self._random("k", *rows_k, hk, dq)
        self.v = self._random("v", *rows_k, hk, dv)
        self.dout = self._random("dout", *rows_q, hq, dv)
        self.gradients = {
            name: self._laid_out(name, torch.zeros_like(x)).fill_(POISON)
            for name, x in (("dq", self.q), ("dk", self.k), ("dv", self.v))
        }
        leaves = [x.cpu().double().requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = self._attention(*leaves)
        self.exact = dict(
            zip(
                self.gradients,
                torch.autograd.grad(out, leaves, self.dout.cpu().double()),
                strict=True,
            )
        )
        self.out = out.detach().to(self.dtype).to(self.device)
        self.lse = lse.detach().float().to(self.device)

    @property
    def is_group(self) -> bool:
        return self.batch is None

    def problem(self) -> Problem:
        """What the call asks for."""
        options = dict(self.arguments)
        choices = {n: options.pop(n) for n in ("deterministic", "atomic_fp32") if n in options}
        forward = Arguments.of(self.q, self.k, self.v, {**options, "out": self.out})
        arguments = BackwardArguments(*(forward, self.lse, self.dout), **self.gradients, **choices)
        return make_backward_problem(arguments)

    def explain(self) -> Explanation:
        """Which kernels serve the call here, and why not others."""
        explanation: Explanation = explain_bwd(
            *(self.dout, self.q, self.k, self.v, self.out, self.lse),
            **self.gradients,
            **self.arguments,
        )
        return explanation

    def run(self) -> dict[str, Tensor]:
        """The gradients, written over what was there."""
        fmha_bwd(
            *(self.dout, self.q, self.k, self.v, self.out, self.lse),
            **self.gradients,
            **self.arguments,
        )
        return self.gradients

    def assert_right(self, tolerance: float) -> None:
        """All gradients, by the root mean square of the error over that of the gradients.

        A gradient that is 0 in truth may be as large as rounding makes summands of size 1.
        """
        for name, exact in self.exact.items():
            actual = self.gradients[name].cpu().double()
            used = self.used_rows(name)
            if used is not None:
                assert (actual[~used] == POISON).all(), f"{name}: unused rows are written"
                actual, exact = actual[used], exact[used]
            if not exact.numel():
                continue
            error, size = ((x**2).mean().sqrt().item() for x in (actual - exact, exact))
            assert error <= tolerance * size + 1e-3 * tolerance, (
                f"{name} is off by {error:.3g}, its size being {size:.3g}"
            )

    def poison_unused_rows(self) -> None:
        """Make what is read between sequences NaN."""
        for name in ("q", "k", "v", "dout", "out"):
            used = self.used_rows("dk" if name in "kv" else "dq")
            if used is not None:
                getattr(self, name)[~used] = torch.nan

    def used_rows(self, name: str) -> Tensor | None:
        """Which rows of a gradient belong to a sequence; None: all."""
        if not self.is_group:
            return None
        return self.sequences.used_rows(0 if name == "dq" else 1)

    def _random(self, name: str, *shape: int | None) -> Tensor:
        values = torch.randn([n or 0 for n in shape], generator=self.rng)
        values = values.to(self.dtype).to(self.device)
        return self._laid_out(name, values)

    def _laid_out(self, name: str, x: Tensor) -> Tensor:
        layout = self.layouts.get(name)
        return x if layout is None else lay_out(x, layout)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_group:
            return attention(q, k, v, mask=self.mask)
        return attention_packed(q, k, v, *self.sequences.spans, mask=self.mask)
