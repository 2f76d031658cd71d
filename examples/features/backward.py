"""Gradients: by torch.autograd, and by the function that it calls.

Run it with:  python examples/features/backward.py [--device cpu|cuda|gfx942|gfx950]
"""

import math

import torch
from plain import attention, compare, run
from torch import Tensor

import jitfmha


def main(device: torch.device) -> None:
    q, k, v, dout = torch.randn(4, 1, 90, 4, 64, dtype=torch.bfloat16, device=device)
    hidden = torch.ones(90, 90, dtype=torch.bool, device=device).triu(1)

    def causal(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -math.inf)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    attention(*exact, change=causal).backward(dout.double())

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    jitfmha.fmha_fwd(*leaves, mask="causal").backward(dout)
    for name, leaf, expected in zip(("dq", "dk", "dv"), leaves, exact, strict=True):
        compare(f"{name} by autograd", leaf.grad, expected.grad)

    # What autograd saves for it are the inputs, the output and the log-sum-exp.
    out, lse = jitfmha.fmha_fwd(q, k, v, mask="causal", return_lse=True)
    gradients = jitfmha.fmha_bwd(dout, q, k, v, out, lse, mask="causal", deterministic=True)
    for name, found, expected in zip(("dq", "dk", "dv"), gradients, exact, strict=True):
        compare(f"{name} by fmha_bwd", found, expected.grad)


if __name__ == "__main__":
    run(main)
