"""What test_mha.py and test_mha_varlen.py have in common: one call, checked and timed.

The options of both scripts are those of AITER's files of the same names.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from inputs import DTYPES
from torch import Tensor

from jitfmha.cli.output import progress, table

# Another vendor's GPU is none for these calls.
DEVICE = torch.device("cuda" if torch.version.hip and torch.cuda.is_available() else "cpu")
MHA_TYPES = ("mha", "gqa", "mqa")
BIAS_TYPES = ("no", "bias", "alibi")
PACKED = ("QKVPACKED", "KVPACKED")
"""Layouts in which tensors are views of one that holds several."""
PADDINGS = ("no_padding", "mixed", "q_only", "k_only")
_REPEATS = 5
_GQA_RATIOS = (1, 8)


@dataclass(frozen=True)
class Asked:
    """What a line of a script's table is about, beside the lengths.

    Attributes:
        mha_type: ``gqa`` has three key heads, or where these do not divide the query heads, as many
            as are nearest to them.
        local: with a window that is drawn.
        repeats: how often the call is timed.
        gqa_ratio: query heads of a key head, in place of ``mha_type``; 0: as that says.
        padding: which sides of packed sequences have unused rows between them.
    """

    dtype: str = "bf16"
    hdims: tuple[int, int] = (64, 64)
    mha_type: str = "mha"
    causal: bool = False
    local: bool = False
    deterministic: bool = False
    heads: int = 6
    layout: str = "BSHD"
    bias_type: str = "no"
    dropout_p: float = 0.0
    repeats: int = 0
    gqa_ratio: int = 0
    padding: str = PADDINGS[0]

    @property
    def heads_k(self) -> int:
        heads = self.heads
        if self.gqa_ratio:
            if heads % self.gqa_ratio:
                raise ValueError(f"{heads} query heads are no multiple of {self.gqa_ratio} (-gr)")
            return heads // self.gqa_ratio
        if self.mha_type == "gqa":
            return min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - 3))
        return heads if self.mha_type == "mha" else 1

    def packed_together(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same values as views of one tensor, as AITER's ``generate_qkv`` packs them.

        Heads of q, k and v lie one behind the other in a row, those of k and v alone in two.
        """
        if self.hdims[0] != self.hdims[1]:
            raise ValueError(f"{self.layout} needs equal head dimensions, got {self.hdims}")
        if self.layout == "KVPACKED":
            k, v = torch.stack((k, v), -3).unbind(-3)
            return q, k, v
        if q.shape[:-2] != k.shape[:-2]:
            raise ValueError(f"QKVPACKED needs equal lengths, got {q.shape} and {k.shape}")
        heads = [x.shape[-2] for x in (q, k, v)]
        q, k, v = torch.cat((q, k, v), -2).split(heads, -2)
        return q, k, v

    def mask(self, seqlen_k: int, rng: torch.Generator) -> dict[str, Any]:
        """The arguments of AITER's functions."""
        if not self.local:
            return {"causal": self.causal, "window_size": (-1, -1)}
        left, right = torch.randint(0, max(seqlen_k, 1), (2,), generator=rng).tolist()
        return {"causal": self.causal, "window_size": (left, right)}


@dataclass(frozen=True)
class Checked:
    """One line of a script's table.

    Attributes:
        call: in words.
        out_error, gradient_error: the largest difference to the float64 reference, relative to its
            largest value; the second of dq, dk and dv together.
        forward_ms, backward_ms: the best of some calls.
        tflops: of the forward pass, counting every pair of a query and a key.
    """

    call: str
    dtype: str
    out_error: float
    gradient_error: float
    forward_ms: float
    backward_ms: float
    tflops: float

    @property
    def holds(self) -> bool:
        """Within some roundings of the data type: a wrong kernel is far outside."""
        most = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 3e-2}[self.dtype]
        return self.out_error <= most and self.gradient_error <= 2 * most


