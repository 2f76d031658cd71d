"""AITER's matrix products of activations with weights ``(n, k)``, by :func:`jitfmha.matmul`.

Source: ``aiter/tuned_gemm.py`` and ``aiter/ops/gemm_op_a8w8.py`` of github.com/ROCm/aiter. Here
weights lie in their own order, and results have gradients where the inputs have 16 bits.
"""

# ruff: noqa: N803 - the names are AITER's.
from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.interface import matmul
from ..layers.peer_values import ends_in
from ..problem.checks import check_layout, describe, not_a_tensor, refuse_given


def _transposed(name: str, weight: Tensor, name_of_x: str, x: Tensor) -> Tensor:
    for each, tensor in ((name_of_x, x), (name, weight)):
        if not isinstance(tensor, Tensor):
            raise not_a_tensor(each, tensor)
        check_layout(each, tensor)
    if getattr(weight, "is_shuffled", False):
        raise NotImplementedError(
            f"{name}.is_shuffled is True; weights are served as they are, without shuffle_weight"
        )
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name_of_x} is {describe(x)}, {name} is {describe(weight)}; expected (..., m, k) and "
            "(n, k)"
        )
    return weight.mT


def _spread(name: str, scale: Tensor | None, *shape: int) -> Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        raise not_a_tensor(name, scale)
    check_layout(name, scale)
    if scale.numel() == 1:
        return scale.reshape(1)
    count = torch.Size(shape).numel()
    if scale.numel() != count:
        raise ValueError(f"{name} is {describe(scale)}; expected one number or {count}")
    return scale.reshape(shape)


def _gemm_a16w16(
    A: Tensor,
    B: Tensor,
    bias: Tensor | None,
    otype: torch.dtype | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    scale_c: Tensor | None,
) -> Tensor:
    refuse_given(scale_c=scale_c)
    weight = _transposed("B", B, "A", A)
    scale_a = _spread("scale_a", scale_a, *A.shape[:-1], 1)
    scale_b = _spread("scale_b", scale_b, 1, len(B))
    return matmul(A, weight, bias=bias, out_dtype=otype, scale_a=scale_a, scale_b=scale_b)


def _gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    splitK: int | None,
) -> Tensor:
    weight = _transposed("WQ", WQ, "XQ", XQ)
    scale_a = _spread("x_scale", x_scale, *XQ.shape[:-1], 1)
    scale_b = _spread("w_scale", w_scale, 1, len(WQ))
    return matmul(XQ, weight, bias=bias, out_dtype=dtype, scale_a=scale_a, scale_b=scale_b)


@ends_in(_gemm_a16w16, a="A", b="B", out_dtype="otype")
def gemm_a16w16(
    A: Tensor,
    B: Tensor,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
) -> Tensor:
    """``A (..., m, k)`` times ``B (n, k)``, transposed; scales have one number or that of rows.

    Raises ``NotImplementedError`` for ``scale_c`` and shuffled weights, and what
    :func:`jitfmha.matmul` does.
    """


@ends_in(_gemm_a8w8, a="XQ", b="WQ", scale_a="x_scale", scale_b="w_scale", out_dtype="dtype")
def gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
) -> Tensor:
    """``XQ (..., m, k)`` times ``WQ (n, k)``, transposed, in int8 or fp8.

    ``x_scale`` has one number or that of the rows, ``w_scale`` one or n. ``splitK`` has no effect:
    steps are split as the chip asks for. Raises as :func:`gemm_a16w16`.
    """
