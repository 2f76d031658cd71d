"""``explain_matmul``: which kernel serves a product, without building or launching it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.detection import planned_target
from ..call.explained import CallExplanation
from ..planning.target import AmdTarget
from ..problem.checks import not_a_tensor
from ..problem.torch_parts import INT8_PRODUCT
from .amd import kernel_spec, planned_product
from .problem import FP8, Activation, MatmulArguments, Product, product_of


def explain_matmul(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    device: str | torch.device | None = None,
) -> CallExplanation:
    """What :func:`matmul` would do with the same arguments: target, kernel and reasons.

    With ``device`` it is asked for tensors there in place of ``a.device``; a GPU need not be here,
    as :func:`jitfmha.explain` has it. The tensors may be on ``meta``.

    Builds and launches nothing and does not read the tensors' data. Raises ``TypeError`` or
    ``ValueError`` as :func:`matmul` does; a call that nothing serves is not an error here.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
    target = planned_target(a.device if device is None else device)
    arguments = MatmulArguments(a, b, bias, scale_a, scale_b, activation, out_dtype)

    def plan() -> dict[str, Any]:
        product = product_of(arguments)
        if isinstance(target, AmdTarget):
            return _on_gpu(arguments, product, target)
        return {"kernels": (_torch_function(arguments, product),), "source": "PyTorch"}

    return CallExplanation.planned(target, _in_words(arguments), "torch", plan)


def _in_words(arguments: MatmulArguments) -> str:
    a, b, *_, activation, out_dtype = arguments
    dtypes = [str(x).removeprefix("torch.") for x in (a.dtype, out_dtype) if x is not None]
    names = ("bias", "scale_a", "scale_b")
    has = [name for name, x in zip(names, arguments.epilogue(), strict=True) if x is not None]
    words = *has, *(() if activation is None else (str(activation),))
    shapes = f"{tuple(a.shape)} x {tuple(b.shape)}"
    return ", ".join(("matmul", shapes, " to ".join(dtypes), *words))


def _torch_function(arguments: MatmulArguments, product: Product) -> str:
    if arguments.a.dtype == torch.int8:
        return INT8_PRODUCT
    dtype = torch.float32 if arguments.a.dtype in FP8 else product.out_dtype
    return "torch.nn.functional.linear" if arguments.is_linear(dtype) else "torch.matmul"


def _on_gpu(arguments: MatmulArguments, product: Product, target: AmdTarget) -> dict[str, Any]:
    kernel, work = planned_product(arguments, product, target)
    tile = kernel.tile
    size = product.batch.numel(), product.m, product.n, product.k
    remarks = [f"A workgroup has a tile of {tile.m} x {tile.n} results."]
    if work.sharing:
        shared = f"{work.sharing} workgroups share the steps of {work.shared} tiles"
        remarks.append(f"{shared}; {work.whole} tiles have one each.")
    return {
        "kernels": (kernel.name, *((kernel.combine_name,) if work.sharing else ())),
        "source": f"csrc_templates/amd/{kernel.template}.in",
        "specs": (kernel_spec(kernel),),
        "seconds": work.seconds(tile, target, arguments.a.dtype, size),
        "remarks": tuple(remarks),
    }
