"""The models suite: whole models with our attention and with SDPA, and what attention takes inside.

They are stacks of layers as torch's modules make them, in bf16 with random weights. Both sides are
one model: what attends is all that differs, and the layout of the caches of keys, in which each
side has the one that it likes best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from jitfmha.bench.report import Comparison, Progress, Report
from jitfmha.bench.timing import TOLERANCE, alternate, machine_here
from jitfmha.call.interface import fmha_fwd

_Side = Literal["jitfmha", "SDPA"]
_SIDES: tuple[_Side, _Side] = ("jitfmha", "SDPA")
_DTYPE = torch.bfloat16
_SEED = 20260101


class Layers(NamedTuple):
    """A kind of model: how many layers, and their sizes; ``is_decoder`` is Llama's layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    is_decoder: bool = False

    @property
    def hdim(self) -> int:
        return self.hidden // self.heads

    @property
    def weights(self) -> int:
        """In the products of matrices of all layers."""
        of_attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.hdim
        of_mlp = (3 if self.is_decoder else 2) * self.hidden * self.mlp
        return self.layers * (of_attention + of_mlp)


_BERT = Layers(12, 768, 12, 12, 3072)
_VIT = Layers(12, 384, 6, 6, 1536)
# Those of Llama-3.2-1B, of which four layers tell what sixteen would.
_LLAMA = Layers(4, 2048, 32, 8, 8192, is_decoder=True)


class Case(NamedTuple):
    """A step of a model: new tokens of each sequence, the last of ``keys``."""

    name: str
    sizes: Layers
    batch: int
    tokens: int
    keys: int
    bar: float

    @property
    def is_decoding(self) -> bool:
        return self.tokens != self.keys

    @property
    def flops(self) -> float:
        """Of products of matrices, with the pairs that the mask leaves."""
        sizes, pairs = self.sizes, self.tokens * self.keys
        if sizes.is_decoder and not self.is_decoding:
            pairs = self.tokens * (self.tokens + 1) // 2
        of_attention = 4.0 * sizes.layers * sizes.hidden * pairs
        return self.batch * (2.0 * sizes.weights * self.tokens + of_attention)


_CASES = (
    Case("BERT-base, 8 x 512 tokens", _BERT, 8, 512, 512, 1.0),
    Case("ViT-small, 197 tokens", _VIT, 1, 197, 197, 1.0),
    Case("ViT-small, 8 x 197 tokens", _VIT, 8, 197, 197, 1.0),
    Case("Llama, prefill of 2048", _LLAMA, 1, 2048, 2048, 1.0),
    Case("Llama, prefill of 8192", _LLAMA, 1, 8192, 8192, 1.25),
    Case("Llama, decode, 8192 keys", _LLAMA, 1, 1, 8192, 1.1),
    Case("Llama, decode, 8 x 8192 keys", _LLAMA, 8, 1, 8192, 1.1),
)
_QUICK_CASES = (
    Case("BERT-base, 128 tokens", _BERT._replace(layers=1), 1, 128, 128, 1.0),
    Case("Llama, prefill of 256", _LLAMA._replace(layers=1), 1, 256, 256, 1.0),
    Case("Llama, decode, 1024 keys", _LLAMA._replace(layers=1), 1, 1, 1024, 1.0),
)


