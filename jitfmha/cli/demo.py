"""``python -m jitfmha demo``: the main job once from end to end, checked and timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from .exit_codes import FAILED, OK
from .output import add_json_flag, print_json, progress, table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BATCH, _SEQLEN, _HEADS = 2, 2048, 8
_RAGGED_LENGTHS = (2048, 1500, 977, 640, 333, 128, 64, 17)
_RAGGED_HEADS, _RAGGED_HEADS_K = 16, 4
_HDIM = 128
_SECONDS_PER_PROBLEM = 2.0


@dataclass(frozen=True)
class DemoResult:
    """One problem of the demo. Errors are the largest, against SDPA in float64."""

    problem: str
    kernel: str
    build_seconds: float | None  # None where the launcher was in the cache already
    milliseconds: float
    gflops: float
    sdpa_milliseconds: float
    error: float
    sdpa_error: float

    @property
    def verified(self) -> bool:
        """At most twice SDPA's own rounding error in the same dtype."""
        return self.error <= 2 * self.sdpa_error


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "demo",
        help="build, run, verify and time two problems of real size",
        description=(
            "Detect the target, build the launchers, run a batch and a ragged causal GQA problem, "
            "compare with torch's scaled_dot_product_attention, and print a table. The exit code "
            "is 1 when a result is wrong: when its error is over twice SDPA's."
        ),
    )
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "fp16"])
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run both problems and print the table."""
    import torch

    from ..problem import DTYPE_NAMES
    from ..target import target_of

    target = target_of(torch.device("cpu"))
    progress(f"target: {target}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        progress("a GPU is there too, but the kernels for AMD GPUs are not a part of this version")
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == args.dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        results = [_batch_problem(dtype), _ragged_problem(dtype)]
    verified = all(result.verified for result in results)
    if args.json:
        print_json(
            {
                "target": str(target),
                "threads": torch.get_num_threads(),
                "verified": verified,
                "results": [{**asdict(x), "verified": x.verified} for x in results],
            }
        )
    else:
        _print(results)
    return OK if verified else FAILED


def _print(results: list[DemoResult]) -> None:
    headers = (
        "problem",
        "kernel",
        "build",
        "warm ms",
        "GFLOP/s",
        "SDPA ms",
        "error",
        "SDPA's",
        "verified",
    )
    print(
        table(
            headers,
            [
                (
                    x.problem,
                    x.kernel,
                    "in the cache" if x.build_seconds is None else f"{x.build_seconds:.1f} s",
                    f"{x.milliseconds:.1f}",
                    f"{x.gflops:.0f}",
                    f"{x.sdpa_milliseconds:.1f}",
                    f"{x.error:.1e}",
                    f"{x.sdpa_error:.1e}",
                    "yes" if x.verified else "NO",
                )
                for x in results
            ],
        )
    )


def _batch_problem(dtype: torch.dtype) -> DemoResult:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from ..interface import explain, fmha_fwd

    shape = (_BATCH, _SEQLEN, _HEADS, _HDIM)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2)

    return _measure(
        f"batch of {_BATCH} x {_SEQLEN}, {_HEADS} heads",
        explain(q, k, v).to_dict()["kernel"],
        lambda: fmha_fwd(q, k, v),
        sdpa,
        (q, k, v),
        pairs=_BATCH * _HEADS * _SEQLEN * _SEQLEN,
    )


def _ragged_problem(dtype: torch.dtype) -> DemoResult:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from ..interface import explain, fmha_fwd

    ends = list(accumulate(_RAGGED_LENGTHS, initial=0))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    q = torch.randn(ends[-1], _RAGGED_HEADS, _HDIM).to(dtype)
    k, v = (torch.randn(ends[-1], _RAGGED_HEADS_K, _HDIM).to(dtype) for _ in range(2))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for start, end in pairwise(ends):
            qt, kt, vt = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            result = scaled_dot_product_attention(qt, kt, vt, is_causal=True, enable_gqa=True)
            out[start:end] = result[0].transpose(0, 1)
        return out

    arguments: dict[str, Any] = {
        "mask": "causal",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
    }
    return _measure(
        f"{len(_RAGGED_LENGTHS)} ragged sequences to {max(_RAGGED_LENGTHS)}, causal, "
        f"{_RAGGED_HEADS}/{_RAGGED_HEADS_K} heads",
        explain(q, k, v, **arguments).to_dict()["kernel"],
        lambda: fmha_fwd(q, k, v, **arguments),
        sdpa,
        (q, k, v),
        pairs=_RAGGED_HEADS * sum(length * (length + 1) // 2 for length in _RAGGED_LENGTHS),
    )


def _measure(
    problem: str,
    kernel: str,
    ours: Callable[[], Tensor],
    sdpa: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    pairs: int,
) -> DemoResult:
    from .. import jit
    from ..bench.timing import alternate

    progress(f"{problem}: building or loading {kernel}")
    out = ours()
    built = [x.seconds for x in jit.build_log() if x.name == kernel and x.how == "built"]
    progress(f"{problem}: verifying against SDPA in float64, then timing")
    q, k, v = inputs
    exact = sdpa(q.double(), k.double(), v.double())
    times = alternate([ours, lambda: sdpa(q, k, v)], min_seconds=_SECONDS_PER_PROBLEM)
    return DemoResult(
        problem=problem,
        kernel=kernel,
        build_seconds=built[0] if built else None,
        milliseconds=times.best(0) * 1e3,
        gflops=4 * pairs * _HDIM / times.best(0) / 1e9,
        sdpa_milliseconds=times.best(1) * 1e3,
        error=_largest_difference(out, exact),
        sdpa_error=_largest_difference(sdpa(q, k, v), exact),
    )


def _largest_difference(out: Tensor, exact: Tensor) -> float:
    return (out.double() - exact).abs().max().item()
