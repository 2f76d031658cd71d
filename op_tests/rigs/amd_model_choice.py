"""The amd-model suite's rows of the choice among families, for calls that several of them serve.

Drawn calls are timed by the cost model with the kernels of each family that serves them, and the
one that the call takes is compared with the quickest. Deterministic backward passes are not among
them: the model sees nothing of workgroups that wait for each other.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitfmha.bench.report import Progress, Report
from jitfmha.call.dispatch import Explanation
from jitfmha.call.interface import explain, explain_bwd, fmha_bwd, fmha_fwd
from jitfmha.emulator import DEVICES, emulate
from jitfmha.kernels.ready.key_split import LAUNCH_GAP_SECONDS

from .modelled_call import Kernels, aligned, estimate_of, take_only, torch_dtype

# No constant is fitted to drawn calls; those of this seed and its neighbours were looked at.
_SEED = 20261126
_CALLS, _QUICK_CALLS = 200, 12
_NEAR, _NEAR_SHARE, _WORST = 1.05, 95, 1.25
_FAMILIES: tuple[Kernels, ...] = ("ready", "compiled")
_HDIMS = {"bf16": ((64, 64), (128, 128), (192, 128)), "fp16": ((64, 64), (128, 128))}
_BACKWARD_HDIMS = (64, 128, 192)
# Elements of a tensor, and scores of all heads: more take long to emulate.
_MOST_ELEMENTS, _MOST_SCORES = 1 << 25, 1 << 34
# Workgroups that are run: so many that a tile which rows fill in part stands for no others, and of
# ragged sequences all.
_SAMPLE, _RAGGED_SAMPLE = 48, 1 << 16


@dataclass(frozen=True)
class DrawnCall:
    """A call; ``lengths`` of gm1 are those of each sequence, of gm0 one pair for all.

    Attributes:
        heads: batch, and heads of queries and of keys.
        lengths: of queries and keys.
    """

    chip: str
    dtype: str
    hdims: tuple[int, int]
    heads: tuple[int, int, int]
    lengths: tuple[tuple[int, int], ...]
    mode: str
    mask: int
    is_backward: bool = False

    def __str__(self) -> str:
        batch, heads_q, heads_k = self.heads
        lengths = "x".join(map(str, self.lengths[0]))
        if self.mode == "gm1":
            total_q, total_k = (sum(side) for side in zip(*self.lengths, strict=True))
            lengths = f"{total_q}x{total_k} packed"
        return (
            f"{'backward' if self.is_backward else 'forward'}, {self.chip} {self.dtype} "
            f"{self.hdims[0]}x{self.hdims[1]}, ({batch}, {heads_q}/{heads_k}, {lengths}), "
            f"{'causal' if self.mask else 'no mask'}"
        )

    def seconds(self) -> tuple[str, dict[str, float]]:
        """The family that the call takes, and the model's seconds of each that serves it."""
        tensors, options = self._tensors(), self._options()
        computed: Any = fmha_bwd if self.is_backward else fmha_fwd
        plan = self._explained().plan
        assert plan is not None
        seconds: dict[str, float] = {}
        sample = _RAGGED_SAMPLE if len(set(self.lengths)) > 1 else _SAMPLE
        for family in _FAMILIES:
            with emulate(self.chip, profile=True, sample=sample) as run:
                take_only(family)
                try:
                    computed(*tensors, **options)
                except NotImplementedError:
                    continue
                times = [estimate_of(profile).seconds for profile in run.profiles()]
            seconds[family] = sum(times) + (len(times) - 1) * LAUNCH_GAP_SECONDS
        return plan.family, seconds

    def estimated(self) -> dict[str, float]:
        """The seconds that dispatch estimates for each family, with the first of its plans."""
        seconds: dict[str, float] = {}
        for each in self._explained().estimates:
            if each.time.seconds is not None:
                seconds.setdefault(each.plan.family, each.time.seconds)
        return seconds

    def _explained(self) -> Explanation:
        explained: Any = explain_bwd if self.is_backward else explain
        with emulate(self.chip):
            take_only("own")
            explanation: Explanation = explained(*self._tensors(), **self._options())
        return explanation

    def _tensors(self) -> tuple[Tensor, ...]:
        """Those that the call has in order."""
        batch, heads_q, heads_k = self.heads
        dtype = torch_dtype(self.dtype, self.chip)
        rows: list[tuple[int, ...]] = [(batch, n) for n in self.lengths[0]]
        if self.mode == "gm1":
            rows = [(sum(side),) for side in zip(*self.lengths, strict=True)]
        q = aligned(dtype, *rows[0], heads_q, self.hdims[0]).fill_(1)
        k, v = (aligned(dtype, *rows[1], heads_k, hdim).fill_(1) for hdim in self.hdims)
        if not self.is_backward:
            return q, k, v
        out = aligned(dtype, *rows[0], heads_q, self.hdims[1]).fill_(1)
        lse = torch.full((*q.shape[:-3], heads_q, rows[0][-1]), 10.0)
        return out, q, k, v, out, lse

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"mask": self.mask}
        if self.mode == "gm1":
            for side, lengths in zip("qk", zip(*self.lengths, strict=True), strict=True):
                sums = torch.tensor([0, *lengths]).cumsum(0).int()
                options |= {f"cu_seqlens_{side}": sums, f"max_seqlen_{side}": max(lengths)}
        if self.is_backward:
            options["deterministic"] = False
        return options


