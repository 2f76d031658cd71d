"""Derivatives of the operators, for torch.autograd.

The gradient of ``jitfmha::fmha_fwd`` is ``jitfmha::fmha_bwd``, which has none itself. What is saved
for it are the inputs, the output and the log-sum-exp, so that memory is linear in the sequence
lengths.

The dispatcher and these kernels in Python take hundreds of microseconds. So a call of plain
tensors like one that was there before goes past them: :func:`attend_again`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ...planning.target import CALLS_HERE, TARGET_HERE, CpuTarget
from ...problem.arguments import Arguments
from ...problem.checks import result_requires_grad
from ...problem.problem import GradientStrides, Problem, make_problem
from ..detection import target_of
from ..dispatch import plan_for
from ..run import run
from .flop_count import join_flop_counters
from .ops import BACKWARD_NAMES, NAMES, NAMES_WITH_OUT, arguments_of, library

_RETURN_LSE = NAMES.index("return_lse")
_OPTIONS = BACKWARD_NAMES[BACKWARD_NAMES.index("dlse") + 1 :]
_HAVE_GRADIENTS = ("q", "k", "v", "bias", "sink")


class _Attention(_SingleLevelFunction):
    """``jitfmha::fmha_fwd`` with its gradient; always returns the lse, which backward needs."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, Tensor] = torch.ops.jitfmha.fmha_fwd.default(*given)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # Tensors have to be saved as such: they may be replaced by hooks, and are watched for
        # writes.
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*[inputs[i] for i in ctx.places], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        given = list(ctx.others)
        for i, x in zip(ctx.places, tensors, strict=True):
            given[i] = x
        flat = dict(zip(NAMES, given, strict=False))
        options = [flat[name] for name in _OPTIONS if name in flat]
        needed = dict(zip(NAMES, ctx.needs_input_grad, strict=False))
        wanted = {f"with_d{name}": needed.get(name, False) for name in ("bias", "sink")}
        results = torch.ops.jitfmha.fmha_bwd(
            *(_given(dout, out), *given[:3], out, lse, dlse, *options), **wanted
        )
        gradients = dict(zip(_HAVE_GRADIENTS, results, strict=True))
        return tuple(
            gradients[name] if name in gradients and is_needed else None
            for name, is_needed in needed.items()
        )


class _RepeatedAttention(torch.autograd.Function):
    """What `_Attention` does, of plain tensors, past torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        arguments: Arguments,
        differentiate: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        out, lse = run(arguments)
        assert lse is not None, "it is asked for"
        sums: dict[str, Tensor] = {}
        names = "softmax_scale", "mask", "window_size", "bf16_cvt"
        options = {name: getattr(arguments, name) for name in names}
        cu_seqlens = arguments.cu_seqlens
        if cu_seqlens is not None:
            of_q, of_k, padded_q, padded_k, max_seqlen_q, max_seqlen_k = cu_seqlens
            options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            sums = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
            if padded_q is not of_q:
                sums["cu_seqlens_q_padded"] = padded_q
            if padded_k is not of_k:
                sums["cu_seqlens_k_padded"] = padded_k
        ctx.differentiate, ctx.options, ctx.sums = differentiate, options, tuple(sums)
        # In the order of `_Attention`: a checkpoint may compute again what that computed first.
        ctx.save_for_backward(q, k, v, *sums.values(), out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, *sums, out, lse = ctx.saved_tensors
        options = ctx.options | dict(zip(ctx.sums, sums, strict=True))
        gradients = ctx.differentiate(_given(dout, out), q, k, v, out, lse, dlse=dlse, **options)
        of_qkv = zip(gradients, ctx.needs_input_grad[:3], strict=True)
        return *(x if is_needed else None for x, is_needed in of_qkv), None, None


class _AttentionBackward(_SingleLevelFunction):
    """``jitfmha::fmha_bwd``, whose results cannot be differentiated."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, ...] = torch.ops.jitfmha.fmha_bwd.default(*given)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        raise NotImplementedError(
            "the gradients of attention cannot be differentiated once more: fmha_bwd has no "
            "backward pass of its own"
        )


