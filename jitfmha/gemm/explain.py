"""``explain_matmul``: which kernel serves a product, without building or launching it."""

from __future__ import annotations

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
    problem = _in_words(arguments)
    try:
        product = product_of(arguments)
        if isinstance(target, AmdTarget):
            return _on_gpu(arguments, product, target, problem)
        known = CallExplanation.of_family(target, problem, "torch")
        return known._replace(kernels=(_torch_function(arguments, product),), source="PyTorch")
    except NotImplementedError as error:
        return CallExplanation.of_family(target, problem, "torch", error)


def _in_words(arguments: MatmulArguments) -> str:
    a, b, *_, activation, out_dtype = arguments
    dtypes = [str(x).removeprefix("torch.") for x in (a.dtype, out_dtype) if x is not None]
    names = ("bias", "scale_a", "scale_b")
    has = [name for name, x in zip(names, arguments.epilogue, strict=True) if x is not None]
    words = *has, *(() if activation is None else (activation,))
    shapes = f"{tuple(a.shape)} x {tuple(b.shape)}"
    return ", ".join(("matmul", shapes, " to ".join(dtypes), *words))


def _torch_function(arguments: MatmulArguments, product: Product) -> str:
    a, b, bias, scale_a, scale_b, *_ = arguments
    if a.dtype == torch.int8:
        return INT8_PRODUCT
    dtype = torch.float32 if a.dtype in FP8 else product.out_dtype
    is_linear = bias is not None and bias.dim() == 1 and b.dim() == 2 and bias.dtype == dtype
    is_scaled = scale_a is not None or scale_b is not None
    return "torch.nn.functional.linear" if is_linear and not is_scaled else "torch.matmul"


def _on_gpu(
    arguments: MatmulArguments, product: Product, target: AmdTarget, problem: str
) -> CallExplanation:
    kernel, work = planned_product(arguments, product, target)
    tile = kernel.tile
    size = product.batch.numel(), product.m, product.n, product.k
    remarks = [f"A workgroup has a tile of {tile.m} x {tile.n} results."]
    if work.sharing:
        shared = f"{work.sharing} workgroups share the steps of {work.shared} tiles"
        remarks.append(f"{shared}; {work.whole} tiles have one each.")
    template = "gemm_few_rows" if tile.ahead else "gemm"
    names = kernel.name, *((f"{kernel.name}_combine",) if work.sharing else ())
    return CallExplanation.of_family(target, problem, "torch")._replace(
        kernels=names,
        source=f"csrc_templates/amd/{template}.hip.in",
        specs=(kernel_spec(kernel),),
        seconds=work.seconds(tile, target, arguments.a.dtype, size),
        remarks=tuple(remarks),
    )
