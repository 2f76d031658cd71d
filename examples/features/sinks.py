"""Sink tokens: a learned score for each head that belongs to no key, as GPT-OSS has it.

Run it with:  python examples/features/sinks.py [--device cpu|cuda|gfx942|gfx950]
"""

import torch
from plain import attention, compare, run
from torch import Tensor

import jitfmha


def main(device: torch.device) -> None:
    q, k, v = torch.randn(3, 2, 70, 4, 64, dtype=torch.bfloat16, device=device)
    sink = torch.randn(4, device=device)

    def with_sink(scores: Tensor) -> Tensor:
        column = sink.double()[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), -1)

    # It takes its share of the softmax, and adds nothing to the output.
    compare("sink", jitfmha.fmha_fwd(q, k, v, sink=sink), attention(q, k, v, change=with_sink))


if __name__ == "__main__":
    run(main)
