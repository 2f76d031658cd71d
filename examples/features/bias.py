"""A bias for each score, a boolean mask, and ALiBi.

Run it with:  python examples/features/bias.py [--device cpu|cuda|gfx942|gfx950]
"""

import math

import torch
from plain import attention, compare, run

import jitfmha


def main(device: torch.device) -> None:
    q, k, v = torch.randn(3, 2, 70, 4, 64, dtype=torch.bfloat16, device=device)

    # One for all of the batch; a dimension of 1 costs no memory and no copy.
    bias = torch.randn(1, 4, 70, 70, dtype=torch.bfloat16, device=device)
    out = jitfmha.fmha_fwd(q, k, v, bias=bias)
    compare("bias", out, attention(q, k, v, change=lambda scores: scores + bias))

    seen = torch.rand(2, 1, 70, 70, device=device) < 0.5
    out = jitfmha.fmha_fwd(q, k, v, bias=seen)
    expected = attention(q, k, v, change=lambda scores: scores.masked_fill(~seen, -math.inf))
    compare("a boolean bias hides keys", out, expected)

    slopes = 2.0 ** -torch.arange(1, 5, dtype=torch.float32, device=device)
    out = jitfmha.fmha_fwd(q, k, v, mask="causal", alibi_slopes=slopes)
    i, j = torch.arange(70, device=device)[:, None], torch.arange(70, device=device)
    lowered = slopes.double()[:, None, None] * (i - j).abs()
    expected = attention(
        q, k, v, change=lambda scores: (scores - lowered).masked_fill(j > i, -math.inf)
    )
    compare("ALiBi, causal", out, expected)


if __name__ == "__main__":
    run(main)
