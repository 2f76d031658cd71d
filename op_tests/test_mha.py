"""Attention over batches by AITER's function, forward and backward; also a script.

    python op_tests/test_mha.py -b 2 -n 6 -q 512 -k 512 -d_qk_v 128,128 -c true -d bf16

checks and times every combination of its options, which are those of AITER's file of the same name,
on the GPU if there is one, else on the CPU, or with JITFMHA_EMULATE on an emulated GPU.
"""

import argparse
import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
from inputs import DTYPES, lay_out, random_qkv
from mha_calls import (
    PACKED,
    Asked,
    Checked,
    add_layout,
    add_lists,
    add_shared_options,
    check,
    kept,
    reference_mask,
    relative_error,
    run_all,
)

from jitfmha.aiter import flash_attn_func
from jitfmha.problem.float64_reference import attention

_LAYOUTS = ("BSHD", "BHSD", "SBHD", *PACKED)


def check_batch(
    rng: torch.Generator,
    asked: Asked,
    *,
    batch: int = 2,
    seqlen_q: int = 33,
    seqlen_k: int = 65,
    num_splits: int = 0,
) -> Checked:
    (hdim, hdim_v), sizes = asked.hdims, (seqlen_q, seqlen_k, asked.heads, asked.heads_k)
    options = {"hdim": hdim, "hdim_v": hdim_v, "dtype": DTYPES[asked.dtype]}
    qkv = random_qkv(rng, sizes, batch=batch, **options)
    if asked.layout in PACKED:
        q, k, v = asked.packed_together(*qkv)
    else:
        q, k, v = (lay_out(x, asked.layout.lower()) for x in qkv)
    dout = torch.randn(batch, seqlen_q, asked.heads, hdim_v, generator=rng).to(q.dtype)
    mask = asked.mask(seqlen_k, rng)
    bias = slopes = None
    if asked.bias_type == "bias":
        bias = torch.randn(seqlen_q, seqlen_k, generator=rng).to(q.dtype)
    if asked.bias_type == "alibi":
        slopes = torch.rand(batch, asked.heads, generator=rng)

    def reference(*tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, randval = tensors
        features: dict[str, Any] = {"alibi_slopes": slopes}
        if bias is not None:
            features["bias"] = bias[None, None]
        if randval is not None:
            keep = kept(randval, asked.dropout_p)
            features.update(keep=keep, dropout_p=asked.dropout_p)
        return attention(*qkv, **features, **reference_mask(mask))

    return check(
        *(flash_attn_func, reference, (q, k, v), dout, asked),
        mask=mask,
        pairs=batch * seqlen_q * seqlen_k,
        bias=bias,
        alibi_slopes=slopes,
        num_splits=num_splits,
    )


# All with the head dimension and the data type of other tests, whose kernels are there.
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_layouts(rng, layout):
    asked = Asked(layout=layout, mha_type="gqa", causal=True)
    assert check_batch(rng, asked, seqlen_q=65).holds


@pytest.mark.parametrize("mha_type", ["mha", "mqa", "gqa"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (64, 127), (129, 128), (113, 203)])
def test_batches(rng, mha_type, local, seqlen_q, seqlen_k):
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    checked = check_batch(rng, Asked(mha_type=mha_type, local=local, causal=True), **sizes)
    assert checked.holds, checked


def test_a_wrong_result_does_not_hold(rng, monkeypatch):
    right = flash_attn_func
    monkeypatch.setattr(
        sys.modules[__name__],
        "flash_attn_func",
        lambda q, k, v, **options: right(q, k * 1.5, v, **options),
    )
    assert not check_batch(rng, Asked(causal=True)).holds


def test_a_number_that_nobody_wrote_is_an_error():
    right = torch.ones(3, dtype=torch.float64)
    wrong = right.clone()
    wrong[1] = torch.nan
    assert math.isnan(relative_error([right, wrong], [right, right]))
    assert relative_error([right, right], [right, right]) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", "--batch_size", type=int, default=2)
    parser.add_argument("-n", "--nheads", type=int, default=16)
    parser.add_argument("-q", "--seqlen_q", type=int, default=512)
    parser.add_argument("-k", "--seqlen_k", type=int, default=512)
    parser.add_argument("-p", "--dropout_p", type=float, default=0.0)
    add_layout(parser, _LAYOUTS)
    splits = "of the keys; 0: as many as pay. What is computed does not depend on it"
    parser.add_argument("-ns", "--num_splits", type=int, default=0, help=splits)
    add_shared_options(parser, (192, 128))
    add_lists(parser, "-m", "-d")
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(args.seed)
    sizes = {"batch": args.batch_size, "seqlen_q": args.seqlen_q, "seqlen_k": args.seqlen_k}
    sizes["num_splits"] = args.num_splits
    return run_all(args, partial(check_batch, rng, **sizes))


if __name__ == "__main__":
    sys.exit(main())
