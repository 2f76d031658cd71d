"""``matmul``: the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem.checks import requires_any_grad, with_clear_errors
from ..problem.torch_parts import is_any_autocast_enabled, is_watched
from .cpu import ACTIVATE
from .ops import EagerMatmul, operator, prepared_product
from .problem import Activation, MatmulArguments, product_of


@with_clear_errors
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Tensor:
    """``activation(scale_a * scale_b * (a @ b) + bias)``, with sums in float32 or int32.

    On the CPU a product in 16 bits is rounded before what follows it.

    Args:
        a, b: ``(..., m, k)`` and ``(..., k, n)`` of one dtype: float32, bfloat16, float16, int8,
            e4m3 or e5m2 in either form, and on the CPU int32. Strides are any; the dimensions
            before the last two are broadcast.
        out_dtype: of the result: by default that of a, bfloat16 for fp8, int32 for integers, and
            bfloat16 for int8 with an epilogue. Also float32 for all but int32, and float16 for
            8 bits.
        bias: ``(n,)`` in the result's dtype or float32, or what broadcasts to ``(..., 1, n)``.
        activation: "relu", "gelu" (by the error function) or "silu". Where gradients are wanted it
            follows the result, rounded.
        scale_a, scale_b: float32: one number, or of each row of a ``(..., m, 1)``, of each column
            of b ``(..., 1, n)``. They have no gradient.

    Returns:
        ``(..., m, n)``, contiguous.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call. Also for derivatives of 8-bit inputs, and
            those in forward mode.
        jitfmha.BuildError: the kernel could not be compiled on first use.
    """
    arguments = MatmulArguments(a, b, bias, scale_a, scale_b, activation, out_dtype)
    others = [each for each in arguments.epilogue() if each is not None]
    has_grad = torch.is_grad_enabled() and requires_any_grad(a, b, *others)
    if has_grad and activation is not None:
        product_of(arguments)
        arguments = arguments._replace(activation=None)
    if is_watched(a, b, b, *others) or is_any_autocast_enabled():
        out = operator.call(arguments)
    elif has_grad:
        out = EagerMatmul.apply(*arguments)
    else:
        out = prepared_product(arguments)(*arguments[:5])
    result: Tensor = ACTIVATE[activation](out) if has_grad and activation is not None else out
    return result
