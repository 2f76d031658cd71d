"""Query heads that share key heads: GQA and MQA.

Run it with:  python examples/features/gqa.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run

import jitfmha


def main(device: torch.device) -> None:
    q = torch.randn(2, 50, 8, 64, dtype=torch.bfloat16, device=device)
    for heads_k, name in (8, "MHA"), (2, "GQA"), (1, "MQA"):
        # Query head h reads key head h // (8 // heads_k). Nothing is repeated in memory.
        k, v = torch.randn(2, 2, 120, heads_k, 64, dtype=torch.bfloat16, device=device)
        expected = attention(q, k, v)
        compare(f"{name}, 8 and {heads_k} heads", jitfmha.fmha_fwd(q, k, v), expected)


if __name__ == "__main__":
    run(main)
