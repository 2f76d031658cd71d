"""From the arguments of a product to what computes it, once slowly and from then on quickly."""

from __future__ import annotations

from torch import Tensor

from ..call.detection import target_of
from ..call.known_calls import Run, looked_up
from ..planning.target import AmdTarget
from .amd import amd_product
from .cpu import cpu_product
from .problem import MatmulArguments, product_of


def run_matmul(arguments: MatmulArguments) -> Tensor:
    """Make all checks, or find that they were made, and compute the product.

    Raises what ``product_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    *tensors, activation, out_dtype = arguments
    run = looked_up("gemm", (activation, out_dtype), tensors, _prepare, arguments)
    out: Tensor = run(*tensors)
    return out


def _prepare(arguments: MatmulArguments) -> Run:
    product = product_of(arguments)
    target = target_of(arguments.a.device)
    if isinstance(target, AmdTarget):
        return amd_product(arguments, product, target)
    return cpu_product(arguments, product)
