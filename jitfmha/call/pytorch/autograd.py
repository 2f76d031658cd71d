"""Derivatives of the operators, for torch.autograd.

The gradient of ``jitfmha::fmha_fwd`` is ``jitfmha::fmha_bwd``, which has none itself. What is saved
for it are the inputs, the output and the log-sum-exp, so that memory is linear in the sequence
lengths.

The dispatcher and these kernels in Python take hundreds of microseconds. So a call of plain
tensors goes past them: :func:`attend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...planning.target import CpuTarget
from ...problem.arguments import Arguments, CuSeqlens, new_tuple
from ...problem.checks import requires_any_grad, result_requires_grad
from ...problem.memory import write_values
from ...problem.problem import GradientStrides, Problem, make_problem
from ...problem.torch_parts import (
    apply_at_one_level,
    apply_where_asked,
    below_autograd,
    is_watched,
    operator_of_gradients,
    operator_with_gradient,
    plain_apply,
    refuse_tangents,
    register_autograd,
)
from ..backward import BackwardArguments, Results, make_backward_problem, run_backward
from ..detection import target_of
from ..dispatch import plan_for
from ..run import prepared_call, run_prepared
from .flop_count import join_flop_counters
from .ops import (
    BACKWARD_NAMES,
    NAMES,
    NAMES_WITH_OUT,
    arguments_of,
    call_backward_operator,
    library,
)

_RETURN_LSE = NAMES.index("return_lse")
_OPTIONS = BACKWARD_NAMES[BACKWARD_NAMES.index("dlse") + 1 : BACKWARD_NAMES.index("with_dbias")]
_is_grad_enabled = torch.is_grad_enabled
_HAVE_GRADIENTS = ("q", "k", "v", "bias", "sink")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # Tensors have to be saved as such: they may be replaced by hooks, and are watched for writes.
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.save_for_backward(*[inputs[i] for i in ctx.places], *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    given = list(ctx.others)
    for i, x in zip(ctx.places, tensors, strict=True):
        given[i] = x
    if not given[_RETURN_LSE]:
        # Nobody asked for it, and there was no kernel of ours to ask in their place.
        given[_RETURN_LSE] = True
        _, lse = torch.ops.jitfmha.fmha_fwd(*given)
    flat = dict(zip(NAMES, given, strict=False))
    options = [flat[name] for name in _OPTIONS if name in flat]
    needed = dict(zip(NAMES, ctx.needs_input_grad, strict=False))
    wanted = {f"with_d{name}": needed.get(name, False) for name in ("bias", "sink")}
    results = torch.ops.jitfmha.fmha_bwd(
        *(_given(dout, out), *given[:3], out, lse, dlse, *options),
        **wanted,
        deterministic=flat.get("deterministic"),
    )
    gradients = dict(zip(_HAVE_GRADIENTS, results, strict=True))
    return tuple(
        gradients[name] if name in gradients and is_needed else None
        for name, is_needed in needed.items()
    )


_Attention = operator_with_gradient("fmha_fwd", _save, _differentiate)


class _EagerAttention(torch.autograd.Function):
    """The operator with its gradient for plain tensors, past torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        arguments: Arguments,
        deterministic: bool | None,
    ) -> tuple[Tensor, Tensor]:
        prepared = prepared_call(arguments)
        if not prepared.has_gradients:
            _refuse_unserved_backward(arguments)
            prepared.has_gradients = True
        out, lse = run_prepared(prepared, arguments)
        assert lse is not None, "it is asked for"
        # In the order of `_save`: a checkpoint may compute again what that computed first.
        tensors = [q, k, v]
        ctx.rest = rest = list(arguments)
        rest[:3] = None, None, None
        ctx.nested = [i for i in _NESTED if rest[i] is not None]
        for i in ctx.nested:
            rest[i] = _without_tensors(rest[i], tensors)
        ctx.deterministic = deterministic
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, *tensors, out, lse = ctx.saved_tensors
        rest = ctx.rest.copy()
        rest[:3] = q, k, v
        rest[_RETURN_LSE_FIELD], rest[_OUT_FIELD] = False, out
        others = iter(tensors)
        for i in ctx.nested:
            rest[i] = _with_tensors(rest[i], others)
        needed = ctx.needs_input_grad
        choices = needed[3], needed[4], ctx.deterministic, None
        forward = new_tuple(Arguments, rest)
        given = forward, lse, _given(dout, out), dlse, None, None, None
        # Torch drops those of dq, dk and dv that nobody needs.
        return *differentiate(new_tuple(BackwardArguments, given + choices)), None, None


