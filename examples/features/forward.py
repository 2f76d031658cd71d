"""Attention over a batch, and over packed sequences of different lengths.

Run it with:  python examples/features/forward.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run

import jitfmha


def main(device: torch.device) -> None:
    # gm0: (batch, seqlen, heads, hdim). The last dimension is contiguous, the others lie as they
    # like: these three are columns of one tensor, as a projection gives them.
    qkv = torch.randn(2, 100, 3, 4, 64, dtype=torch.bfloat16, device=device)
    q, k, v = qkv.unbind(2)
    out, lse = jitfmha.fmha_fwd(q, k, v, return_lse=True)
    compare("gm0", out, attention(q, k, v))
    print("log-sum-exp", tuple(lse.shape), lse.dtype)

    # gm1: the sequences lie one after the other, and prefix sums say where.
    cu_seqlens = torch.tensor([0, 37, 38, 100], dtype=torch.int32, device=device)
    q, k, v = qkv[0].unbind(1)
    out = jitfmha.fmha_fwd(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        one = (x[None, start:end] for x in (q, k, v))
        compare(f"gm1, tokens {start} to {end}", out[start:end], attention(*one)[0])

    # Which kernel serves the call, and why no other one does.
    print(jitfmha.explain(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens))


if __name__ == "__main__":
    run(main)
