"""Products on the CPU, by torch: oneDNN's and MKL's kernels, in what they are quick for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ..problem.torch_parts import int8_product, multiplies_bf16
from .problem import FP8, Activation, MatmulArguments, Product

ACTIVATE: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


def cpu_matmul(arguments: MatmulArguments, product: Product) -> Tensor:
    """The result of a call.

    A product in 16 bits is rounded before its scales and its activation. Numbers of 8 bits are
    multiplied as bfloat16, which holds them, where nothing follows and the result is bfloat16.
    """
    a, b, bias, scale_a, scale_b, activation, _ = arguments
    out_dtype = product.out_dtype
    if a.dtype == torch.int8:
        x = _int8_product(a, b, product)
        x = x if out_dtype == torch.int32 else x.float()
    elif a.dtype == torch.int32:
        return a @ b
    else:
        dtype = out_dtype
        if a.dtype in FP8:
            follows = activation or any(each is not None for each in arguments.epilogue)
            is_rounded = out_dtype == torch.bfloat16 and not follows and multiplies_bf16()
            dtype = torch.bfloat16 if is_rounded else torch.float32
        a, b = a.to(dtype), b.to(dtype)
        is_linear = b.dim() == 2 and scale_a is None and scale_b is None
        if is_linear and bias is not None and bias.dim() == 1 and bias.dtype == dtype:
            x, bias = functional.linear(a, b.mT, bias), None
        else:
            x = a @ b
    if scale_a is not None or scale_b is not None or bias is not None:
        x = x.float()
        for scale in (scale_a, scale_b):
            if scale is not None:
                x.mul_(scale)
        if bias is not None:
            x.add_(bias)
    if activation is not None:
        x = ACTIVATE[activation](x)
    return x.to(out_dtype)


def _int8_product(a: Tensor, b: Tensor, product: Product) -> Tensor:
    batch, m, n, k, _ = product
    if m and n and k and a.dim() == b.dim() == 2:
        return int8_product(a, b)
    out = torch.zeros(product.shape, dtype=torch.int32)
    if out.numel() and k:
        matrices = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
        for to, one, other in zip(out.view(-1, m, n), *matrices, strict=True):
            to.copy_(int8_product(one, other))
    return out