_attend = plain_apply(_EagerAttention)
_OUT_FIELD, _RETURN_LSE_FIELD = map(Arguments._fields.index, ("out", "return_lse"))
_NESTED = tuple(
    map(Arguments._fields.index, ("cu_seqlens", "descales", "modifiers", "dropout", "keys"))
)
_TENSOR = object()
_AS_PLAIN = object()


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """The value with marks where tensors were, which go to the list.

    Autograd keeps tensors in its own way: hooks may replace them, and writes are noticed.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, CuSeqlens):
        q, k, q_padded, k_padded, *lengths = value
        padded = _AS_PLAIN if q_padded is q else q_padded, _AS_PLAIN if k_padded is k else k_padded
        value = CuSeqlens._make((q, k, *padded, *lengths))
    if hasattr(value, "_fields"):
        return value._make([_without_tensors(x, tensors) for x in value])
    return value


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Put tensors back into a value from which they were taken."""
    if value is _TENSOR:
        return next(tensors)
    if not hasattr(value, "_fields"):
        return value
    value = value._make([_with_tensors(x, tensors) for x in value])
    if isinstance(value, CuSeqlens):
        q_padded = value.q if value.q_padded is _AS_PLAIN else value.q_padded
        k_padded = value.k if value.k_padded is _AS_PLAIN else value.k_padded
        return value._replace(q_padded=q_padded, k_padded=k_padded)
    return value


def attend(arguments: Arguments, deterministic: bool | None) -> tuple[Tensor, Tensor]:
    """The output and the lse with their gradients, of a call that nobody but autograd watches.

    ``deterministic`` is that of :func:`jitfmha.fmha_bwd`.

    Raises ``NotImplementedError`` where a gradient is asked for that there is not.
    """
    q, k, v, _, _, _, return_lse, out, _, _, descales, modifiers, _, keys = arguments
    if out is not None or not isinstance(return_lse, bool):
        make_problem(arguments)
        raise result_requires_grad(next(iter((*_names_that_require_grad(arguments), "out"))))
    if descales is not None or modifiers is not None or keys is not None:
        _refuse_missing_gradients(arguments)
    if not return_lse:
        before, behind = arguments[:_RETURN_LSE_FIELD], arguments[_RETURN_LSE_FIELD + 1 :]
        arguments = new_tuple(Arguments, (*before, True, *behind))
    bias, sink = (None, None) if modifiers is None else (modifiers.bias, modifiers.sink)
    results: tuple[Tensor, Tensor] = _attend(q, k, v, bias, sink, arguments, deterministic)
    return results


def differentiate(arguments: BackwardArguments) -> Results:
    """The gradients, past torch's dispatcher where nobody has to know of the call.

    With dbias and dsink where they are wanted; through the dispatcher those are not written to
    tensors that are given, but new.
    """
    forward, lse, dout, dlse = arguments[:4]
    (q, k, v), out = forward[:3], forward.out
    if not (
        is_watched(dout, q, k, v, out, lse)
        or (dlse is not None and is_watched(dlse, dout, lse))
        or forward.has_special_options()
        or (
            _is_grad_enabled()
            and requires_any_grad(dout, q, k, v, out, lse, dlse, *(forward.modifiers or ()))
        )
    ):
        return run_backward(arguments)
    if not torch.compiler.is_compiling():
        join_flop_counters()
        make_backward_problem(arguments)
    dq, dk, dv, dbias, dsink = call_backward_operator(arguments)
    given = arguments.dq, arguments.dk, arguments.dv
    if any(x is not None for x in given):
        dq, dk, dv = map(_in_given, (dq, dk, dv), given, arguments.used_rows())
    wanted = arguments.with_dbias, arguments.with_dsink
    return Results(dq, dk, dv, dbias if wanted[0] else None, dsink if wanted[1] else None)


def _in_given(new: Tensor, given: Tensor | None, used: Tensor | None) -> Tensor:
    """A gradient in the tensor that is given for it, of which unused rows stay as they are."""
    if given is None:
        return new
    write_values(given, new, used)
    return given


