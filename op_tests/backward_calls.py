"""Backward passes by kernels of a tree, and their float64 answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from amd_problems import AmdInputs
from torch import Tensor
from untyped import explain_bwd, fmha_bwd

from jitfmha.call.backward import BackwardArguments, make_backward_problem
from jitfmha.call.dispatch import Explanation
from jitfmha.problem.arguments import Arguments
from jitfmha.problem.float64_reference import Result, attention
from jitfmha.problem.problem import Problem

POISON = -77.0


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Those of q, k and v in float64; the options are those of ``attention``."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    results = attention(*leaves, **options)
    outer = [dout.double(), torch.zeros_like(results[1]) if dlse is None else dlse.double()]
    return torch.autograd.grad(results, leaves, outer)


def rounded(result: Result, dtype: torch.dtype) -> Result:
    """The reference's out and lse as a forward kernel gives them, which need not be compiled."""
    out, lse = (x.detach() for x in result)
    return out.to(dtype), lse.float()


@dataclass
class BackwardCall(AmdInputs):
    """The arguments of one backward pass and its exact gradients.

    ``layouts`` are those of q, k, v, dout, dq, dk and dv in gm0.
    """

    layouts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arguments |= self.options
        self.dout = self.random("dout", *self.rows_q, self.heads[0], self.hdims[1])
        self.gradients = {
            name: self.laid_out(name, torch.zeros_like(x)).fill_(POISON)
            for name, x in (("dq", self.q), ("dk", self.k), ("dv", self.v))
        }
        leaves = [x.cpu().double().requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = self.reference(*leaves)
        exact = torch.autograd.grad(out, leaves, self.dout.cpu().double())
        self.exact = dict(zip(self.gradients, exact, strict=True))
        self.out, self.lse = (x.to(self.device) for x in rounded((out, lse), self.dtype))

    def layout_of(self, name: str) -> str:
        return self.layouts.get(name, "bshd")

    def problem(self) -> Problem:
        """What the call asks for."""
        options = dict(self.arguments)
        choices: dict[str, Any] = dict(self.gradients)
        choices |= {n: options.pop(n) for n in ("deterministic", "atomic_fp32") if n in options}
        forward = Arguments.of(self.q, self.k, self.v, {**options, "out": self.out})
        return make_backward_problem(BackwardArguments(forward, self.lse, self.dout, **choices))

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
