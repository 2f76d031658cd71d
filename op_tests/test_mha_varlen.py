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
    PACKED,
    PADDINGS,
    Asked,
    Checked,
    add_layout,
    add_lists,
    add_shared_options,
    check,
    kept,
    pair,
    reference_mask,
    run_all,
)
from packed_calls import Sequences

from jitfmha.aiter import flash_attn_varlen_func
from jitfmha.problem.float64_reference import attention_packed

_LAYOUTS = ("BSHD", *PACKED)


def check_packed(
    rng: torch.Generator,
    asked: Asked,
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    min_seqlen_q: int = 0,
) -> Checked:
    if asked.bias_type == "bias":
        raise ValueError("packed sequences have no bias here; use 'no' or 'alibi'")
    hdim, hdim_v = asked.hdims
    gap = torch.randint(1, 9, (), generator=rng).item()
    padded = {"mixed": (gap, gap), "q_only": (gap, 0), "k_only": (0, gap)}
    sequences = Sequences((lengths_q, lengths_k), padded.get(asked.padding, 0))
    total_q, total_k = sequences.rows
    used = sequences.used_rows(0), sequences.used_rows(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(DTYPES[asked.dtype])

    q, dout = drawn(total_q, asked.heads, hdim), drawn(total_q, asked.heads, hdim_v)
    k, v = (drawn(total_k, asked.heads_k, columns) for columns in asked.hdims)
    if asked.layout in PACKED:
        q, k, v = asked.packed_together(q, k, v)
    mask = asked.mask(max(lengths_k), rng)
    slopes = None
    if asked.bias_type == "alibi":
        slopes = torch.rand(len(lengths_q), asked.heads, generator=rng)
    for rows, tensors in zip(used, ((q, dout), (k, v)), strict=True):
        for x in tensors:
            x[~rows] = torch.nan

    def reference(*tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, randval = tensors
        features: dict[str, Any] = {"alibi_slopes": slopes}
        if randval is not None:
            # Of the packed rows; the reference has them by sequence.
            keep = torch.zeros(len(lengths_q), asked.heads, max(lengths_q), max(lengths_k)).bool()
            for n, (start, length) in enumerate(zip(sequences.spans[2], lengths_q, strict=True)):
                keep[n, :, :length] = kept(randval[:, start : start + length], asked.dropout_p)
            features.update(keep=keep, dropout_p=asked.dropout_p)
        return attention_packed(*qkv, *sequences.spans, **features, **reference_mask(mask))

    pairs = sum(sq * sk for sq, sk in zip(lengths_q, lengths_k, strict=True))
    return check(
        *(flash_attn_varlen_func, reference, (q, k, v), dout, asked),
        mask=mask,
        pairs=pairs,
        used=used,
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
    if layout == "QKVPACKED":
        lengths_k = lengths_q
    asked = Asked(layout=layout, mha_type=mha_type, local=local, causal=True)
    checked = check_packed(rng, asked, lengths_q, lengths_k)
    assert checked.holds, checked


@pytest.mark.parametrize("padding", PADDINGS[1:])
def test_padded(rng, padding):
    asked = Asked(padding=padding, mha_type="gqa", causal=True, local=True)
    checked = check_packed(rng, asked, [1, 64, 0, 65], [5, 130, 3, 64])
    assert checked.holds, checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", "--batch_size", type=int, default=4)
    parser.add_argument("-nh", "--nheads", type=int, default=16)
    parser.add_argument(
        *("-s", "--seqlen_q_k"), type=pair, default=(4, 8), metavar="SQ,SK", help="longest"
    )
    parser.add_argument("-dp", "--dropout_p", type=float, default=0.0)
    parser.add_argument("-msq", "--min_seqlen_q", type=int, default=0)
    parser.add_argument(
        "--padding",
        nargs="+",
        choices=PADDINGS,
        default=list(PADDINGS),
        metavar="SIDES",
        help=f"of {', '.join(PADDINGS)}: which have unused rows between sequences (default: all)",
    )
    add_layout(parser, _LAYOUTS)
    add_shared_options(parser, (192, 192))
    add_lists(parser, "-mha", "-dt")
    args = parser.parse_args()
    if args.bias_type not in (*BIAS_TYPES[:1], "alibi"):
        parser.error(f"-bt {args.bias_type}: packed sequences have no bias here")
    rng = torch.Generator().manual_seed(args.seed)

    def check_one(asked: Asked) -> Checked:
        lengths = [
            torch.randint(1, longest + 1, (args.batch_size,), generator=rng).tolist()
            for longest in args.seqlen_q_k
        ]
        if asked.layout == "QKVPACKED":
            lengths[1] = lengths[0]
        return check_packed(rng, asked, *lengths, min_seqlen_q=args.min_seqlen_q)

    return run_all(args, check_one)


if __name__ == "__main__":
    sys.exit(main())