_AttentionBackward = operator_of_gradients("fmha_bwd", "attention")


def _given(dout: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of ``out`` as backward takes it."""
    if dout is None:
        return torch.zeros_like(out)
    if dout.shape[-1] > 1 and dout.stride(-1) != 1:
        # The gradient of a sum is one number, expanded, also where there is none.
        return dout.clone(memory_format=torch.contiguous_format)
    return dout


def _fmha_fwd(*given: Any) -> tuple[Tensor, Tensor]:
    join_flop_counters()
    refuse_tangents(_tensors(NAMES, given), "attention has")
    if not _is_gradient_asked_for(given):
        results: tuple[Tensor, Tensor] = _Attention.forward(*given)
        return results
    arguments = arguments_of(NAMES, given)
    _refuse_missing_gradients(arguments)
    if type(given[0]) is Tensor and not given[0].is_meta:
        # Of a tensor without values the target may be another machine's.
        _refuse_unserved_backward(arguments)
    with_lse = given[_RETURN_LSE]
    forced = (*given[:_RETURN_LSE], True, *given[_RETURN_LSE + 1 :])
    out, lse = apply_at_one_level(_Attention, forced)
    return out, lse if with_lse else out.new_empty(0, dtype=torch.float32)


def _fmha_fwd_out(*given: Any) -> Tensor:
    join_flop_counters()
    refuse_tangents(_tensors(NAMES_WITH_OUT, given), "attention has")
    if _is_gradient_asked_for(given):
        name = next(name for name, x in _tensors(NAMES_WITH_OUT, given) if x.requires_grad)
        raise result_requires_grad(name)
    with below_autograd():
        lse: Tensor = torch.ops.jitfmha.fmha_fwd_out.default(*given)
    return lse


def _fmha_bwd(*given: Any) -> tuple[Tensor, ...]:
    join_flop_counters()
    refuse_tangents(_tensors(BACKWARD_NAMES, given), "attention has")
    results: tuple[Tensor, ...] = apply_where_asked(_AttentionBackward, given)
    return results


def _tensors(names: tuple[str, ...], given: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, x in zip(names, given, strict=False):
        if isinstance(x, Tensor):
            yield name, x


def _is_gradient_asked_for(given: tuple[Any, ...]) -> bool:
    return _is_grad_enabled() and requires_any_grad(*given)


def _names_that_require_grad(arguments: Arguments) -> list[str]:
    """Name the tensors that require grad, but for ``out``."""
    named = [("q", arguments.q), ("k", arguments.k), ("v", arguments.v)]
    if arguments.descales is not None:
        named += [(f"{name}_descale", x) for name, x in arguments.descales._asdict().items()]
    if arguments.modifiers is not None:
        named += arguments.modifiers._asdict().items()
    return [name for name, x in named if isinstance(x, Tensor) and x.requires_grad]


def _refuse_missing_gradients(arguments: Arguments) -> None:
    are_paged = arguments.keys is not None and arguments.keys.block_table is not None
    for name in _names_that_require_grad(arguments):
        if are_paged:
            raise NotImplementedError(
                f"{name} requires grad; attention over keys and values in pages (block_table) has "
                "no backward pass"
            )
        if name not in _HAVE_GRADIENTS:
            raise NotImplementedError(
                f"{name} requires grad, and its gradient is not implemented yet; detach it"
            )


def _refuse_unserved_backward(arguments: Arguments) -> None:
    """Raise ``NotImplementedError`` where nothing serves backward: before forward, not after it."""
    target = target_of(arguments.q.device)
    if isinstance(target, CpuTarget) and arguments.k.dtype.itemsize > 1:
        return  # Which serves it wherever it serves forward.
    plan_for(backward_of(make_problem(arguments)), target)


def backward_of(problem: Problem) -> Problem:
    """The backward pass of a call, whose gradients lie as its inputs and its output do."""
    sizes = problem.sizes
    strides = GradientStrides(sizes.out, (), None, sizes.q, sizes.k, sizes.v)
    return problem._replace(gradients=strides)


for _name, _kernel, _function in (
    ("fmha_fwd", _fmha_fwd, _Attention),
    ("fmha_fwd_out", _fmha_fwd_out, None),
    ("fmha_bwd", _fmha_bwd, _AttentionBackward),
):
    register_autograd(library, _name, _kernel, _function)
