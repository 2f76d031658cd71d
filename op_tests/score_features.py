"""Random modifiers of scores and dropout, for calls of any lengths.

Every feature is a function of a shape that gives the options of `fmha_fwd`. It is a choice among
the forms that the feature can have, drawn anew for each call.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitfmha.kernels.modifiers import ModifierTraits
from jitfmha.problem.score_features import AskedModifiers

NO_MODIFIERS = ModifierTraits("compiled")
ALL_MODIFIERS = ModifierTraits("compiled", AskedModifiers("fp32", True, 1, True, 1), dropout=True)
Options = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A call of gm0, or one of gm1 with all lengths packed and ``batch`` sequences."""

    batch: int
    heads_q: int
    seqlen_q: int
    seqlen_k: int  # in gm1 the longest one
    dtype: torch.dtype
    rng: torch.Generator
    is_group: bool = False

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def one_of(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.rng))

    def bias_shape(self) -> list[int]:
        """A shape that a bias may have: each dimension but the last may be 1."""
        batch = [] if self.is_group else [self.batch]
        full = [*batch, self.heads_q, self.seqlen_q]
        return [*[n if self.one_of(2) else 1 for n in full], self.seqlen_k]


def laid_out(shape: Shape, x: Tensor) -> Tensor:
    """The same values with other strides: as they are, keys far apart, or with room between."""
    form = shape.one_of(3)
    if form == 1:
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if form == 2:
        room = torch.full((*x.shape[:-1], x.shape[-1] + 3), x.dtype != torch.bool, dtype=x.dtype)
        room = room * torch.nan if x.dtype != torch.bool else room
        return room[..., : x.shape[-1]].copy_(x)
    return x.contiguous()


def bias(shape: Shape) -> Options:
    dtype = shape.dtype if shape.one_of(2) else torch.float32
    values = 2 * shape.randn(*shape.bias_shape())
    if shape.one_of(2):  # hidden keys, and rows that see none
        values[torch.rand(values.shape, generator=shape.rng) < 0.2] = -torch.inf
        values[..., :1, :] = -torch.inf
    return {"bias": laid_out(shape, values.to(dtype))}


def boolean_bias(shape: Shape) -> Options:
    takes_part = torch.rand(shape.bias_shape(), generator=shape.rng) < 0.6
    takes_part[..., :1, :] = False
    return {"bias": laid_out(shape, takes_part)}


def alibi(shape: Shape) -> Options:
    if shape.one_of(2):
        return {"alibi_slopes": torch.rand(shape.heads_q, generator=shape.rng)}
    slopes = torch.rand(shape.heads_q, shape.batch, generator=shape.rng).T
    return {"alibi_slopes": slopes}


def softcap(shape: Shape) -> Options:
    return {"logit_softcap": (0.5, 3.0, 30)[shape.one_of(3)]}


def capped_boolean_bias(shape: Shape) -> Options:
    """What is hidden stays hidden: a soft cap has finite scores."""
    return boolean_bias(shape) | softcap(shape)


def sink(shape: Shape) -> Options:
    sinks = 3 * shape.randn(shape.heads_q, 2)[:, 0]
    sinks[:1] = (0.0, -80.0, 80.0)[shape.one_of(3)]
    return {"sink": sinks}


def sink_tokens(shape: Shape) -> Options:
    windows = ["b:3,0", "b:40,2", "b:0,0", "b:150,-1"]
    mask = windows[shape.one_of(4)]
    if not shape.is_group and shape.one_of(2):
        mask = mask.replace("b", "t")
    return {"mask": mask, "sink_size": (1, 4, 130, 2**62)[shape.one_of(4)]}


def dropout(shape: Shape) -> Options:
    state = torch.randint(-(2**62), 2**62, (2,), generator=shape.rng)
    return {"dropout_p": (0.1, 0.5, 0.9)[shape.one_of(3)], "rng_state": state}


def everything(shape: Shape) -> Options:
    """All features in one call."""
    options: Options = {}
    for feature in (bias, alibi, softcap, sink, sink_tokens, dropout):
        options |= feature(shape)
    return options


FEATURES: dict[str, Callable[[Shape], Options]] = {
    feature.__name__: feature
    for feature in (
        *(bias, boolean_bias, alibi, softcap, capped_boolean_bias, sink, sink_tokens, dropout),
        everything,
    )
}


def options_of(features: Iterable[str], shape: Shape) -> Options:
    """Those of several features; of one that two of them set, the latter's."""
    options: Options = {}
    for feature in features:
        options |= FEATURES[feature](shape)
    return options
