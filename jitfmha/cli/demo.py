"""``python -m jitfmha demo``: the main job once from end to end, checked and timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import jit
from ..bench.timing import alternate, finished
from ..call.detection import target_of
from ..call.interface import explain, fmha_fwd
from ..planning.target import AmdTarget, Target
from ..problem.dtypes import DTYPE_NAMES
from .exit_codes import FAILED, OK
from .output import fields, print_json, progress, show

_HDIM = 128
_RAGGED_HEADS_PER_KEY_HEAD = 4


@dataclass(frozen=True)
class DemoSizes:
    """How large the two problems are, and for how long each is timed."""

    batch: int
    seqlen: int
    heads: int
    ragged_lengths: tuple[int, ...]
    ragged_heads: int
    seconds: float


_REAL_SIZES = DemoSizes(2, 2048, 8, (2048, 1500, 977, 640, 333, 128, 64, 17), 16, 2.0)
# An emulated GPU takes about a million times longer than a real one.
_EMULATED_SIZES = DemoSizes(2, 300, 2, (300, 129, 64, 17), 4, 0.0)


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


def run(args: argparse.Namespace) -> int:
    """Run both problems and print what came of them."""
    device, target = _served_device()
    progress(f"target: {target}, {torch.get_num_threads()} threads")
    is_emulated = isinstance(target, AmdTarget) and target.has_host_memory
    sizes = _EMULATED_SIZES if is_emulated else _REAL_SIZES
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == args.dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        results = [make(sizes, dtype, device) for make in (_batch_problem, _ragged_problem)]
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


def _served_device() -> tuple[torch.device, Target]:
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            return device, target_of(device)
        except ValueError as error:
            progress(f"{error}; the demo runs on the CPU")
    device = torch.device("cpu")
    return device, target_of(device)


def _print(results: list[DemoResult]) -> None:
    for x in results:
        built = "in the cache" if x.build_seconds is None else f"built in {x.build_seconds:.1f} s"
        ours, sdpas = f"{x.milliseconds:.1f} ms", f"{x.sdpa_milliseconds:.1f} ms"
        pairs = [
            ("problem", x.problem),
            ("kernel", f"{x.kernel}, {built}"),
            ("warm", f"{ours}, {x.gflops:.0f} GFLOP/s; SDPA {sdpas}"),
            ("error", f"{x.error:.1e}; SDPA's {x.sdpa_error:.1e}"),
            ("verified", "yes" if x.verified else "NO"),
        ]
        show(fields(pairs) + "\n")


def _batch_problem(sizes: DemoSizes, dtype: torch.dtype, device: torch.device) -> DemoResult:
    shape = (sizes.batch, sizes.seqlen, sizes.heads, _HDIM)
    q, k, v = (torch.randn(shape).to(device, dtype) for _ in range(3))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2)

    return _measure(
        f"batch of {sizes.batch} x {sizes.seqlen}, {sizes.heads} heads",
        *((q, k, v), {}, sdpa),
        pairs=sizes.batch * sizes.heads * sizes.seqlen * sizes.seqlen,
        seconds=sizes.seconds,
    )


def _ragged_problem(sizes: DemoSizes, dtype: torch.dtype, device: torch.device) -> DemoResult:
    lengths, heads = sizes.ragged_lengths, sizes.ragged_heads
    heads_k = heads // _RAGGED_HEADS_PER_KEY_HEAD
    prefix_sums = list(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(prefix_sums, dtype=torch.int32, device=device)
    q = torch.randn(prefix_sums[-1], heads, _HDIM).to(device, dtype)
    k, v = (torch.randn(prefix_sums[-1], heads_k, _HDIM).to(device, dtype) for _ in range(2))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for start, end in pairwise(prefix_sums):
            qt, kt, vt = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            result = scaled_dot_product_attention(qt, kt, vt, is_causal=True, enable_gqa=True)
            out[start:end] = result[0].transpose(0, 1)
        return out

    options: dict[str, Any] = {
        "mask": "causal",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max(lengths),
    }
    return _measure(
        f"{len(lengths)} ragged sequences to {max(lengths)}, causal, {heads}/{heads_k} heads",
        *((q, k, v), options, sdpa),
        pairs=heads * sum(length * (length + 1) // 2 for length in lengths),
        seconds=sizes.seconds,
    )


def _measure(
    problem: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    sdpa: Callable[[Tensor, Tensor, Tensor], Tensor],
    pairs: int,
    seconds: float,
) -> DemoResult:
    def ours() -> Tensor:
        out: Tensor = fmha_fwd(*qkv, **options)
        return out

    kernel = explain(*qkv, **options).to_dict()["kernel"]
    progress(f"{problem}: building or loading {kernel}")
    loaded_before = len(jit.build_log())
    out = ours()
    built = [x.seconds for x in jit.build_log()[loaded_before:] if x.how == "built"]
    progress(f"{problem}: verifying against SDPA in float64, then timing")
    exact = sdpa(*(x.double() for x in qkv))
    steps = [finished(step, out.device) for step in (ours, lambda: sdpa(*qkv))]
    times = alternate(steps, min_seconds=seconds)
    errors = [(x.double() - exact).abs().max().item() for x in (out, sdpa(*qkv))]
    return DemoResult(
        problem=problem,
        kernel=kernel,
        build_seconds=sum(built) if built else None,
        milliseconds=times.best(0) * 1e3,
        gflops=4 * pairs * _HDIM / times.best(0) / 1e9,
        sdpa_milliseconds=times.best(1) * 1e3,
        error=errors[0],
        sdpa_error=errors[1],
    )
