"""What AITER's forward and backward functions make of their arguments alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from torch import Tensor

from ..call.interface import OFF
from ..layers.peer_values import as_dropout_p, as_int, as_softmax_scale, as_window_side, window_pair
from ..problem.problem import BF16_CVTS

if TYPE_CHECKING:
    from ..problem.arguments import Bf16Cvt


class CommonOptions(TypedDict):
    """What all functions give to ``fmha_fwd``."""

    softmax_scale: float | None
    mask: int
    window_size: tuple[int, int]
    sink_size: int
    dropout_p: float


def common_options(
    dropout_p: object, softmax_scale: object, is_causal: bool, window: tuple[int, int, int]
) -> CommonOptions:
    """What the arguments of every function come down to."""
    left, right, sink_size = window
    return {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if is_causal else 0,
        "window_size": (left, right),
        "sink_size": sink_size,
        "dropout_p": as_dropout_p(dropout_p) or OFF,
    }


def window_of_sides(left: object, right: object, sink_size: object = 0) -> tuple[int, int, int]:
    """``(left, right, sink_size)`` of three arguments; negative sides become -1."""
    return (
        as_window_side("window_size_left", left),
        as_window_side("window_size_right", right),
        as_int("sink_size", sink_size),
    )


def clipped(window_size: tuple[int, int], seqlen_k: int) -> tuple[int, int]:
    """A side that is as long as the longest keys is open in AITER, also where it would not be."""
    left, right = window_size
    return window_pair(-1 if left >= seqlen_k else left, -1 if right >= seqlen_k else right)


def as_v3_bf16_cvt(how_v3_bf16_cvt: object) -> Bf16Cvt:
    """The rounding that the number stands for."""
    number = as_int("how_v3_bf16_cvt", how_v3_bf16_cvt)
    if not 0 <= number < len(BF16_CVTS):
        raise ValueError(f"how_v3_bf16_cvt={how_v3_bf16_cvt!r} is not known; use 0, 1 or 2")
    return BF16_CVTS[number]


def bias_with_dimensions(bias: Tensor | None, dimensions: int) -> Tensor | None:
    """AITER's bias for all sequences and heads, as ``fmha_fwd`` takes it; others as they are."""
    if isinstance(bias, Tensor) and bias.dim() == 2:
        return bias[(None,) * (dimensions - 2)]
    return bias
