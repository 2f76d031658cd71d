"""``python -m jitfmha explain``: which kernel a call would take, and why no other."""

from __future__ import annotations

import argparse
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .exit_codes import FAILED, OK, UsageError
from .output import add_json_flag, print_json

if TYPE_CHECKING:
    from torch import Tensor

# The order of the dimensions in memory, as positions in (batch, seqlen, heads).
_LAYOUTS = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1), "sbhd": (1, 0, 2)}


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "explain",
        help="say which kernel a call would take, and why no other",
        description=(
            "Print the plan for a problem: the target, the kernel, and for every kernel family "
            "that is not taken the reasons. Nothing is allocated, built or launched. The exit "
            "code is 1 when no kernel serves the problem."
        ),
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="where the tensors are, as cpu or cuda; or a GPU that is not here, as gfx950 or "
        "MI308X (default: cpu)",
    )
    parser.add_argument(
        "--dtype",
        default="bf16",
        choices=["fp32", "bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn", "int8"],
    )
    parser.add_argument(
        "--bf16-cvt",
        default="rtne",
        choices=["rtne", "rtna", "rtz"],
        help="how probabilities become bf16 on gfx942 (default: rtne)",
    )
    parser.add_argument("--batch", type=int, help="sequences (default: 1)")
    parser.add_argument("--heads", type=int, default=8, help="heads of q")
    parser.add_argument("--heads-k", type=int, help="heads of k and v (default: as q)")
    parser.add_argument("--seqlen", type=int, help="seqlen of q (default: 1024)")
    parser.add_argument("--seqlen-k", type=int, help="seqlen of k and v (default: as q)")
    parser.add_argument("--hdim", type=int, default=128, help="hdim of q and k")
    parser.add_argument("--hdim-v", type=int, help="hdim of v (default: as q)")
    parser.add_argument("--mask", default="none", help="as in fmha_fwd, e.g. causal or b:128,0")
    parser.add_argument(
        "--window", default="-1,-1", metavar="LEFT,RIGHT", help="window_size (default: -1,-1)"
    )
    parser.add_argument(
        "--layout",
        default="bshd",
        choices=[*_LAYOUTS, "qkvpacked"],
        help="how q, k and v lie in memory (default: bshd)",
    )
    parser.add_argument(
        "--varlen",
        metavar="N,N,...",
        help="lengths of packed sequences (gm1), in place of --batch and --seqlen",
    )
    parser.add_argument(
        "--varlen-k", metavar="N,N,...", help="their lengths in k and v (default: as --varlen)"
    )
    parser.add_argument("--lse", action="store_true", help="with return_lse=True")
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain the problem that the flags describe."""
    import torch

    from ..call.detection import planned_target
    from ..call.dispatch import explain_problem
    from ..problem.arguments import Arguments, CuSeqlens
    from ..problem.dtypes import DTYPE_NAMES
    from ..problem.problem import make_problem

    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == args.dtype)
    cu_seqlens: CuSeqlens | None = None
    try:
        batch, seqlen_q = _or(args.batch, 1), _or(args.seqlen, 1024)
        seqlen_k = _or(args.seqlen_k, seqlen_q)
        if args.varlen is not None:
            for flag in ("batch", "seqlen", "seqlen_k"):
                if (given := getattr(args, flag)) is not None:
                    name = flag.replace("_", "-")
                    raise UsageError(f"--varlen has the lengths; --{name} {given} has no place")
            if args.layout not in ("bshd", "qkvpacked"):
                raise UsageError("--varlen packs sequences; --layout is bshd or qkvpacked with it")
            sums_q = _prefix_sums("--varlen", args.varlen)
            sums_k = _prefix_sums("--varlen-k", _or(args.varlen_k, args.varlen))
            cu_q, cu_k = (
                torch.empty(len(sums), dtype=torch.int32, device="meta")
                for sums in (sums_q, sums_k)
            )
            cu_seqlens = CuSeqlens(cu_q, cu_k, cu_q, cu_k, None, None)
            batch, seqlen_q, seqlen_k = 1, sums_q[-1], sums_k[-1]
        elif args.varlen_k is not None:
            raise UsageError("--varlen-k needs --varlen")
        q, k, v = _meta_tensors(args, dtype, batch, seqlen_q, seqlen_k)
        if cu_seqlens is not None:
            q, k, v = q[0], k[0], v[0]
        mask = int(args.mask) if args.mask.isdecimal() else args.mask
        window = _ints("--window", args.window)
        problem = make_problem(
            Arguments(
                *(q, k, v),
                mask=mask,
                window_size=window,  # type: ignore[arg-type]
                return_lse=args.lse,
                cu_seqlens=cu_seqlens,
                bf16_cvt=args.bf16_cvt,
            )
        )
        target = planned_target(args.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    explanation = explain_problem(problem, target)
    if args.json:
        print_json(explanation.to_dict())
    else:
        print(explanation)
    return FAILED if explanation.plan is None else OK


def _meta_tensors(
    args: argparse.Namespace, dtype: Any, batch: int, seqlen_q: int, seqlen_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v without memory: a problem of any size can be explained anywhere."""
    import torch

    heads_k, hdim_v = _or(args.heads_k, args.heads), _or(args.hdim_v, args.hdim)
    if args.layout == "qkvpacked":
        if (heads_k, hdim_v, seqlen_k) != (args.heads, args.hdim, seqlen_q):
            raise UsageError("--layout qkvpacked needs q, k and v of one shape")
        shape = (batch, seqlen_q, 3, args.heads, args.hdim)
        q, k, v = torch.empty(shape, dtype=dtype, device="meta").unbind(2)
        return q, k, v

    order = _LAYOUTS[args.layout]

    def tensor(seqlen: int, heads: int, hdim: int) -> Tensor:
        shape = (batch, seqlen, heads)
        in_memory = torch.empty((*(shape[i] for i in order), hdim), dtype=dtype, device="meta")
        return in_memory.permute(*(order.index(i) for i in range(3)), 3)

    return (
        tensor(seqlen_q, args.heads, args.hdim),
        tensor(seqlen_k, heads_k, args.hdim),
        tensor(seqlen_k, heads_k, hdim_v),
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
