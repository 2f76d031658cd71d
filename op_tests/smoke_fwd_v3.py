"""What smoke_test_fwd_v3.sh runs: the kernels that come ready, over AITER's shapes of them."""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from amd_problems import AmdProblem
from mha_calls import relative_error
from torch import Tensor

import jitfmha
from jitfmha.call.detection import target_of
from jitfmha.emulator.session import emulated_name, named_device
from jitfmha.planning.target import AmdTarget

_MOST = 3e-2  # of the largest value; a wrong kernel is far outside
_SEQLENS_Q = (127, 192, 301, 512, 1024)
_SEQLENS_K = (0, 129, 512, 700, 1023, 1058)
_CVTS = {"gfx942": ("rtne", "rtna", "rtz"), "gfx950": ("rtne",)}
_CVTS["gfx942-mi308"] = _CVTS["gfx942"]
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

    def __str__(self) -> str:
        lengths = f"-s={_joined(self.lengths_q)} -s_k={_joined(self.lengths_k)}"
        heads = f"-b={len(self.lengths_q)} -h={self.heads} -h_k={self.heads_k} -d={self.hdim}"
        rest = f"-iperm={self.iperm} -operm={self.operm} -mask={self.mask} -lse={self.lse}"
        return f"{heads} -d_v=128 {lengths} {rest} -mode={self.mode} -v3_bf16_cvt={self.cvt}"


def _joined(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, dict.fromkeys(lengths)))


def problems(arch: str) -> Iterator[Problem]:
    """All of an architecture or chip."""
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
    layouts = ("bshd", "bhsd")
    call = AmdProblem(
        rng,
        hdims=(problem.hdim, 128),
        heads=(problem.heads, problem.heads_k),
        lengths=list(zip(problem.lengths_q, problem.lengths_k, strict=True)),
        batch=None if problem.mode else len(problem.lengths_q),
        mask=problem.mask,
        softmax_scale=problem.hdim**-0.5,
        layout=layouts[problem.iperm],
        options={"bf16_cvt": problem.cvt, "return_lse": bool(problem.lse)},
        device=device,
    )
    call.layout = layouts[problem.operm]
    out = torch.full((*call.q.shape[:-1], 128), torch.nan, dtype=call.dtype, device=device)
    call.arguments["out"] = call.laid_out("out", out)
    if problem.mode:
        longest = {"max_seqlen_q": problem.lengths_q, "max_seqlen_k": problem.lengths_k}
        call.arguments |= {name: max(some) for name, some in longest.items()}
    explanation = jitfmha.explain(call.q, call.k, call.v, **call.arguments)
    actual = [_finite(x) for x in call.run() if x is not None]
    expected = [_finite(x) for x in call.exact()][: len(actual)]
    return str(explanation.to_dict()["kernel"]), relative_error(actual, expected)


def _finite(x: Tensor) -> Tensor:
    """Without the lse of rows that see no key; NaN, which nobody wrote, stays an error."""
    return x.double().nan_to_num(nan=1e9, neginf=0.0)


def _target(name: str) -> tuple[torch.device, AbstractContextManager[object]]:
    """A GPU of that architecture, or of that chip of it, or the emulator."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            target = target_of(device)
        except ValueError:
            continue  # another maker's
        if isinstance(target, AmdTarget):
            names = target.arch, emulated_name(target.chip.name, target.arch)
            if name in names:
                return device, nullcontext()
    return torch.device("cpu"), jitfmha.emulate(name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="smoke_test_fwd_v3.sh", description=__doc__)
    chips = "gfx942 or MI300X, gfx942-mi308 or MI308X, gfx950 or MI355X"
    parser.add_argument("-a", "--arch", required=True, type=_arch, help=chips)
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


def _arch(text: str) -> str:
    try:
        return named_device(text, "arch")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    """0 stands for all."""
    if text == "all":
        return 0
    if not text.isdecimal() or text == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 1 nor all")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
