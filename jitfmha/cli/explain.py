"""``python -m jitfmha explain``: which kernel a call would take, and why no other."""

from __future__ import annotations

import argparse
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..call.interface import explain
from ..problem.arguments import Options
from ..problem.dtypes import DTYPE_NAMES
from .exit_codes import FAILED, OK, UsageError
from .output import print_json

# The order of the dimensions in memory, as positions in (batch, seqlen, heads).
_LAYOUTS = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1), "sbhd": (1, 0, 2)}


def run(args: argparse.Namespace) -> int:
    """Explain the problem that the flags describe."""
    try:
        tensors, options = _call(args)
        options["mask"], options["bf16_cvt"] = args.mask, args.bf16_cvt
        options["window_size"] = _ints("--window", args.window)  # type: ignore[typeddict-item]
        explanation = explain(*tensors, device=args.device, return_lse=args.lse, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(explanation.to_dict())
    else:
        print(explanation)
    return FAILED if explanation.plan is None else OK


def _call(args: argparse.Namespace) -> tuple[tuple[Tensor, Tensor, Tensor], Options]:
    if args.varlen is None:
        if args.varlen_k is not None:
            raise UsageError("--varlen-k needs --varlen")
        seqlen = _or(args.seqlen, 1024)
        lengths = _or(args.batch, 1), seqlen, _or(args.seqlen_k, seqlen)
        return _meta_tensors(args, *lengths), {}
    for flag in ("batch", "seqlen", "seqlen_k"):
        if (given := getattr(args, flag)) is not None:
            name = flag.replace("_", "-")
            raise UsageError(f"--varlen has the lengths; --{name} {given} has no place")
    if args.layout not in ("bshd", "qkvpacked"):
        raise UsageError("--varlen packs sequences; --layout is bshd or qkvpacked with it")
    sums_q = _prefix_sums("--varlen", args.varlen)
    sums_k = _prefix_sums("--varlen-k", _or(args.varlen_k, args.varlen))
    q, k, v = _meta_tensors(args, 1, sums_q[-1], sums_k[-1])
    cu_q, cu_k = (
        torch.empty(len(sums), dtype=torch.int32, device="meta") for sums in (sums_q, sums_k)
    )
    return (q[0], k[0], v[0]), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def _meta_tensors(
    args: argparse.Namespace, batch: int, seqlen_q: int, seqlen_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v without memory: a problem of any size can be explained anywhere."""
    heads_k, hdim_v = _or(args.heads_k, args.heads), _or(args.hdim_v, args.hdim)
    by_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    dtype, kv_dtype = by_name[args.dtype], by_name[_or(args.kv_dtype, args.dtype)]
    if args.layout == "qkvpacked":
        if (heads_k, hdim_v, seqlen_k, kv_dtype) != (args.heads, args.hdim, seqlen_q, dtype):
            raise UsageError("--layout qkvpacked needs q, k and v of one shape and dtype")
        shape = (batch, seqlen_q, 3, args.heads, args.hdim)
        q, k, v = torch.empty(shape, dtype=dtype, device="meta").unbind(2)
        return q, k, v

    order = _LAYOUTS[args.layout]

    def tensor(seqlen: int, heads: int, hdim: int, dtype: torch.dtype) -> Tensor:
        shape = (batch, seqlen, heads)
        in_memory = torch.empty((*(shape[i] for i in order), hdim), dtype=dtype, device="meta")
        return in_memory.permute(*(order.index(i) for i in range(3)), 3)

    return (
        tensor(seqlen_q, args.heads, args.hdim, dtype),
        tensor(seqlen_k, heads_k, args.hdim, kv_dtype),
        tensor(seqlen_k, heads_k, hdim_v, kv_dtype),
    )


def _prefix_sums(flag: str, text: str) -> list[int]:
    lengths = _ints(flag, text)
    if min(lengths) < 0:
        raise UsageError(f"{flag} {text}: a length is at least 0")
    return list(accumulate(lengths, initial=0))


def _ints(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text} is not a list of integers like 128,64") from None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