def drawn_calls(seed: int, count: int) -> Iterator[DrawnCall]:
    """Prefill, decode, ragged batches and backward passes, of even and odd sizes."""
    draw = random.Random(seed)
    while count:
        call = _drawn(draw)
        batch, heads_q, heads_k = call.heads
        rows = [sum(side) for side in zip(*call.lengths, strict=True)]
        if call.mode == "gm0":
            rows = [n * batch for n in rows]
        elements = max(rows[0] * heads_q, rows[1] * heads_k) * max(call.hdims)
        scores = (
            sum(q * k for q, k in call.lengths) * heads_q * (batch if call.mode == "gm0" else 1)
        )
        if elements <= _MOST_ELEMENTS and scores <= _MOST_SCORES:
            count -= 1
            yield call


def _drawn(draw: random.Random) -> DrawnCall:
    chip = draw.choice(tuple(DEVICES))
    kind = draw.choice(("prefill", "decode", "ragged", "backward"))
    heads_k = draw.choice((1, 2, 4, 8, 16, 32))
    gqa = draw.choice((1, 1, 2, 4, 8, 16))
    batch = draw.choice((1, 1, 2, 4, 8, 16, 32, 64))
    mode, mask = draw.choice(("gm0", "gm1")), draw.choice((0, 2))
    heads = (batch, heads_k * gqa, heads_k)
    if kind == "backward":
        dtype, hdim = draw.choice(tuple(_HDIMS)), draw.choice(_BACKWARD_HDIMS)
        n = _length(draw, 64, 2048)
        pair = (n, n if draw.random() < 0.7 else _length(draw, 64, 2048))
        lengths = (pair,) * (batch if mode == "gm1" else 1)
        return DrawnCall(chip, dtype, (hdim, hdim), heads, lengths, mode, mask, is_backward=True)
    dtype, hdims = draw.choice(
        [*((dtype, hdims) for dtype in _HDIMS for hdims in _HDIMS[dtype]), ("fp8", (128, 128))]
    )
    if kind == "ragged":
        # Small ones, since all of them is run.
        heads_k, gqa = min(heads_k, 2), min(gqa, 8)
        heads = (min(batch, 8), heads_k * gqa, heads_k)
        is_decoding = draw.random() < 0.5
        pairs = []
        for _ in range(heads[0]):
            n_k = _length(draw, 16, 1024)
            pairs.append((1 if is_decoding else min(_length(draw, 1, 256), n_k), n_k))
        return DrawnCall(chip, dtype, hdims, heads, tuple(pairs), "gm1", mask)
    if kind == "decode":
        pair = (draw.choice((1, 1, 1, 2, 4, 8)), _length(draw, 64, 16384))
    else:
        n = _length(draw, 16, 4096)
        pair = (n, n if draw.random() < 0.7 else _length(draw, n, 4096))
    return DrawnCall(
        chip, dtype, hdims, heads, (pair,) * (batch if mode == "gm1" else 1), mode, mask
    )


def _length(draw: random.Random, least: int, most: int) -> int:
    """As likely in one octave as in another; half of them powers of two."""
    n = int(least * (most / least) ** draw.random())
    return 1 << n.bit_length() - 1 if draw.random() < 0.5 else n


def add_rows(report: Report, quick: bool, progress: Progress) -> None:
    """Model the drawn calls; ``quick`` takes fewer of them."""
    excesses = []
    for call in drawn_calls(_SEED, _QUICK_CALLS if quick else _CALLS):
        taken, seconds = call.seconds()
        if len(seconds) < 2:
            continue
        excess = seconds[taken] / min(seconds.values())
        excesses.append(excess)
        times = ", ".join(f"{name} {1e6 * each:.1f}" for name, each in seconds.items())
        progress(f"{call}: {taken} is taken, {times} us")
    near = 100 * sum(excess <= _NEAR for excess in excesses) / len(excesses)
    among = f"of {len(excesses)} drawn calls that several families serve"
    report.at_least(f"{among}: taken what is within 5 % of the quickest", near, _NEAR_SHARE, "%")
    report.at_most(f"{among}: time over the quickest's, the worst", max(excesses), _WORST, "x")
