"""flash-attn's rms_norm, by :func:`jitfmha.rms_norm`.

Source: ``flash_attn/ops/rms_norm.py`` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from torch import Tensor

from ...layers.peer_values import ends_in
from ...rows import interface as rows

__all__ = ["rms_norm"]


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    result = rows.rms_norm(x, weight, eps=epsilon)
    assert isinstance(result, Tensor)
    return result


@ends_in(_rms_norm, eps="epsilon")
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension, with gradients; arguments as in :func:`jitfmha.rms_norm`."""