def reference_mask(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for the reference."""
    mask = "causal" if arguments["causal"] else 0
    return {"mask": mask, "window_size": arguments["window_size"]}


def in_words(asked: Asked, mask: dict[str, Any]) -> str:
    """A call, as a table shows it."""
    left, right = mask["window_size"]
    parts = (
        f"{asked.dtype} {'x'.join(map(str, asked.hdims))}, {asked.heads}/{asked.heads_k} heads",
        "causal" if mask["causal"] else "",
        "" if (left, right) == (-1, -1) else f"window {left},{right}",
        "" if asked.bias_type == "no" else asked.bias_type,
        f"dropout {asked.dropout_p}" if asked.dropout_p else "",
        "deterministic" if asked.deterministic else "",
        "" if asked.padding == PADDINGS[0] else f"{asked.padding} padding",
    )
    return ", ".join(filter(None, parts))


def kept(randval: Tensor, dropout_p: float) -> Tensor:
    """Where AITER's rule keeps a probability."""
    return randval.float() <= math.floor(255.0 * (1 - dropout_p))


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor; NaN stays NaN."""
    errors = [0.0]
    for x, reference in zip(actual, expected, strict=True):
        assert x.shape == reference.shape
        if reference.numel():
            size = reference.abs().max().clamp(min=1e-3)
            errors.append(((x.detach().cpu().double() - reference).abs().max() / size).item())
    return torch.tensor(errors).max().item()


def best_ms(function: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest call; 0 for no repeats."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times, default=0.0)


def check(
    function: Callable[..., Any],
    reference: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    dout: Tensor,
    asked: Asked,
    *,
    mask: dict[str, Any],
    pairs: int,
    used: tuple[Tensor | slice, Tensor | slice] = (slice(None), slice(None)),
    **options: Tensor | int | None,
) -> Checked:
    """AITER's function, forward and backward, on tensors that are moved where calls run.

    ``reference(q, k, v, randval, **features)`` is in float64; ``pairs`` are those of a query and a
    key, of all sequences, which the flops count. ``used`` rows of queries and of keys are compared.
    """
    has_randval = asked.dropout_p > 0
    moved = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in options.items()}
    switches: dict[str, Any] = {"return_lse": True, "return_attn_probs": has_randval}
    switches |= {"dropout_p": asked.dropout_p, "deterministic": asked.deterministic}
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    dout_here = dout.to(DEVICE)

    def attend() -> Any:
        return function(*leaves, **moved, **mask, **switches)

    out, _, *randval = attend()
    gradients = torch.autograd.grad(out, leaves, dout_here, retain_graph=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, _ = reference(*exact, randval[0].cpu() if has_randval else None)
    expected_gradients = torch.autograd.grad(expected, exact, dout.double())
    with torch.no_grad():
        forward_ms = best_ms(attend, asked.repeats)
    backward_ms = best_ms(
        lambda: torch.autograd.grad(out, leaves, dout_here, retain_graph=True), asked.repeats
    )
    rows = (used[0], used[1], used[1])
    flops = 2 * asked.heads * pairs * sum(asked.hdims)
    return Checked(
        in_words(asked, mask),
        asked.dtype,
        relative_error(*([x.cpu()[rows[0]]] for x in (out, expected))),
        relative_error(
            *(
                [x.cpu()[of] for x, of in zip(each, rows, strict=True)]
                for each in (gradients, expected_gradients)
            )
        ),
        *(forward_ms, backward_ms, flops / forward_ms / 1e9 if forward_ms else 0.0),
    )


def add_shared_options(parser: argparse.ArgumentParser, widest: tuple[int, int]) -> None:
    """Those that both scripts spell alike; ``widest`` is the last one of the head dimensions."""
    hdims = [(each, each) for each in (32, 40, 64, 111, 128, 160)] + [widest]
    parser.add_argument(
        *("-d_qk_v", "--hdims"),
        type=pair,
        nargs="+",
        default=hdims,
        metavar="D,D_V",
        help="head dimensions of queries and of values (default: "
        f"{' '.join(f'{hdim},{hdim_v}' for hdim, hdim_v in hdims)})",
    )
    both = [False, True]
    for short, long, what in (
        ("-c", "--causal", "causal masks"),
        ("-l", "--local", "windows of a drawn size"),
        ("-det", "--deterministic", "the same bits in every run"),
    ):
        parser.add_argument(
            *(short, long),
            type=_boolean,
            nargs="*",
            default=both,
            help=f"{what}: true, false or both (default: both)",
        )
    parser.add_argument("-bt", "--bias_type", choices=BIAS_TYPES, default="no")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs (default: 0)")


def add_layout(parser: argparse.ArgumentParser, layouts: Sequence[str]) -> None:
    """That of the inputs in memory, the first by default."""
    named = f"of {', '.join(layouts)} (default: {layouts[0]})"
    parser.add_argument(
        *("-i", "--input_layout"),
        choices=layouts,
        default=layouts[0],
        metavar="LAYOUT",
        help=named,
    )


def add_lists(parser: argparse.ArgumentParser, mha_type: str, dtype: str) -> None:
    """The two whose short names differ."""
    shared = parser.add_mutually_exclusive_group()
    kinds = "which heads share keys, in place of --gqa_ratio"
    shared.add_argument(
        *(mha_type, "--mha_type"),
        nargs="+",
        choices=MHA_TYPES,
        metavar="TYPE",
        help=f"of {', '.join(MHA_TYPES)}: {kinds}",
    )
    ratio = "query heads of each key head (default: 1 8, or what of these divides all heads)"
    shared.add_argument("-gr", "--gqa_ratio", type=int, nargs="+", help=ratio)
    parser.add_argument(
        *(dtype, "--dtype"),
        nargs="+",
        choices=list(DTYPES),
        default=["bf16", "fp16"],
        metavar="DTYPE",
        help=f"of {', '.join(DTYPES)} (default: bf16 fp16)",
    )


def pair(text: str) -> tuple[int, int]:
    """Two numbers with a comma between, or one for both."""
    first, _, second = text.partition(",")
    return int(first), int(second or first)


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return values[text.lower()]


def run_all(args: argparse.Namespace, check_one: Callable[[Asked], Checked]) -> int:
    """Every combination of the lists, a line each; the exit code is 1 if an error is too large."""
    rows: list[Checked] = []
    shared = "mha_type" if args.mha_type else "gqa_ratio"
    args.gqa_ratio = args.gqa_ratio or [x for x in _GQA_RATIOS if args.nheads % x == 0]
    listed = ["dtype", "hdims", shared, "causal", "local", "deterministic"]
    listed += ["padding"] if hasattr(args, "padding") else []
    for combination in product(*(getattr(args, name) for name in listed)):
        asked = Asked(
            **dict(zip(listed, combination, strict=True)),
            heads=args.nheads,
            layout=args.input_layout,
            bias_type=args.bias_type,
            dropout_p=args.dropout_p,
            repeats=_REPEATS,
        )
        rows.append(check_one(asked))
        progress(f"{rows[-1].call}: {'right' if rows[-1].holds else 'WRONG'}")
    headers = ("call", "error", "of dqkv", "fwd ms", "bwd ms", "TFLOP/s", "holds")
    print(table(headers, [_cells(row) for row in rows]))
    return 0 if all(row.holds for row in rows) else 1


def _cells(row: Checked) -> list[str]:
    figures = (row.out_error, row.gradient_error, row.forward_ms, row.backward_ms, row.tflops)
    return [row.call, *(f"{x:.3g}" for x in figures), "yes" if row.holds else "NO"]
