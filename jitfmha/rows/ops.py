"""The operators ``torch.ops.jitfmha.rows_fwd`` and ``rows_bwd``, and their derivatives.

They are what torch.compile, transforms and tensor subclasses see. A call of plain tensors goes past
them, with its gradient (:class:`EagerRows`). Nothing is registered for autocast: sums are float32
whatever the dtype, and weights may be float32 beside rows of 16 bits. No matrix is multiplied, so
that ``FlopCounterMode`` counts nothing, as it does of torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..problem.arguments import new_tuple
from ..problem.torch_parts import (
    implement,
    is_watched,
    operator_of_gradients,
    operator_with_gradient,
    register_derivative,
)
from .problem import RowArguments, RowBackwardArguments, RowGradients, traits_of
from .run import RowResults, run_rows, run_rows_backward

_library = torch.library.Library("jitfmha", "FRAGMENT")
_library.define(
    "rows_fwd(str kind, Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, "
    "ScalarType? out_dtype) -> (Tensor out, Tensor sum, Tensor scale)"
)
_library.define(
    "rows_bwd(str kind, Tensor dout, Tensor? dsum, Tensor x, Tensor? weight, Tensor? bias, "
    "float eps, bool wants_weight) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
_Three = tuple[Tensor, Tensor, Tensor]
_WHAT = "a softmax or norm"


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _or_none(x: Tensor, wanted: object) -> Tensor | None:
    return None if wanted is None or wanted is False else x


def call_operator(arguments: RowArguments) -> RowResults:
    """Go through torch's dispatcher."""
    traits = traits_of(arguments)
    out, total, scale = torch.ops.jitfmha.rows_fwd(*arguments)
    return out, _or_none(total, arguments.residual), _or_none(scale, traits.is_quantised)


def _rows_fwd(*given: Any) -> _Three:
    out, total, scale = run_rows(RowArguments(*given))
    return out, _or_empty(total, given[1]), _or_empty(scale, given[1])


def _rows_fwd_fake(*given: Any) -> _Three:
    _, x, residual, _, _, _, out_dtype = arguments = RowArguments(*given)
    traits = traits_of(arguments)
    total = None if residual is None else x.new_empty(x.shape)
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32) if traits.is_quantised else None
    out = x.new_empty(x.shape, dtype=out_dtype)
    return out, _or_empty(total, x), _or_empty(scale, x)


def _rows_bwd(*given: Any) -> _Three:
    dx, dweight, dbias = run_rows_backward(RowBackwardArguments(*given))
    return dx, _or_empty(dweight, dx), _or_empty(dbias, dx)


def _rows_bwd_fake(*given: Any) -> _Three:
    _, _, _, x, weight, bias, _, wants_weight = RowBackwardArguments(*given)
    dweight = torch.empty_like(weight) if weight is not None and wants_weight else None
    dbias = None if bias is None else torch.empty_like(bias)
    return x.new_empty(x.shape), _or_empty(dweight, x), _or_empty(dbias, x)


# ---- Derivatives ---------------------------------------------------------------------------------


