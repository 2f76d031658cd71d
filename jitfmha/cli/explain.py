"""``python -m jitfmha explain``: which kernel a call would take, and why no other."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from ..ahead.combination import check_combination
from ..ahead.validate import asked_combination
from ..call.detection import planned_target
from ..call.dispatch import Explanation, explain_problem
from ..call.explained import CallExplanation
from ..gemm.explain import explain_matmul
from ..problem.dtypes import TORCH_DTYPES
from ..problem.problem import Problem
from ..rows.explain import explain_rows
from .exit_codes import FAILED, OK, UsageError
from .flags import parser
from .output import print_json, show

_OF_OTHERS = ("M", "N", "K", "residual")
_OF_ALL = ("of", "device", "dtype", "out_dtype", "json", "command")


def run(args: argparse.Namespace) -> int:
    """Explain the call that the flags describe."""
    _refuse_flags_of_others(args)
    explanation: Explanation | CallExplanation
    try:
        if args.of == "attention":
            explanation = explain_problem(_problem(args), planned_target(args.device))
        else:
            explanation = _of_product(args) if args.of == "matmul" else _of_rows(args)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(explanation.to_dict())
    else:
        show(str(explanation))
    return FAILED if explanation.kernel is None else OK


def _refuse_flags_of_others(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` for a flag that says nothing about the call."""
    usual, given = vars(parser().parse_args(["explain"])), vars(args)
    known = {*_OF_ALL, *(usual.keys() - _OF_OTHERS if args.of == "attention" else _OF_OTHERS)}
    known |= set() if args.of == "matmul" else {"direction"}
    without = {"attention": (), "matmul": ("residual",)}.get(args.of, ("K",))
    for name, value in given.items():
        if value != usual[name] and (name not in known or name in without):
            flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is not for --of {args.of}")


def _sizes(args: argparse.Namespace, names: str) -> list[int]:
    sizes = [getattr(args, name) for name in names]
    if None in sizes:
        needed = " and ".join(f"-{name}" for name in names)
        raise UsageError(f"--of {args.of} needs {needed}")
    return sizes


def _of_rows(args: argparse.Namespace) -> CallExplanation:
    """With weights, as layers have them."""
    shape, dtype = _sizes(args, "MN"), TORCH_DTYPES[args.dtype]
    empty = partial(torch.empty, dtype=dtype, device="meta")
    return explain_rows(
        args.of,
        empty(shape),
        None if args.of == "softmax" else empty(shape[1]),
        empty(shape[1]) if args.of == "layer_norm" else None,
        residual=empty(shape) if args.residual else None,
        out_dtype=TORCH_DTYPES.get(args.out_dtype),
        direction=args.direction,
        device=args.device,
    )


def _of_product(args: argparse.Namespace) -> CallExplanation:
    """With weights ``(N, K)``, as layers have them."""
    m, n, k = _sizes(args, "MNK")
    empty = partial(torch.empty, dtype=TORCH_DTYPES[args.dtype], device="meta")
    out_dtype = TORCH_DTYPES.get(args.out_dtype)
    return explain_matmul(empty(m, k), empty(n, k).mT, out_dtype=out_dtype, device=args.device)


def _problem(args: argparse.Namespace) -> Problem:
    is_packed_qkv = args.layout == "qkvpacked"
    combination = asked_combination(
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        out_dtype=args.out_dtype,
        hdim=args.hdim,
        hdim_v=args.hdim_v,
        mask=args.mask,
        window_size=_ints("--window", args.window),  # type: ignore[arg-type]
        direction=args.direction,
        features=[*args.features, *(["lse"] if args.lse else [])],
        layout="bshd" if is_packed_qkv else args.layout,
        page_size=args.page_size,
        num_splits=args.num_splits,
        heads=args.heads,
        heads_k=args.heads_k,
        **_lengths(args),
    )
    check_combination(combination)
    problem = combination.problem()._replace(bf16_cvt=args.bf16_cvt)
    if problem.direction == "backward":
        problem = problem._replace(is_deterministic=args.deterministic)
    return _of_packed_qkv(problem) if is_packed_qkv else problem


def _lengths(args: argparse.Namespace) -> dict[str, Any]:
    """What says how many sequences there are and how long they are, and the mode."""
    if args.varlen is None:
        if args.varlen_k is not None:
            raise UsageError("--varlen-k needs --varlen")
        seqlen = _or(args.seqlen, 1024)
        sizes = {"batch": _or(args.batch, 1), "seqlen": seqlen, "seqlen_k": args.seqlen_k}
        return {"mode": "gm0", **sizes}
    for flag in ("batch", "seqlen", "seqlen_k"):
        if (given := getattr(args, flag)) is not None:
            name = flag.replace("_", "-")
            raise UsageError(f"--varlen has the lengths; --{name} {given} has no place")
    if args.layout not in ("bshd", "qkvpacked"):
        raise UsageError("--varlen packs sequences; --layout is bshd or qkvpacked with it")
    of_q = _sequences("--varlen", args.varlen)
    of_k = of_q if args.varlen_k is None else _sequences("--varlen-k", args.varlen_k)
    if len(of_k) != len(of_q):
        raise UsageError(f"--varlen-k has {len(of_k)} lengths, --varlen {len(of_q)}")
    return {"mode": "gm1", "batch": len(of_q), "seqlen": sum(of_q), "seqlen_k": sum(of_k)}


def _of_packed_qkv(problem: Problem) -> Problem:
    """The same with q, k and v between each other's rows."""
    sizes = problem.sizes
    shapes = (sizes.seqlen_q, sizes.q), (sizes.seqlen_k, sizes.k), (sizes.seqlen_k, sizes.v)
    if len(set(shapes)) > 1 or problem.dtype != problem.kv_dtype:
        raise UsageError("--layout qkvpacked needs q, k and v of one shape and dtype")
    *rows, head, element = sizes.q
    strides = (*(3 * x for x in rows), head, element)
    return problem._replace(sizes=sizes._replace(q=strides, k=strides, v=strides))


def _sequences(flag: str, text: str) -> tuple[int, ...]:
    lengths = _ints(flag, text)
    if min(lengths) < 0:
        raise UsageError(f"{flag} {text}: a length is at least 0")
    return lengths


def _ints(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text} is not a list of integers like 128,64") from None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
