"""Attention over packed sequences by AITER's function, forward and backward; also a script.

    python op_tests/test_mha_varlen.py -b 4 -nh 6 -s 512,700 -d_qk_v 128,128 -c true -dt bf16

checks and times every combination of its options, which are those of AITER's file of the same name,
on the GPU if there is one, else on the CPU, or with JITFMHA_EMULATE on an emulated GPU. The lengths
of the sequences are drawn up to those of ``-s``.
"""

import argparse
import sys
from typing import Any

import pytest
import torch
from inputs import DTYPES
from mha_calls import (
    BIAS_TYPES,
    Checked,
    add_lists,
    add_shared_options,
    check,
    kept,
    key_heads,
    masked,
    pair,
    reference_mask,
    run_all,
)
from packed_calls import Sequences

from jitfmha.aiter import flash_attn_varlen_func
from jitfmha.problem.float64_reference import attention_packed

_LAYOUTS = ("BSHD", "KVPACKED")


def check_packed(
    rng: torch.Generator,
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    heads: int = 6,
    min_seqlen_q: int = 0,
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
    if bias_type == "bias":
        raise ValueError("packed sequences have no bias here; use 'no' or 'alibi'")
    heads_k = key_heads(mha_type, heads)
    total_q, total_k = sum(lengths_q), sum(lengths_k)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(DTYPES[dtype])

    q, dout = drawn(total_q, heads, hdims[0]), drawn(total_q, heads, hdims[1])
    if layout == "KVPACKED":
        if hdims[0] != hdims[1]:
            raise ValueError(f"KVPACKED needs equal head dimensions, got {hdims}")
        k, v = drawn(total_k, 2, heads_k, hdims[0]).unbind(1)
    else:
        k, v = drawn(total_k, heads_k, hdims[0]), drawn(total_k, heads_k, hdims[1])
    mask = masked(causal, local, max(lengths_k), rng)
    slopes = None
    if bias_type == "alibi":
        slopes = torch.rand(len(lengths_q), heads, generator=rng)
    sequences = Sequences((lengths_q, lengths_k))

    def reference(*tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, randval = tensors
        features: dict[str, Any] = {"alibi_slopes": slopes}
        if randval is not None:
            # Of the packed rows; the reference has them by sequence.
            keep = torch.zeros(len(lengths_q), heads, max(lengths_q), max(lengths_k)).bool()
            for n, (start, length) in enumerate(zip(sequences.spans[2], lengths_q, strict=True)):
                keep[n, :, :length] = kept(randval[:, start : start + length], dropout_p)
            features.update(keep=keep, dropout_p=dropout_p)
        return attention_packed(*qkv, *sequences.spans, **features, **reference_mask(mask))

    pairs = sum(sq * sk for sq, sk in zip(lengths_q, lengths_k, strict=True))
    return check(
        *(flash_attn_varlen_func, reference, (q, k, v), dout),
        mask=mask,
        bias_type=bias_type,
        dropout_p=dropout_p,
        repeats=repeats,
        deterministic=deterministic,
        pairs=pairs,
        alibi_slopes=slopes,
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
        min_seqlen_q=min_seqlen_q,
        **sequences.groups,
    )


# With the head dimension and the data type of other tests, whose kernels are there.
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("mha_type", ["mha", "mqa", "gqa"])
@pytest.mark.parametrize("local", [False, True])
def test_packed(rng, layout, mha_type, local):
    lengths_q, lengths_k = [0, 1, 63, 64, 65], [5, 1, 0, 130, 64]
    options = {"layout": layout, "mha_type": mha_type, "local": local}
    checked = check_packed(rng, lengths_q, lengths_k, causal=True, **options)  # type: ignore[arg-type]
    assert checked.holds, checked


def test_a_wrong_result_does_not_hold(rng, monkeypatch):
    right = flash_attn_varlen_func
    monkeypatch.setattr(
        sys.modules[__name__],
        "flash_attn_varlen_func",
        lambda q, k, v, **options: right(q, k, v * 1.5, **options),
    )
    assert not check_packed(rng, [3, 40], [9, 40], causal=True).holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", "--batch_size", type=int, default=4)
    parser.add_argument("-nh", "--nheads", type=int, default=9)
    parser.add_argument(
        *("-s", "--seqlen_q_k"), type=pair, default=(512, 512), metavar="SQ,SK", help="longest"
    )
    parser.add_argument("-dp", "--dropout_p", type=float, default=0.0)
    parser.add_argument("-msq", "--min_seqlen_q", type=int, default=0)
    parser.add_argument("-i", "--input_layout", choices=_LAYOUTS, default="BSHD")
    add_shared_options(parser)
    add_lists(parser, "-mha", "-dt")
    args = parser.parse_args()
    if args.bias_type not in (*BIAS_TYPES[:1], "alibi"):
        parser.error(f"-bt {args.bias_type}: packed sequences have no bias here")
    rng = torch.Generator().manual_seed(args.seed)

    def check_one(**options: Any) -> Checked:
        lengths = [
            torch.randint(1, longest + 1, (args.batch_size,), generator=rng).tolist()
            for longest in args.seqlen_q_k
        ]
        return check_packed(rng, *lengths, min_seqlen_q=args.min_seqlen_q, **options)

    return run_all(args, check_one)


if __name__ == "__main__":
    sys.exit(main())
