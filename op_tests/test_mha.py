"""Attention over batches by AITER's function, forward and backward; also a script.

    python op_tests/test_mha.py -b 2 -n 6 -q 512 -k 512 -d_qk_v 128,128 -c true -d bf16

checks and times every combination of its options, which are those of AITER's file of the same name,
on the GPU if there is one, else on the CPU, or with JITFMHA_EMULATE on an emulated GPU.
"""

import argparse
import sys
from functools import partial
from typing import Any

import pytest
import torch
from inputs import DTYPES, lay_out, random_qkv
from mha_calls import (
    Checked,
    add_lists,
    add_shared_options,
    check,
    kept,
    key_heads,
    masked,
    reference_mask,
    run_all,
)

from jitfmha.aiter import flash_attn_func
from jitfmha.problem.float64_reference import attention

_LAYOUTS = {"BSHD": "bshd", "BHSD": "bhsd", "SBHD": "sbhd", "QKVPACKED": "packed"}


def check_batch(
    rng: torch.Generator,
    *,
    batch: int = 2,
    heads: int = 6,
    seqlen_q: int = 33,
    seqlen_k: int = 65,
    dropout_p: float = 0.0,
    bias_type: str = "no",
    layout: str = "BSHD",
    dtype: str = "bf16",
    hdims: tuple[int, int] = (64, 64),
    mha_type: str = "mha",
    causal: bool = False,
    local: bool = False,
    deterministic: bool = False,
    repeats: int = 0,
) -> Checked:
    heads_k = key_heads(mha_type, heads)
    sizes, of_rows = (seqlen_q, seqlen_k, heads, heads_k), {"hdim": hdims[0], "hdim_v": hdims[1]}
    qkv = random_qkv(rng, sizes, batch=batch, dtype=DTYPES[dtype], **of_rows)
    q, k, v = (lay_out(x, _LAYOUTS[layout]) for x in qkv)
    dout = torch.randn(batch, seqlen_q, heads, hdims[1], generator=rng).to(q.dtype)
    mask = masked(causal, local, seqlen_k, rng)
    bias = slopes = None
    if bias_type == "bias":
        bias = torch.randn(seqlen_q, seqlen_k, generator=rng).to(q.dtype)
    if bias_type == "alibi":
        slopes = torch.rand(batch, heads, generator=rng)

    def reference(*tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, randval = tensors
        features: dict[str, Any] = {"alibi_slopes": slopes}
        if bias is not None:
            features["bias"] = bias[None, None]
        if randval is not None:
            features.update(keep=kept(randval, dropout_p), dropout_p=dropout_p)
        return attention(*qkv, **features, **reference_mask(mask))

    return check(
        *(flash_attn_func, reference, (q, k, v), dout),
        mask=mask,
        bias_type=bias_type,
        dropout_p=dropout_p,
        repeats=repeats,
        deterministic=deterministic,
        pairs=batch * seqlen_q * seqlen_k,
        bias=bias,
        alibi_slopes=slopes,
    )


# All with the head dimension and the data type of other tests, whose kernels are there.
@pytest.mark.parametrize("layout", list(_LAYOUTS))
def test_layouts(rng, layout):
    assert check_batch(rng, layout=layout, mha_type="gqa", causal=True).holds


@pytest.mark.parametrize("mha_type", ["mha", "mqa", "gqa"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (64, 127), (129, 128), (113, 203)])
def test_batches(rng, mha_type, local, seqlen_q, seqlen_k):
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    checked = check_batch(rng, mha_type=mha_type, local=local, causal=True, **sizes)
    assert checked.holds, checked


def test_a_wrong_result_does_not_hold(rng, monkeypatch):
    right = flash_attn_func
    monkeypatch.setattr(
        sys.modules[__name__],
        "flash_attn_func",
        lambda q, k, v, **options: right(q, k * 1.5, v, **options),
    )
    assert not check_batch(rng, causal=True).holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", "--batch_size", type=int, default=2)
    parser.add_argument("-n", "--nheads", type=int, default=6)
    parser.add_argument("-q", "--seqlen_q", type=int, default=512)
    parser.add_argument("-k", "--seqlen_k", type=int, default=512)
    parser.add_argument("-p", "--dropout_p", type=float, default=0.0)
    parser.add_argument("-i", "--input_layout", choices=list(_LAYOUTS), default="BSHD")
    add_shared_options(parser)
    add_lists(parser, "-m", "-d")
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(args.seed)
    sizes = {"batch": args.batch_size, "seqlen_q": args.seqlen_q, "seqlen_k": args.seqlen_k}
    return run_all(args, partial(check_batch, rng, **sizes))


if __name__ == "__main__":
    sys.exit(main())
