"""``python -m jitfmha explain``: which kernel a call would take, and why no other."""

from __future__ import annotations

import argparse
from typing import Any

from ..ahead.combination import check_combination
from ..ahead.validate import asked_combination
from ..call.detection import planned_target
from ..call.dispatch import explain_problem
from ..problem.problem import Problem
from .exit_codes import FAILED, OK, UsageError
from .output import print_json, show


def run(args: argparse.Namespace) -> int:
    """Explain the problem that the flags describe."""
    try:
        explanation = explain_problem(_problem(args), planned_target(args.device))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(explanation.to_dict())
    else:
        show(str(explanation))
    return FAILED if explanation.plan is None else OK


def _problem(args: argparse.Namespace) -> Problem:
    is_packed_qkv = args.layout == "qkvpacked"
    combination = asked_combination(
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
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
