"""Products on the CPU, by torch: oneDNN's and MKL's kernels, in what they are quick for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ..call.known_calls import Run
from ..problem.torch_parts import int8_product, multiplies_bf16
from .problem import FP8, Activation, MatmulArguments, Product

ACTIVATE: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


def cpu_product(arguments: MatmulArguments, product: Product) -> Run:
    """What computes calls with tensors of these layouts.

    A product in 16 bits is rounded before its scales and its activation. Numbers of 8 bits are
    multiplied as bfloat16, which holds them, where nothing follows and the result is bfloat16.
    """
    a, _, bias, _, _, activation, _ = arguments
    out_dtype, is_scaled = product.out_dtype, arguments.is_scaled
    follows = activation is not None or bias is not None or is_scaled
    is_linear, dtype = arguments.is_linear(out_dtype), out_dtype
    activate = None if activation is None else ACTIVATE[activation]
    if a.dtype == out_dtype and (is_linear or (bias is None and not is_scaled)):

        def run_plain(a: Tensor, b: Tensor, bias: Tensor | None, *_: None) -> Tensor:
            x = a @ b if bias is None else functional.linear(a, b.mT, bias)
            return x if activate is None else activate(x)

        return run_plain

    if a.dtype in FP8:
        is_rounded = out_dtype == torch.bfloat16 and not follows and multiplies_bf16()
        dtype = torch.bfloat16 if is_rounded else torch.float32
        is_linear = arguments.is_linear(dtype)

    def run(a: Tensor, b: Tensor, bias: Tensor | None, *scales: Tensor | None) -> Tensor:
        if a.dtype == torch.int8:
            x = _int8_product(a, b, product)
            x = x if out_dtype == torch.int32 else x.float()
        else:
            a, b = a.to(dtype), b.to(dtype)
            if is_linear:
                x, bias = functional.linear(a, b.mT, bias), None
            else:
                x = a @ b
        if is_scaled or bias is not None:
            x = x.float()
            for scale in scales:
                if scale is not None:
                    x.mul_(scale)
            if bias is not None:
                x.add_(bias)
        if activate is not None:
            x = activate(x)
        return x.to(out_dtype)

    return run


def _int8_product(a: Tensor, b: Tensor, product: Product) -> Tensor:
    batch, m, n, k, _ = product
    if m and n and k and a.dim() == b.dim() == 2:
        return int8_product(a, b)
    out = a.new_zeros(product.shape, dtype=torch.int32)
    if out.numel() and k:
        matrices = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
        for to, one, other in zip(out.view(-1, m, n), *matrices, strict=True):
            to.copy_(int8_product(one, other))
    return out
