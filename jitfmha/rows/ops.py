"""The operators ``torch.ops.jitfmha.rows_fwd`` and ``rows_bwd``, and their derivatives.

Nothing is registered for autocast: sums are float32 whatever the dtype, and weights may be float32
beside rows of 16 bits. No matrix is multiplied, so that ``FlopCounterMode`` counts nothing, as it
does of torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call.pytorch.operator import Operator
from .problem import RowArguments, RowBackwardArguments, traits_of
from .run import prepared_gradients, prepared_rows

_WHAT = "a softmax or norm"


def _rows_fwd_fake(arguments: RowArguments) -> list[Tensor]:
    x, residual, *_, out_dtype = arguments
    is_quantised = traits_of(arguments).is_quantised
    results = [x.new_empty(x.shape, dtype=out_dtype)]
    results += [] if residual is None else [x.new_empty(x.shape)]
    return results + ([x.new_empty(x.shape[:-1], dtype=torch.float32)] if is_quantised else [])


def _rows_bwd_fake(arguments: RowBackwardArguments) -> list[Tensor]:
    x, weights = arguments.x, (arguments.weight, arguments.bias)
    wanted = [each for each, has in zip(weights, arguments.has, strict=True) if has]
    return [x.new_empty(x.shape), *(torch.empty_like(each) for each in wanted if each is not None)]


# ---- vmap ----------------------------------------------------------------------------------------


def _map(
    name: str, rows: int, info: Any, dims: Sequence[Any], *given: Any
) -> tuple[list[Tensor], list[int]]:
    """One call with the examples before the rows, or one for each where weights differ, too.

    Also where gradients of weights are wanted, which a call adds up over all rows.
    """
    operator, size = getattr(torch.ops.jitfmha, name), info.batch_size
    sums_up = name == "rows_bwd" and any(RowBackwardArguments(*given).has)
    if sums_up or any(at is not None for at in dims[rows:]):
        results = [operator(*_of_example(given, dims, i)) for i in range(size)]
        stacked = [torch.stack(each) for each in zip(*results, strict=True)]
        return stacked, [0] * len(stacked)
    moved = list(given)
    for i, (x, dim) in enumerate(zip(given[:rows], dims[:rows], strict=True)):
        if x is not None:
            moved[i] = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    together: list[Tensor] = operator(*moved)
    return together, [0] * len(together)


def _of_example(given: Sequence[Any], dims: Sequence[Any], i: int) -> list[Any]:
    pairs = zip(given, dims, strict=True)
    return [x if at is None else x.select(at, i) for x, at in pairs]


rows_fwd = Operator(
    *("rows_fwd", RowArguments, "Tensor[]", prepared_rows, _rows_fwd_fake),
    vmap=partial(_map, "rows_fwd", 2),
    before=traits_of,
)
rows_bwd = Operator(
    *("rows_bwd", RowBackwardArguments, "Tensor[]", prepared_gradients, _rows_bwd_fake),
    vmap=partial(_map, "rows_bwd", 3),
)


# ---- Derivatives ---------------------------------------------------------------------------------


def _refuse_missing_gradients(arguments: RowArguments) -> None:
    """Raise ``NotImplementedError`` where a result of 8 bits would need a gradient."""
    if traits_of(arguments).is_quantised:
        tensors = zip(arguments._fields, arguments[:4], strict=False)
        name = next(name for name, x in tensors if x is not None and x.requires_grad)
        raise NotImplementedError(
            f"{name} requires grad; results of out_dtype={arguments.out_dtype} have no gradient: "
            "call it under torch.no_grad()"
        )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, residual, weight, bias, kind, eps, out_dtype = inputs
    if out_dtype is not None:
        _refuse_missing_gradients(RowArguments(*inputs))
    ctx.kind, ctx.eps = kind, eps
    # The bias is there for its dtype alone.
    ctx.has = weight is not None, bias is not None
    kept = output[0] if kind == "softmax" else x if residual is None else output[1]
    ctx.save_for_backward(kept, *[each for each in (weight, bias) if each is not None])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dsum: Tensor | None = None) -> tuple[Any, ...]:
    kept, *weights = ctx.saved_tensors
    weight = weights[0] if ctx.has[0] else None
    _, needs_residual, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    bias = weights[-1] if ctx.has[1] and needs_bias else None
    if dout is None:
        dout = torch.zeros_like(kept)
    arguments = RowBackwardArguments(
        *(dout, dsum, kept, weight, bias, ctx.kind, ctx.eps, needs_weight)
    )
    dx, *of_weights = rows_bwd.run(arguments, may_have_gradient=torch.is_grad_enabled())
    dbias = of_weights.pop() if needs_bias else None
    dweight = of_weights.pop() if needs_weight else None
    return dx, dx if needs_residual else None, dweight, dbias, None, None, None


EagerRows = rows_fwd.differentiated(_save, _differentiate, _WHAT)
rows_bwd.not_differentiated(_WHAT)
