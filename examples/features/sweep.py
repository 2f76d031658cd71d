"""Many calls at once: what kernel serves each, whether it is right, and what it takes.

Run it with:  python examples/features/sweep.py [--device cpu|cuda|gfx942|gfx950]
Times of an emulated GPU are those of its emulation. `python -m jitfmha bench` measures with care.
"""

import time

import torch
from plain import attention, compare, run

import jitfmha


def main(device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for hdim in (64, 128):
            for seqlen in (1, 63, 128):
                q, k, v = torch.randn(3, 1, seqlen, 4, hdim, dtype=dtype, device=device)
                out = jitfmha.fmha_fwd(q, k, v)  # builds what is not there yet
                start = time.perf_counter()
                lse = jitfmha.fmha_fwd(q, k, v, return_lse=True)[1]
                lse.sum().item()  # waits for the GPU
                took = 1e3 * (time.perf_counter() - start)
                plan = jitfmha.explain(q, k, v).plan
                print(f"{plan and plan.kernel}, {took:.2f} ms")
                compare(f"{dtype}, hdim {hdim}, {seqlen} keys", out, attention(q, k, v))


if __name__ == "__main__":
    run(main)
