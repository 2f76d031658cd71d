"""A soft cap on scores, as Gemma 2 has it.

Run it with:  python examples/features/soft_cap.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run
from torch import Tensor

import jitfmha


def main(device: torch.device) -> None:
    q, k, v = torch.randn(3, 2, 70, 4, 128, dtype=torch.bfloat16, device=device)
    for cap in (50.0, 2.0):

        def capped(scores: Tensor, cap: float = cap) -> Tensor:
            return cap * torch.tanh(scores / cap)

        out = jitfmha.fmha_fwd(q, k, v, logit_softcap=cap)
        compare(f"logit_softcap={cap}", out, attention(q, k, v, change=capped))


if __name__ == "__main__":
    run(main)
