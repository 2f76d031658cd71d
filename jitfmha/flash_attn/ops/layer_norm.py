"""flash-attn's layer_norm, by :func:`jitfmha.layer_norm`.

Source: ``flash_attn/ops/layer_norm.py`` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from torch import Tensor

from ...layers.peer_values import ends_in
from ...rows import interface as rows

__all__ = ["layer_norm"]


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    result = rows.layer_norm(x, weight, bias, eps=epsilon)
    assert isinstance(result, Tensor)
    return result


@ends_in(_layer_norm, eps="epsilon")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Over the last dimension, with gradients; arguments as in :func:`jitfmha.layer_norm`."""
