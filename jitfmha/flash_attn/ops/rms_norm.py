"""flash-attn's rms_norm, by :func:`jitfmha.rms_norm`.

Source: ``flash_attn/ops/rms_norm.py`` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from torch import Tensor

from ...problem.checks import with_clear_errors
from ...rows.interface import rms_norm as _rms_norm

__all__ = ["rms_norm"]


@with_clear_errors
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension, with gradients; arguments as in :func:`jitfmha.rms_norm`."""
    result = _rms_norm(x, weight, eps=epsilon)
    assert isinstance(result, Tensor)
    return result