def _given(dout: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of ``out`` as backward takes it."""
    if dout is None:
        return torch.zeros_like(out)
    if dout.shape[-1] > 1 and dout.stride(-1) != 1:
        return dout.contiguous()  # The gradient of a sum is one number, expanded.
    return dout


def attend_again(
    arguments: Arguments, differentiate: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    """The output and the lse with their gradient, where a call like this one was there; else None.

    Tensors must be plain but for requiring grad: no subclass, no tracing, no transform in effect.
    ``differentiate`` is ``fmha_bwd``.
    """
    target = TARGET_HERE.get()
    cache = CALLS_HERE if target is None else target.calls
    try:
        if _what_decides(arguments) not in cache.differentiable:
            return None
    except (AttributeError, TypeError, RuntimeError):
        return None  # Not tensors, not hashable, not strided: the checks say what is wrong.
    q, k, v = arguments[:3]
    results: tuple[Tensor, Tensor] = _RepeatedAttention.apply(
        *(q, k, v, arguments._replace(return_lse=True), differentiate)
    )  # type: ignore[no-untyped-call]
    return results


def keep_for_attending_again(arguments: Arguments) -> None:
    """Let calls like this one, which went through the dispatcher, go by ``attend_again``."""
    target = TARGET_HERE.get()
    cache = CALLS_HERE if target is None else target.calls
    cache.keep_differentiable(_what_decides(arguments))


def _what_decides(arguments: Arguments) -> Hashable:
    """What says whether gradients are served, and what `run` does not check once more."""
    q, k, v, scale, mask, window, return_lse, _, cu_seqlens, bf16_cvt, *_ = arguments
    sequences: tuple[Hashable, ...] | None = None
    if cu_seqlens is not None:
        of_q, of_k, padded_q, padded_k, max_seqlen_q, max_seqlen_k = cu_seqlens
        are_padded = padded_q is not of_q, padded_k is not of_k
        sequences = of_q.shape, *are_padded, max_seqlen_q, max_seqlen_k
    return (
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        k.shape,
        k.stride(),
        k.dtype,
        v.shape,
        v.stride(),
        scale,
        mask,
        repr(window),
        return_lse.__class__,
        bf16_cvt,
        sequences,
    )


def _fmha_fwd(*given: Any) -> tuple[Tensor, Tensor]:
    join_flop_counters()
    _refuse_tangents(NAMES, given)
    if not _is_gradient_asked_for(given):
        return _Attention.forward(*given)
    _refuse_missing_gradients(given)
    _refuse_unserved_backward(given)
    with_lse = given[_RETURN_LSE]
    forced = (*given[:_RETURN_LSE], True, *given[_RETURN_LSE + 1 :])
    out, lse = _apply(_Attention, forced)
    return out, lse if with_lse else out.new_empty(0, dtype=torch.float32)


def _fmha_fwd_out(*given: Any) -> Tensor:
    join_flop_counters()
    _refuse_tangents(NAMES_WITH_OUT, given)
    if _is_gradient_asked_for(given):
        name = next(name for name, x in _tensors(NAMES_WITH_OUT, given) if x.requires_grad)
        raise result_requires_grad(name)
    with torch._C._AutoDispatchBelowAutograd():
        lse: Tensor = torch.ops.jitfmha.fmha_fwd_out.default(*given)
    return lse


def _fmha_bwd(*given: Any) -> tuple[Tensor, ...]:
    join_flop_counters()
    _refuse_tangents(BACKWARD_NAMES, given)
    if not _is_gradient_asked_for(given):
        return _AttentionBackward.forward(*given)
    results: tuple[Tensor, ...] = _apply(_AttentionBackward, given)
    return results


def _apply(function: Any, given: tuple[Any, ...]) -> Any:
    # Inside of torch.func.grad this is one of several levels, each of which comes by here.
    with enable_single_level_autograd_function():
        return function.apply(*given)


def _tensors(names: tuple[str, ...], given: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, x in zip(names, given, strict=False):
        if isinstance(x, Tensor):
            yield name, x


def _is_gradient_asked_for(given: tuple[Any, ...]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, Tensor) and x.requires_grad for x in given)


def _refuse_missing_gradients(given: tuple[Any, ...]) -> None:
    if dict(zip(NAMES, given, strict=False)).get("block_table") is not None:
        name = next(name for name, x in _tensors(NAMES, given) if x.requires_grad)
        raise NotImplementedError(
            f"{name} requires grad; attention over keys and values in pages (block_table) has no "
            "backward pass"
        )
    for name, x in _tensors(NAMES, given):
        if x.requires_grad and name not in _HAVE_GRADIENTS:
            raise NotImplementedError(
                f"{name} requires grad, and its gradient is not implemented yet; detach it"
            )


def _refuse_unserved_backward(given: tuple[Any, ...]) -> None:
    """Raise ``NotImplementedError`` where nothing serves backward: before forward, not after it."""
    q = given[0]
    if type(q) is not Tensor or q.is_meta:
        return  # A tensor without values; the target may be another machine's.
    target = target_of(q.device)
    if isinstance(target, CpuTarget) and given[1].dtype.itemsize > 1:
        return  # Which serves it wherever it serves forward.
    plan_for(backward_of(make_problem(arguments_of(NAMES, given))), target)


def backward_of(problem: Problem) -> Problem:
    """The backward pass of a call, whose gradients lie as its inputs and its output do."""
    sizes = problem.sizes
    strides = GradientStrides(sizes.out, (), None, sizes.q, sizes.k, sizes.v)
    return problem._replace(gradients=strides)


def _refuse_tangents(names: tuple[str, ...], given: tuple[Any, ...]) -> None:
    if forward_ad._current_level < 0:
        return
    for name, x in _tensors(names, given):
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a forward-mode tangent, and attention has no forward-mode "
                "derivative"
            )


library.impl("fmha_fwd", _fmha_fwd, "Autograd")
library.impl("fmha_fwd_out", _fmha_fwd_out, "Autograd")
library.impl("fmha_bwd", _fmha_bwd, "Autograd")
