"""Dropout that can be repeated: the same random state drops the same probabilities.

Run it with:  python examples/features/dropout.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run

import jitfmha


def main(device: torch.device) -> None:
    q, k, v = torch.randn(3, 2, 80, 4, 64, dtype=torch.bfloat16, device=device)
    state = jitfmha.new_rng_state(device)
    out = jitfmha.fmha_fwd(q, k, v, dropout_p=0.25, rng_state=state)

    # Which ones are dropped depends on the state and on the place alone, not on the device.
    kept = jitfmha.dropout_randval(state, 2, 4, 80, 80) <= 255 * (1 - 0.25)
    print(f"{kept.double().mean():.1%} of the probabilities are kept")
    expected = attention(q, k, v, drop=lambda p: p * kept / (1 - 0.25))
    compare("dropout", out, expected)

    again = jitfmha.fmha_fwd(q, k, v, dropout_p=0.25, rng_state=state)
    print("the same again" if torch.equal(out, again) else "another result")


if __name__ == "__main__":
    run(main)
