"""The error is at most twice that of torch's own attention in the same dtype, against float64."""

from itertools import product

import pytest
import torch
from inputs import DTYPES, random_qkv
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from untyped import fmha_fwd

from jitfmha.problem.float64_reference import attention


def sizes(errors: list[Tensor]) -> dict[str, float]:
    """Of all, and of the largest hundredth: the very largest one is a matter of luck."""
    every = torch.stack(errors).abs().flatten()
    parts = {"rms": every, "rms of the largest": every.topk(every.numel() // 100).values}
    return {name: part.square().mean().sqrt().item() for name, part in parts.items()}


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("seqlen", [64, 700])
@pytest.mark.sample(
    ("dtype", "hdim", "is_causal"), list(product(DTYPES, (64, 128), (False, True))), 2
)
def test_against_torch(rng, dtype, hdim, seqlen, is_causal, spread):
    """``spread`` scales the scores: from a nearly even softmax to one with few large weights."""
    ours, torchs, lses = [], [], []
    for _ in range(4):
        q, k, v = random_qkv(rng, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, hdim=hdim)
        q, k, v = ((spread * q).to(DTYPES[dtype]), k.to(DTYPES[dtype]), v.to(DTYPES[dtype]))
        expected, expected_lse = attention(q, k, v, mask=2 if is_causal else 0)
        out, lse = fmha_fwd(q, k, v, mask=2 if is_causal else 0, return_lse=True)
        theirs = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=is_causal
        ).transpose(1, 2)
        ours.append(out - expected)
        torchs.append(theirs - expected)
        lses.append(lse - expected_lse)
    allowed = {name: 2 * size for name, size in sizes(torchs).items()}
    for name, size in sizes(ours).items():
        assert size <= allowed[name], f"{name} {size:.3g}, twice torch's: {allowed[name]:.3g}"
    rounding = torch.finfo(DTYPES[dtype]).eps / 2
    of_lse = torch.stack(lses).abs().max().item()
    assert of_lse <= max(rounding, 1e-6 * (1 + expected_lse.abs().max().item()))
