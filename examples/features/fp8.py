"""8 bits: queries, keys and values with scales, and 16-bit queries over a cache of 8 bits.

Run it with:  python examples/features/fp8.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run
from torch import Tensor

import jitfmha
from jitfmha.aiter import dtypes


def main(device: torch.device) -> None:
    fp8 = dtypes.fp8  # float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere
    exact = torch.randn(3, 1, 128, 4, 128, device=device).unbind(0)

    def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().max() / torch.finfo(fp8).max
        return (x / scale).to(fp8), scale.reshape(1)

    (q, q_scale), (k, k_scale), (v, v_scale) = map(quantized, exact)
    read = [x.double() * scale for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale))]
    out = jitfmha.fmha_fwd(q, k, v, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)
    compare(f"{fp8}", out, attention(*read), fp8)
    print(f"what rounding q, k and v costs: {(attention(*read) - attention(*exact)).norm():.2f}")

    # A cache of half the bytes; the queries, and what probabilities are rounded to, keep theirs.
    q16 = exact[0].to(torch.bfloat16)
    out = jitfmha.fmha_fwd(q16, k, v, k_descale=k_scale, v_descale=v_scale)
    compare("bf16 queries over it", out, attention(q16, *read[1:]))


if __name__ == "__main__":
    run(main)
