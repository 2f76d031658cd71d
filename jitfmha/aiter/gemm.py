"""AITER's matrix products of activations with weights ``(n, k)``, by :func:`jitfmha.matmul`.

Source: ``aiter/tuned_gemm.py`` and ``aiter/ops/gemm_op_a8w8.py`` of github.com/ROCm/aiter. Here
weights lie in their own order, and results have gradients where the inputs have 16 bits.
"""

# ruff: noqa: N803 - the names are AITER's.
from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.interface import matmul
from ..problem.checks import describe, not_a_tensor, refuse_given, with_clear_errors


def _transposed(name: str, weight: Tensor) -> Tensor:
    if not isinstance(weight, Tensor):
        raise not_a_tensor(name, weight)
    if getattr(weight, "is_shuffled", False):
        raise NotImplementedError(
            f"{name}.is_shuffled is True; weights are served as they are, without shuffle_weight"
        )
    if weight.dim() != 2:
        raise ValueError(f"{name} is {describe(weight)}; expected (n, k)")
    return weight.mT


def _spread(name: str, scale: Tensor | None, *shape: int) -> Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        raise not_a_tensor(name, scale)
    return scale if scale.numel() == 1 else scale.reshape(shape)


@with_clear_errors
def gemm_a16w16(
    A: Tensor,
    B: Tensor,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
) -> Tensor:
    """``A (..., k)`` times ``B (n, k)``, transposed; scales of rows have one number or one each.

    Raises ``NotImplementedError`` for ``scale_c`` and shuffled weights, and what
    :func:`jitfmha.matmul` does.
    """
    refuse_given(scale_c=scale_c)
    weight = _transposed("B", B)
    scales = _spread("scale_a", scale_a, -1, 1), _spread("scale_b", scale_b, 1, -1)
    return matmul(A, weight, bias=bias, out_dtype=otype, scale_a=scales[0], scale_b=scales[1])


@with_clear_errors
def gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
) -> Tensor:
    """``XQ (m, k)`` times ``WQ (n, k)``, transposed, in int8 or fp8.

    ``x_scale`` has one number or m, ``w_scale`` one or n. ``splitK`` has no effect: steps are split
    as the chip asks for. Raises as :func:`gemm_a16w16`.
    """
    weight = _transposed("WQ", WQ)
    scales = _spread("x_scale", x_scale, -1, 1), _spread("w_scale", w_scale, 1, -1)
    return matmul(XQ, weight, bias=bias, out_dtype=dtype, scale_a=scales[0], scale_b=scales[1])
