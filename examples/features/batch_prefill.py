"""Prompts whose keys lie in pages that sequences share.

Run it with:  python examples/features/batch_prefill.py [--device cpu|cuda|gfx942|gfx950]
"""

import math

import torch
from plain import attention, compare, run
from torch import Tensor

import jitfmha

PAGE = 16


def main(device: torch.device) -> None:
    # Two requests whose first two pages are the same, as those of a system prompt are.
    pages = torch.tensor([[3, 0, 5], [3, 0, 1]], dtype=torch.int32, device=device)
    k, v = torch.randn(2, 6, PAGE, 2, 64, dtype=torch.bfloat16, device=device)
    q = torch.randn(30, 4, 64, dtype=torch.bfloat16, device=device)
    # Of the first all 10 new rows come behind 35 keys; the second has 20 rows and 48 keys.
    cu_seqlens_q = torch.tensor([0, 10, 30], dtype=torch.int32, device=device)
    cu_seqlens_k = torch.tensor([0, 45, 93], dtype=torch.int32, device=device)
    out = jitfmha.fmha_fwd(
        q, k, v, mask="causal", block_table=pages, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=20, max_seqlen_k=48,
    )  # fmt: skip
    for n, (start, end, length) in enumerate(((0, 10, 45), (10, 30, 48))):
        keys, values = (x[pages[n].long()].flatten(0, 1)[None, :length] for x in (k, v))
        rows = end - start
        hidden = torch.ones(rows, length, dtype=torch.bool, device=device).triu(1 + length - rows)

        def causal(scores: Tensor, hidden: Tensor = hidden) -> Tensor:
            return scores.masked_fill(hidden, -math.inf)

        expected = attention(q[None, start:end], keys, values, change=causal)
        compare(f"request {n}: {rows} rows, {length} keys", out[start:end], expected[0])


if __name__ == "__main__":
    run(main)
