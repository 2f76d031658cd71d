"""From the arguments of a product to what computes it."""

from __future__ import annotations

from torch import Tensor

from ..call.detection import target_of
from ..planning.target import AmdTarget
from .amd import amd_matmul
from .cpu import cpu_matmul
from .problem import MatmulArguments, product_of


def run_matmul(arguments: MatmulArguments) -> Tensor:
    """Make all checks and compute the product.

    Raises what ``product_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    product = product_of(arguments)
    target = target_of(arguments.a.device)
    if isinstance(target, AmdTarget):
        return amd_matmul(arguments, product, target)
    return cpu_matmul(arguments, product)