def run(quick: bool, progress: Progress, threads: int | None = None) -> Report:
    """Measure with some threads, or with torch's; the bars are of 16 on a server."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    torch.manual_seed(_SEED)
    report = Report("models", machine_here())
    models: dict[Layers, Model] = {}
    try:
        with torch.no_grad():
            for case in _QUICK_CASES if quick else _CASES:
                if case.sizes not in models:
                    models = {case.sizes: Model(case.sizes).to(_DTYPE)}  # one at a time
                timed = time_model(case, models[case.sizes], report, 0.2 if quick else 5.0)
                report.comparisons.append(timed)
                report.at_least(f"{case.name}, speed over SDPA", timed.speedup, case.bar, "x")
                progress(f"{case.name}: {1e3 * timed.seconds:.2f} ms, {timed.speedup:.2f}x SDPA")
    finally:
        torch.set_num_threads(before)
    return report


def time_model(case: Case, model: Model, report: Report, seconds: float) -> Comparison:
    """Time the step of ``case`` with both sides for some seconds; the report gets what calls take.

    Raises ``RuntimeError`` where the results do not belong together.
    """
    x, rope, caches = inputs_of(case)
    error = _verified(case, partial(model, x, rope, caches["jitfmha"]))
    clocks = {side: _Clock(side) for side in _SIDES}
    steps = [partial(model, x, rope, caches[side], clocks[side]) for side in _SIDES]
    times = alternate(steps, min_seconds=seconds, min_rounds=5)
    for side, clock in clocks.items():
        alone = alternate([clock.again], min_seconds=seconds / 10).median(0)
        what = f"{case.name}: {side} in a layer"
        report.figure(what, 1e6 * median(clock.took), f"us, alone {1e6 * alone:.0f} us")
    return Comparison(
        what=case.name,
        against="SDPA",
        seconds=times.median(0),
        against_seconds=times.median(1),
        speedup=times.ratio(1, 0),
        gflops=case.flops / times.median(0) / 1e9,
        error=error,
    )


# ---- What attends --------------------------------------------------------------------------------

# Of q, k and v as (batch, seqlen, heads, hdim), and whether queries see no later keys.
_Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def _by_jitfmha(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return fmha_fwd(q, k, v, mask="causal" if is_causal else "none")


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    shares_keys = q.shape[2] != k.shape[2]
    out = scaled_dot_product_attention(qt, kt, vt, is_causal=is_causal, enable_gqa=shares_keys)
    return out.transpose(1, 2)


ATTEND: dict[_Side, _Attend] = {"jitfmha": _by_jitfmha, "SDPA": _by_sdpa}


class _Clock:
    """Attends, and keeps what each call took, as a model waits for it."""

    def __init__(self, side: _Side) -> None:
        self.attend = ATTEND[side]
        self.took: list[float] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        self.again = partial(self.attend, q, k, v, is_causal)
        start = time.perf_counter()
        out = self.again()
        self.took.append(time.perf_counter() - start)
        return out


def _verified(case: Case, step: Callable[[_Attend], Tensor]) -> float:
    """The largest difference of an attention within the model, as a share of the largest number.

    Raises ``RuntimeError`` where the results do not belong together.
    """
    errors = []

    def both(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        ours, theirs = (ATTEND[side](q, k, v, is_causal) for side in _SIDES)
        errors.append(float((ours - theirs).abs().max() / theirs.abs().max()))
        return ours

    step(both)
    if not max(errors) <= TOLERANCE[_DTYPE]:
        raise RuntimeError(f"{case.name}: the results differ from SDPA's by {max(errors)}")
    return max(errors)


# ---- Models --------------------------------------------------------------------------------------

Cache = tuple[Tensor, Tensor]  # keys and values of a layer, (batch, seqlen, heads, hdim)
_Caches = dict[_Side, list[Cache]]


class _Encoder(nn.Module):
    """A layer of BERT or ViT, with one projection for q, k and v; nothing is rotated or kept."""

    def __init__(self, sizes: Layers) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.hidden) for _ in range(2))
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.up = nn.Linear(sizes.hidden, sizes.mlp)
        self.down = nn.Linear(sizes.mlp, sizes.hidden)

    def forward(self, x: Tensor, rope: Tensor, cache: Cache | None, attend: _Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attend(q, k, v, False).flatten(2))
        result: Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return result


class _Decoder(nn.Module):
    """A layer of Llama; without a cache its tokens are all that there are."""

    def __init__(self, sizes: Layers) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.hdim = sizes.hdim
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden) for _ in range(2))
        self.q = linear(sizes.hidden, sizes.heads * sizes.hdim)
        self.k, self.v = (linear(sizes.hidden, sizes.kv_heads * sizes.hdim) for _ in range(2))
        self.out = linear(sizes.heads * sizes.hdim, sizes.hidden)
        self.gate, self.up = (linear(sizes.hidden, sizes.mlp) for _ in range(2))
        self.down = linear(sizes.mlp, sizes.hidden)

    def forward(self, x: Tensor, rope: Tensor, cache: Cache | None, attend: _Attend) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.hdim)) for project in (self.q, self.k, self.v)
        )
        q, k = _rotated(q, rope), _rotated(k, rope)
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, -new.shape[1] :] = new
            k, v = cache
        x = x + self.out(attend(q, k, v, cache is None).flatten(2))
        normed = self.norms[1](x)
        hidden = silu(self.gate(normed)) * self.up(normed)
        result: Tensor = x + self.down(hidden)
        return result


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotated by ``rope``, the cosines and the sines of the tokens, as models do it."""
    cosines, sines = rope
    left, right = x.chunk(2, -1)
    rotated: Tensor = x * cosines + torch.cat((-right, left), -1) * sines
    return rotated


class Model(nn.Module):
    """The layers, called with tokens ``(batch, seqlen, hidden)``, what rotates heads, the caches of
    all layers or none, and what attends; what comes of the tokens has their shape.
    """

    def __init__(self, sizes: Layers) -> None:
        super().__init__()
        layer = _Decoder if sizes.is_decoder else _Encoder
        self.layers = nn.ModuleList(layer(sizes) for _ in range(sizes.layers))

    def forward(self, x: Tensor, rope: Tensor, caches: list[Cache], attend: _Attend) -> Tensor:
        layers: list[Callable[..., Tensor]] = list(self.layers)
        of_layers: list[Cache | None] = [*caches] if caches else [None] * len(layers)
        for layer, cache in zip(layers, of_layers, strict=True):
            x = layer(x, rope, cache, attend)
        return x


def inputs_of(case: Case) -> tuple[Tensor, Tensor, _Caches]:
    """The tokens, what rotates them, and the caches, which there are in decoding."""
    sizes = case.sizes
    places = torch.arange(case.keys - case.tokens, case.keys)[:, None]
    angles = places / 500000 ** (torch.arange(0, sizes.hdim, 2) / sizes.hdim)
    doubled = torch.cat((angles, angles), -1)[:, None]
    rope = torch.stack((doubled.cos(), doubled.sin())).to(_DTYPE)
    x = torch.randn(case.batch, case.tokens, sizes.hidden).to(_DTYPE)
    caches: _Caches = {"jitfmha": [], "SDPA": []}
    shape = case.batch, case.keys, sizes.kv_heads, sizes.hdim
    for _ in range(sizes.layers if case.is_decoding else 0):
        k, v = (torch.randn(shape).to(_DTYPE) for _ in range(2))
        caches["jitfmha"].append((k, v))
        kt, vt = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (k, v))
        caches["SDPA"].append((kt, vt))
    return x, rope, caches
