"""Times our attention beside that of every package that is here, in interleaved runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .peers import OURS, Peer
from .shapes import Shape
from .timing import TOLERANCE, alternate, finished

_SEED = 20260101
_LINE = 100  # characters of a refusal that are kept


@dataclass(frozen=True)
class Measurement:
    """One implementation on one shape.

    Attributes:
        shape, peer: what ran, and who ran it.
        seconds: of a call, the median; None where it did not run.
        quartiles: of the same, the 25th and the 75th percentile.
        difference: the largest absolute one to our result, relative to the largest value of it.
        refusal: why it did not run, or why its result is not taken; "" otherwise.
    """

    shape: Shape
    peer: str
    seconds: float | None = None
    quartiles: tuple[float, float] | None = None
    difference: float | None = None
    refusal: str = ""

    @property
    def gflops(self) -> float | None:
        """Billions of operations a second, counting only what the mask leaves."""
        return None if self.seconds is None else self.shape.flops / self.seconds / 1e9


def measure(
    shape: Shape, peers: Sequence[Peer], device: torch.device, *, seconds: float
) -> list[Measurement]:
    """Time the shape, ours first; ``seconds`` is for all peers together.

    A peer that refuses the shape, or whose result is not ours within rounding, is not timed; its
    measurement says why. Inputs are drawn from a fixed seed.

    Raises:
        NotImplementedError: we do not serve the shape.
    """
    steps: dict[str, Callable[[], object]] = {}
    others: dict[str, Measurement] = {}
    results: dict[str, tuple[Tensor, ...]] = {}
    for peer in (OURS, *peers):
        refusal = peer.why_not(shape)
        if refusal is None:
            try:
                step = _step(peer, shape, device)
                results[peer.name] = step()
                steps[peer.name] = finished(step, device)
            except Exception as error:
                if peer is OURS:
                    raise
                refusal = f"{type(error).__name__}: {error}"
        if refusal is not None:
            others[peer.name] = Measurement(shape, peer.name, refusal=_one_line(refusal))
    differences = {
        name: _difference(result, results[OURS.name]) for name, result in results.items()
    }
    for name, difference in differences.items():
        if not difference <= _tolerance(shape):
            steps.pop(name)
            others[name] = Measurement(
                *(shape, name),
                difference=difference,
                refusal=f"another result: {difference:.1e} apart",
            )
    results.clear()
    times = alternate(list(steps.values()), min_seconds=seconds, min_rounds=5)
    timed = {
        name: Measurement(shape, name, times.median(i), times.quartiles(i), differences[name])
        for i, name in enumerate(steps)
    }
    return [{**timed, **others}[peer.name] for peer in (OURS, *peers)]


def _tolerance(shape: Shape) -> float:
    """Gradients are sums of rounded products; only what is wrong is meant to be found here."""
    factor = 4 if shape.direction == "backward" else 1
    return factor * TOLERANCE[shape.torch_dtype]


def _step(peer: Peer, shape: Shape, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """What is timed: it returns its results in our layout."""
    generator = torch.Generator().manual_seed(_SEED)
    rows = {"q": shape.seqlen, "k": shape.seqlen_k, "v": shape.seqlen_k, "dout": shape.seqlen}
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "dout": shape.heads}
    hdims = {"q": shape.hdim, "k": shape.hdim, "v": shape.hdim_v, "dout": shape.hdim_v}
    tensors = []
    for name in rows:
        drawn = torch.randn(shape.batch, rows[name], heads[name], hdims[name], generator=generator)
        drawn = drawn.to(device, shape.torch_dtype)
        tensors.append(drawn.transpose(1, 2).contiguous() if peer.by_head else drawn)
    q, k, v, dout = tensors
    attend = peer.attend(shape)

    def ordered(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if peer.by_head else x

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (ordered(attend(q, k, v)),)

    if shape.direction == "forward":
        return forward
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v)

    def backward() -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        return tuple(map(ordered, gradients))

    return backward


def _difference(result: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> float:
    return max(
        ((x.float() - y.float()).abs().max() / y.float().abs().max().clamp(min=1)).item()
        for x, y in zip(result, ours, strict=True)
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE else f"{line[: _LINE - 3]}..."
