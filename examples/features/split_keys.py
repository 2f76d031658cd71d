"""Keys that are split, so that one query keeps all of a GPU busy, and parts that are combined.

Run it with:  python examples/features/split_keys.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run

import jitfmha


def main(device: torch.device) -> None:
    q = torch.randn(1, 1, 4, 64, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 1, 700, 2, 64, dtype=torch.bfloat16, device=device)
    expected = attention(q, k, v)
    # 0, the default, leaves the number to the chip and the lengths.
    for num_splits in (0, 1, 4):
        out = jitfmha.fmha_fwd(q, k, v, num_splits=num_splits)
        compare(f"num_splits={num_splits}", out, expected)

    # The results of the parts, as a framework wants them whose devices have keys each.
    out, _, parts, lse_parts = jitfmha.mha_fwd_splitkv(q, k, v, 4)
    compare("of all parts", out, expected)
    # As (parts, b, sq, hq, hdim) and (parts, b, sq, hq), which flash-attn's function takes.
    combined, _ = jitfmha.flash_attn_combine(parts.transpose(2, 3), lse_parts.transpose(2, 3))
    compare("combined by hand", combined, expected, torch.bfloat16)


if __name__ == "__main__":
    run(main)
