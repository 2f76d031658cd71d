"""The operator ``torch.ops.jitfmha.matmul`` and its derivatives, which are products, too.

Autocast sees it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call.detection import target_of
from ..call.known_calls import Run, keeps_calls
from ..call.pytorch.autocast import dtype_of_region
from ..call.pytorch.flop_count import join_flop_counters
from ..call.pytorch.operator import Operator, library
from ..planning.target import AmdTarget
from ..problem.torch_parts import without_autocast
from .amd import amd_product
from .cpu import cpu_product
from .problem import FLOATS, MatmulArguments, product_of


@keeps_calls("gemm", 5)
def prepared_product(arguments: MatmulArguments) -> Run:
    """What computes the product, after all checks; or that of an earlier call.

    Raises what ``product_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    product = product_of(arguments)
    target = target_of(arguments.a.device)
    if isinstance(target, AmdTarget):
        return amd_product(arguments, product, target)
    return cpu_product(arguments, product)


def _check(arguments: MatmulArguments) -> None:
    product_of(_under_autocast(arguments))
    if not torch.compiler.is_compiling():
        join_flop_counters({torch.ops.jitfmha.matmul: _flops})


def _flops(a: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Two operations for each multiply-add; what follows the product does not count."""
    return 2 * out_val.numel() * a.shape[-1]


def _fake(arguments: MatmulArguments) -> Tensor:
    product = product_of(arguments)
    return arguments.a.new_empty(product.shape, dtype=product.out_dtype)


# ---- Derivatives ---------------------------------------------------------------------------------


def _save(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    a, b, *epilogue, activation, _ = inputs
    for name, x in zip(("scale_a", "scale_b"), epilogue[1:], strict=True):
        if x is not None and x.requires_grad:
            raise NotImplementedError(f"{name} requires grad; scales have no gradient")
    if a.dtype not in FLOATS:
        raise NotImplementedError(
            f"a tensor requires grad; products of {a.dtype} have no gradient: call matmul under "
            "torch.no_grad()"
        )
    if activation is not None:
        raise NotImplementedError(
            f"activation is {activation!r}; the operator has gradients without one: call "
            "jitfmha.matmul, or apply it to the result"
        )
    ctx.has = [each is not None for each in epilogue]
    ctx.save_for_backward(a, b, *[each for each in epilogue if each is not None])


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = operator.run(MatmulArguments(a, b), may_have_gradient=torch.is_grad_enabled())
    return out


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    a, b, *given = ctx.saved_tensors
    bias, *scales = (given.pop(0) if each else None for each in ctx.has)
    needs = ctx.needs_input_grad
    dbias = dout.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and needs[2] else None
    for scale in scales:
        if scale is not None:
            dout = dout * scale
    dout = dout.to(a.dtype)
    da = db = None
    if needs[0]:
        da = _multiplied(dout, b.mT).sum_to_size(a.shape)
    if needs[1] and b.dim() == 2:
        db = _multiplied(a.flatten(0, -2).mT, dout.flatten(0, -2))
    elif needs[1]:
        db = _multiplied(a.mT, dout).sum_to_size(b.shape)
    return da, db, dbias, None, None, None, None


# ---- Autocast and vmap ---------------------------------------------------------------------------


def _under_autocast(arguments: MatmulArguments) -> MatmulArguments:
    """As torch's own: matrices of 16 and 32 bits are cast to the region's dtype."""
    a, b, *_ = arguments
    dtype = dtype_of_region(a)
    if dtype is None or not all(isinstance(x, Tensor) and x.dtype in FLOATS for x in (a, b)):
        return arguments
    return arguments._replace(a=a.to(dtype), b=b.to(dtype))


def _at_autocast(device_type: str, *given: Any) -> Tensor:
    arguments = _under_autocast(MatmulArguments(*given))
    with without_autocast(device_type):
        out: Tensor = torch.ops.jitfmha.matmul.default(*arguments)
    return out


def _map(info: Any, dims: Sequence[Any], *given: Any) -> tuple[Tensor, int]:
    """One call with the examples as the first dimension of what differs between them."""
    rank = max(x.dim() - (at is not None) for x, at in zip(given[:2], dims[:2], strict=True))
    moved = list(given)
    for i, (x, at) in enumerate(zip(given[:5], dims[:5], strict=True)):
        if at is not None:
            first = x.movedim(at, 0)
            moved[i] = first.reshape(
                info.batch_size, *(1,) * (rank + 1 - x.dim()), *first.shape[1:]
            )
    if moved[0] is given[0] and moved[1] is given[1]:
        a = given[0]
        moved[0] = a.expand(info.batch_size, *(1,) * (rank - a.dim()), *a.shape)
    return torch.ops.jitfmha.matmul(*moved), 0


operator = Operator("matmul", MatmulArguments, "Tensor", prepared_product, _fake, _map, _check)
EagerMatmul = operator.differentiated(_save, _differentiate, "matmul")
for _device_type, _region in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    library.impl("matmul", partial(_at_autocast, _device_type), _region)