def _refuse_missing_gradients(arguments: RowArguments) -> None:
    """Raise ``NotImplementedError`` where a result of 8 bits would need a gradient."""
    if traits_of(arguments).is_quantised:
        names = ("x", "residual", "weight", "bias")
        tensors = zip(names, arguments[1:5], strict=True)
        name = next(name for name, x in tensors if x is not None and x.requires_grad)
        raise NotImplementedError(
            f"{name} requires grad; results of out_dtype={arguments.out_dtype} have no gradient: "
            "call it under torch.no_grad()"
        )


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor | None]) -> None:
    kind, x, residual, weight, bias, eps, out_dtype = inputs
    if out_dtype is not None:
        _refuse_missing_gradients(RowArguments(*inputs))
    ctx.kind, ctx.eps = kind, eps
    # The bias is there for its dtype alone.
    ctx.has = weight is not None, bias is not None
    out, total, _ = output
    kept = out if kind == "softmax" else x if residual is None else total
    ctx.save_for_backward(kept, *[each for each in (weight, bias) if each is not None])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dsum: Tensor | None, _: Any) -> tuple[Any, ...]:
    kept, *weights = ctx.saved_tensors
    weight = weights[0] if ctx.has[0] else None
    bias = weights[-1] if ctx.has[1] else None
    needs = ctx.needs_input_grad
    if dout is None:
        dout = torch.zeros_like(kept)
    arguments = RowBackwardArguments(
        *(ctx.kind, dout, dsum, kept, weight, bias if needs[4] else None, ctx.eps, needs[3])
    )
    gradients = differentiate(arguments)
    dx = gradients.x
    return None, dx, dx if needs[2] else None, gradients.weight, gradients.bias, None, None


def differentiate(arguments: RowBackwardArguments) -> RowGradients:
    """The gradients, past torch's dispatcher where nobody has to know of the call."""
    _, dout, dsum, x, weight, bias, _, wants_weight = arguments
    given = [each for each in (dsum, weight, bias) if each is not None]
    needs_operator = torch.is_grad_enabled() or is_watched(dout, x, x, *given)
    if not needs_operator:
        return run_rows_backward(arguments)
    dx, dweight, dbias = torch.ops.jitfmha.rows_bwd(*arguments)
    has_weight = weight is not None and wants_weight
    return RowGradients(dx, _or_none(dweight, has_weight), _or_none(dbias, bias))


class EagerRows(torch.autograd.Function):
    """A call of plain tensors with its gradient, past torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        results = run_rows(new_tuple(RowArguments, given))
        _save(ctx, given, results)
        return results

    backward = staticmethod(_differentiate)


for _name, _function in (
    ("rows_fwd", operator_with_gradient("rows_fwd", _save, _differentiate)),
    ("rows_bwd", operator_of_gradients("rows_bwd", _WHAT)),
):
    register_derivative(_library, _name, _function, _WHAT)


# ---- vmap ----------------------------------------------------------------------------------------

_Mapped = tuple[_Three, tuple[int | None, ...]]


def _of_example(given: Sequence[Any], dims: Sequence[Any], i: int) -> list[Any]:
    pairs = zip(given, dims, strict=True)
    return [x if at is None else x.select(at, i) for x, at in pairs]


def _map(operator: Any, info: Any, dims: Sequence[Any], *given: Any) -> _Mapped:
    """One call with the examples before the rows, or one for each where weights differ, too.

    Also where gradients of weights are wanted, which a call adds up over all rows.
    """
    is_forward = operator is torch.ops.jitfmha.rows_fwd
    rows = (1, 2) if is_forward else (1, 2, 3)
    size = info.batch_size
    sums_up = not is_forward and (given[5] is not None or given[7])
    if sums_up or any(dims[at] is not None for at in (range(3, 5) if is_forward else (4, 5))):
        results = zip(*(operator(*_of_example(given, dims, i)) for i in range(size)), strict=True)
        return tuple(torch.stack(each) for each in results), (0, 0, 0)  # type: ignore[return-value]
    moved = list(given)
    for at in rows:
        if given[at] is not None:
            x, dim = given[at], dims[at]
            moved[at] = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    results = operator(*moved)
    # An empty result, which nobody asked for, has no examples.
    return results, tuple(None if each.dim() == 1 else 0 for each in results)


for _name, _kernel, _fake in (
    ("rows_fwd", _rows_fwd, _rows_fwd_fake),
    ("rows_bwd", _rows_bwd, _rows_bwd_fake),
):
    implement(_library, _name, _kernel, _fake)
    _rule = partial(_map, getattr(torch.ops.jitfmha, _name))
    torch.library.register_vmap(f"jitfmha::{_name}", _rule, lib=_library)
