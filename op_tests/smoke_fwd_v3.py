"""What smoke_test_fwd_v3.sh runs: the kernels that come ready, over AITER's shapes of them."""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from mha_calls import relative_error
from packed_calls import Sequences
from torch import Tensor

import jitfmha
from jitfmha.call.detection import target_of
from jitfmha.planning.target import AmdTarget
from jitfmha.problem.float64_reference import attention, attention_packed

_MOST = 3e-2  # of the largest value; a wrong kernel is far outside
_SEQLENS_Q = (127, 192, 301, 512, 1024)
_SEQLENS_K = (0, 129, 512, 700, 1023, 1058)
_CVTS = {"gfx942": ("rtne", "rtna", "rtz"), "gfx950": ("rtne",)}
_EMULATED_COUNT = 40


@dataclass(frozen=True)
class Problem:
    """One call, with the meaning that the options of AITER's benchmark have.

    Attributes:
        lengths_q, lengths_k: of each sequence; all equal where ``mode`` is 0.
        iperm, operm: 1: heads before rows in memory, of inputs and of the output.
        mode: 0: a batch (gm0); 1: packed sequences (gm1).
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int
    heads_k: int
    hdim: int
    mode: int
    iperm: int
    operm: int
    mask: int
    lse: int
    cvt: str

    @property
    def sequences(self) -> Sequences:
        return Sequences((self.lengths_q, self.lengths_k))

    def __str__(self) -> str:
        lengths = f"-s={_joined(self.lengths_q)} -s_k={_joined(self.lengths_k)}"
        heads = f"-b={len(self.lengths_q)} -h={self.heads} -h_k={self.heads_k} -d={self.hdim}"
        rest = f"-iperm={self.iperm} -operm={self.operm} -mask={self.mask} -lse={self.lse}"
        return f"{heads} -d_v=128 {lengths} {rest} -mode={self.mode} -v3_bf16_cvt={self.cvt}"


def _joined(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, dict.fromkeys(lengths)))


def problems(arch: str) -> Iterator[Problem]:
    """All of an architecture."""
    bits = (0, 1)
    lists = ((128, 192), bits, bits, bits, (0, 2), bits, _SEQLENS_Q, _SEQLENS_K, _CVTS[arch])
    for hdim, mode, iperm, operm, mask, lse, sq, sk, cvt in product(*lists):
        for batch, heads, heads_k in ((2, 4, 2), (1, 3, 1), (1, 1, 1)):
            rest = (heads, heads_k, hdim, mode, iperm, operm)
            lengths = ((sq,) * batch, (sk,) * batch)
            yield Problem(*lengths, *rest, mask, lse, cvt)
            if sq == sk and mode == 0 and mask == 0:
                yield Problem(*lengths, *rest, 1, lse, cvt)
        if mode == 1:
            yield Problem((sq, sk), (sk, 0), 4, 2, hdim, mode, iperm, operm, mask, lse, cvt)


def check(problem: Problem, rng: torch.Generator, device: torch.device) -> tuple[str, float]:
    """The kernel's name, and the largest error of out and lse."""
    heads = {"q": problem.heads, "k": problem.heads_k, "v": problem.heads_k}
    lengths = {"q": problem.lengths_q, "k": problem.lengths_k, "v": problem.lengths_k}
    hdims = {"q": problem.hdim, "k": problem.hdim, "v": 128}
    batch, is_packed = len(problem.lengths_q), problem.mode == 1
    qkv = []
    for name in "qkv":
        rows = (1, sum(lengths[name])) if is_packed else (batch, lengths[name][0])
        x = torch.randn(*rows, heads[name], hdims[name], generator=rng).bfloat16()
        x = _by_head(x) if problem.iperm else x
        qkv.append((x[0] if is_packed else x).to(device))
    q, k, v = qkv
    out = torch.full((*q.shape[:-1], 128), torch.nan, dtype=q.dtype)
    if problem.operm:
        out = _by_head(out[None])[0] if is_packed else _by_head(out)
    options: dict[str, Any] = {"mask": problem.mask, "bf16_cvt": problem.cvt}
    if is_packed:
        options |= {name: sums.to(device) for name, sums in problem.sequences.groups.items()}
        longest = {"max_seqlen_q": problem.lengths_q, "max_seqlen_k": problem.lengths_k}
        options |= {name: max(some) for name, some in longest.items()}
    kernel = str(jitfmha.explain(q, k, v, **options).to_dict()["kernel"])
    results = jitfmha.fmha_fwd(q, k, v, **options, out=out.to(device), return_lse=bool(problem.lse))
    actual = results if problem.lse else (results,)
    expected = _expected(problem, *(x.cpu() for x in (q, k, v)))[: len(actual)]
    return kernel, relative_error(
        [_finite(x.cpu()) for x in actual], [_finite(x) for x in expected]
    )


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _finite(x: Tensor) -> Tensor:
    """Without the lse of rows that see no key; NaN, which nobody wrote, stays an error."""
    return x.double().nan_to_num(nan=1e9, neginf=0.0)


def _expected(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if problem.mode == 0:
        return attention(q, k, v, mask=problem.mask)
    return attention_packed(q, k, v, *problem.sequences.spans, mask=problem.mask)


def _target(arch: str) -> tuple[torch.device, AbstractContextManager[object]]:
    """A GPU of that architecture, or the emulator."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            target = target_of(device)
        except ValueError:
            continue  # another maker's
        if isinstance(target, AmdTarget) and target.chip.arch == arch:
            return device, nullcontext()
    return torch.device("cpu"), jitfmha.emulate(arch)


def main() -> int:
    parser = argparse.ArgumentParser(prog="smoke_test_fwd_v3.sh", description=__doc__)
    parser.add_argument("-a", "--arch", required=True, choices=list(_CVTS))
    parser.add_argument("-n", "--count", type=_count, help="how many problems, or all")
    parser.add_argument("-s", "--seed", type=int, default=0, help="of the inputs (default: 0)")
    args = parser.parse_args()
    device, target = _target(args.arch)
    count = args.count
    if count is None:
        count = 0 if device.type == "cuda" else _EMULATED_COUNT
    chosen = list(problems(args.arch))
    if count:
        chosen = random.Random(args.seed).sample(chosen, min(count, len(chosen)))
    rng = torch.Generator().manual_seed(args.seed)
    wrong = 0
    with target:
        for number, problem in enumerate(chosen, 1):
            start = time.perf_counter()
            kernel, error = check(problem, rng, device)
            holds = error <= _MOST
            wrong += not holds
            seconds = time.perf_counter() - start
            verdict = "right" if holds else "WRONG"
            print(
                f"[{number}/{len(chosen)}] {problem}: {kernel}, error {error:.1e}, {verdict}, "
                f"{seconds:.1f} s",
                flush=True,
            )
    print(
        f"{len(chosen)} problems on {device if device.type == 'cuda' else 'the emulator'}: ", end=""
    )
    print(f"{wrong} wrong" if wrong else "all right")
    return 1 if wrong else 0


def _count(text: str) -> int:
    """0 stands for all."""
    if text == "all":
        return 0
    if not text.isdecimal() or text == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 1 nor all")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
