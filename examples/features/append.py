"""Decoding: new keys are rotated and appended to a cache, and attended to, in one call.

Run it with:  python examples/features/append.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run
from torch import Tensor

import jitfmha

BATCH, HEADS, KEY_HEADS, HDIM, ROOM = 2, 4, 2, 64, 48


def main(device: torch.device) -> None:
    def draw(seqlen: int, heads: int) -> Tensor:
        return torch.randn(BATCH, seqlen, heads, HDIM, dtype=torch.bfloat16, device=device)

    k_cache, v_cache = draw(ROOM, KEY_HEADS), draw(ROOM, KEY_HEADS)
    lengths = torch.tensor([20, 31], dtype=torch.int32, device=device)
    angles = torch.arange(ROOM)[:, None] / 10000 ** (torch.arange(0, HDIM, 2) / HDIM)
    cos, sin = (f(angles).to(device, torch.bfloat16) for f in (torch.cos, torch.sin))

    def rotated(x: Tensor, position: int) -> Tensor:
        c, s = cos[position].double(), sin[position].double()
        even, odd = x.double()[..., ::2], x.double()[..., 1::2]
        return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)

    for step in range(2):
        q, k, v = draw(1, HEADS), draw(1, KEY_HEADS), draw(1, KEY_HEADS)
        before = k_cache.clone()
        out = jitfmha.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=lengths, causal=True
        )
        for row, length in enumerate(lengths.tolist()):
            name = f"step {step}, after {length} keys"
            keys = torch.cat((before[row, :length].double(), rotated(k[row], length)))
            compare(f"{name}: the cache", k_cache[row, : length + 1], keys)
            turned = rotated(q[row], length).to(torch.bfloat16)
            pair = k_cache[row, : length + 1], v_cache[row, : length + 1]
            compare(name, out[row], attention(turned[None], *(x[None] for x in pair))[0])
        lengths += 1


if __name__ == "__main__":
    run(main)
