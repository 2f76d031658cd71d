"""What AITER's forward and backward functions make of their arguments alike."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ..call.interface import OFF
from ..layers.peer_values import (
    as_dropout_p,
    as_flag,
    as_int,
    as_sink,
    as_softcap,
    as_softmax_scale,
    as_window_side,
    window_pair,
)
from ..problem.arguments import AttentionOptions
from ..problem.problem import BF16_CVTS


def common_options(
    *,
    longest_keys: int,
    bias_dimensions: int,
    dropout_p: object,
    softmax_scale: object,
    is_causal: object,
    window_size_left: object,
    window_size_right: object,
    sink_size: object = 0,
    logits_soft_cap: object = 0.0,
    how_v3_bf16_cvt: object = 0,
    bias: Tensor | None = None,
    sink_ptr: Tensor | None = None,
    **others: Any,
) -> AttentionOptions:
    """The options of ``fmha_fwd`` for AITER's arguments; ``others`` have the same names in both."""
    left = as_window_side("window_size_left", window_size_left)
    right = as_window_side("window_size_right", window_size_right)
    # A side that is as long as the longest keys is open in AITER, also where it would not be.
    window = window_pair(*(-1 if side >= longest_keys else side for side in (left, right)))
    rounding = as_int("how_v3_bf16_cvt", how_v3_bf16_cvt)
    if not 0 <= rounding < len(BF16_CVTS):
        raise ValueError(f"how_v3_bf16_cvt={how_v3_bf16_cvt!r} is not known; use 0, 1 or 2")
    options = {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if as_flag("is_causal", is_causal) else 0,
        "window_size": window,
        "sink_size": as_int("sink_size", sink_size),
        "dropout_p": as_dropout_p(dropout_p) or OFF,
        "logit_softcap": as_softcap("logits_soft_cap", logits_soft_cap) or OFF,
        "bf16_cvt": BF16_CVTS[rounding],
        "bias": bias_with_dimensions(bias, bias_dimensions),
        "sink": as_sink(sink_ptr),
        **others,
    }
    return cast("AttentionOptions", options)


def bias_with_dimensions(bias: Tensor | None, dimensions: int) -> Tensor | None:
    """AITER's bias for all sequences and heads, as ``fmha_fwd`` takes it; others as they are."""
    if isinstance(bias, Tensor) and bias.dim() == 2:
        return bias[(None,) * (dimensions - 2)]
    return bias


def length_of(keys: Tensor) -> int:
    """How many keys each sequence of a batch has; what is no such tensor is refused later."""
    return keys.shape[1] if isinstance(keys, Tensor) and keys.dim() > 1 else 0
