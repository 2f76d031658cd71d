"""flash-attn's layer_norm, by :func:`jitfmha.layer_norm`.

Source: ``flash_attn/ops/layer_norm.py`` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from torch import Tensor

from ...problem.checks import with_clear_errors
from ...rows.interface import layer_norm as _layer_norm

__all__ = ["layer_norm"]


@with_clear_errors
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Over the last dimension, with gradients; arguments as in :func:`jitfmha.layer_norm`."""
    result = _layer_norm(x, weight, bias, eps=epsilon)
    assert isinstance(result, Tensor)
    return result
