"""What a matrix product asks for: its arguments, their checks, and what its kernel is made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..problem.checks import check_all_beside, not_a_tensor
from ..problem.dtypes import BF8_NAMES, FP8_NAMES

Activation = Literal["relu", "gelu", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
FLOATS = torch.float32, torch.bfloat16, torch.float16
FP8 = (*FP8_NAMES, *BF8_NAMES)
OUT_DTYPES: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    **{dtype: tuple(dict.fromkeys((dtype, torch.float32))) for dtype in FLOATS},
    **dict.fromkeys(FP8, (torch.bfloat16, torch.float16, torch.float32)),
    torch.int8: (torch.int32, torch.bfloat16, torch.float16, torch.float32),
    torch.int32: (torch.int32,),
}
"""What results may have for inputs of a dtype; the first is the default."""


class MatmulArguments(NamedTuple):
    """The arguments of one call; what it does without is None."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    activation: Activation | None = None
    out_dtype: torch.dtype | None = None

    # No property: in torch 2.10 compiled code has none of a named tuple.
    def epilogue(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.bias, self.scale_a, self.scale_b

    @property
    def is_scaled(self) -> bool:
        return self.scale_a is not None or self.scale_b is not None

    def is_linear(self, dtype: torch.dtype) -> bool:
        """Whether torch's ``linear`` in this dtype is the product with its bias."""
        bias = self.bias
        has_vector = bias is not None and bias.dtype == dtype and bias.dim() == 1
        return has_vector and self.b.dim() == 2 and not self.is_scaled


class Product(NamedTuple):
    """A call after all checks: (m, k) by (k, n) for each of ``batch``."""

    batch: torch.Size
    m: int
    n: int
    k: int
    out_dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, self.m, self.n)


def product_of(arguments: MatmulArguments) -> Product:
    """The product of a call, after all checks.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call.
    """
    a, b, bias, scale_a, scale_b, activation, _ = arguments
    names = ("a", "b", "bias", "scale_a", "scale_b")
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
    check_all_beside(zip(names, arguments[:5], strict=True))
    if a.dtype not in OUT_DTYPES:
        raise NotImplementedError(
            f"a has dtype {a.dtype}; products are served of {', '.join(map(str, OUT_DTYPES))}"
        )
    if b.dtype != a.dtype:
        raise ValueError(f"b has dtype {b.dtype}, a has {a.dtype}; both must agree")
    for name, each in (("a", a), ("b", b)):
        if each.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(each.shape)}; a matrix has two dimensions")
    (*batch_a, m, k), (*batch_b, k_of_b, n) = a.shape, b.shape
    if k != k_of_b:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; a must have as many columns as "
            f"b has rows, {k} is not {k_of_b}"
        )
    try:
        batch = torch.broadcast_shapes(batch_a, batch_b)
    except RuntimeError as error:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; their dimensions before the "
            "last two must be the same, or 1"
        ) from error
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; choose None or one of {', '.join(ACTIVATIONS)}"
        )
    out_dtype = _out_dtype_of(arguments)
    _check_epilogue(arguments, {"bias": (1, n), "scale_a": (m, 1), "scale_b": (1, n)}, batch)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None and scale.dtype != torch.float32:
            raise ValueError(f"{name} has dtype {scale.dtype}; scales are float32")
    if bias is not None and bias.dtype not in (out_dtype, torch.float32):
        raise ValueError(
            f"bias has dtype {bias.dtype}; it must be {out_dtype} as the result, or float32"
        )
    return Product(batch, m, n, k, out_dtype)


def _out_dtype_of(arguments: MatmulArguments) -> torch.dtype:
    a, out_dtype = arguments.a, arguments.out_dtype
    served = OUT_DTYPES[a.dtype]
    follows = any(each is not None for each in (*arguments.epilogue(), arguments.activation))
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype == torch.int8 and follows else served[0]
    if out_dtype not in served:
        raise NotImplementedError(
            f"out_dtype is {out_dtype}; a product of {a.dtype} gives {', '.join(map(str, served))}"
        )
    if out_dtype == torch.int32 and follows:
        raise NotImplementedError(
            f"out_dtype is {out_dtype}; integers come as they are, without bias, scale_a, scale_b "
            "and activation"
        )
    return out_dtype


def _check_epilogue(
    arguments: MatmulArguments, shapes: Mapping[str, tuple[int, int]], batch: torch.Size
) -> None:
    for name, tensor in zip(shapes, arguments.epilogue(), strict=True):
        if tensor is None:
            continue
        most = (*batch, *shapes[name])
        given = tensor.shape
        fits = len(given) <= len(most) and all(
            x in (1, y) for x, y in zip(reversed(given), reversed(most), strict=False)
        )
        if not fits:
            raise ValueError(
                f"{name} has shape {tuple(given)}; it must have {most}, or fewer dimensions or "
                "ones in their place"
            )
