"""The operators ``torch.ops.jitfmha.*``: what torch.compile, export and tensor subclasses see.

``fmha_fwd`` in eager mode goes past them, straight to :func:`jitfmha.call.run`; they end in the
same function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .call import describe_problem, resolve_cu_seqlens, resolve_descales, run
from .problem import out_dtype_of

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float? softmax_scale, str mask, SymInt[2] window_size, "
    "bool return_lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_k_padded"
)
_OPTIONS = (
    'str bf16_cvt="rtne", Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None'
)
_library = torch.library.Library("jitfmha", "DEF")
_library.define(f"fmha_fwd({_ARGUMENTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(f"fmha_fwd_out({_ARGUMENTS}, Tensor(a!) out, {_OPTIONS}) -> Tensor lse")
_OUT = _ARGUMENTS.count(",") + 1  # the position of `out`


_NUMBERS = {"0": 0, "1": 1, "2": 2}


def mask_argument(mask: int | str) -> str:
    """``mask`` as the operators take it: text, because a schema has no union of int and str."""
    if isinstance(mask, str):
        return repr(mask) if mask in _NUMBERS else mask
    if isinstance(mask, int) and not isinstance(mask, bool):
        for text, number in _NUMBERS.items():
            if mask == number:  # under torch.compile the number may be symbolic
                return text
    return repr(mask)


def refuse_grad(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> None:
    """Raise ``NotImplementedError`` where a derivative would have to go through the call."""
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if x is None:
            continue
        if x.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad, and the backward pass is not implemented yet; "
                "call under torch.no_grad() or pass detached tensors"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} carries a forward-mode tangent, and derivatives are not implemented yet"
            )


def _mask_value(mask: str) -> int | str:
    return _NUMBERS.get(mask, mask)


def _fmha_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    return _results(args, None)


def _fmha_fwd_out(*args: Any) -> Tensor:
    _check_is_given(args[_OUT])
    return _results((*args[:_OUT], *args[_OUT + 1 :]), args[_OUT])[1]


def _results(args: tuple[Any, ...], out: Tensor | None) -> tuple[Tensor, Tensor]:
    q: Tensor = args[0]
    call, longest, options = _call(args, out)
    out, lse = run(*call, *longest, *options)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fmha_fwd_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _fake_results(args, None)


def _fmha_fwd_out_fake(*args: Any) -> Tensor:
    _check_is_given(args[_OUT])
    return _fake_results((*args[:_OUT], *args[_OUT + 1 :]), args[_OUT])[1]


def _fake_results(args: tuple[Any, ...], out: Tensor | None) -> tuple[Tensor, Tensor]:
    q: Tensor = args[0]
    call, _, options = _call(args, out)
    problem = describe_problem(*call, *options)
    lse = q.new_empty(problem.lse_shape if problem.has_lse else 0, dtype=torch.float32)
    return q.new_empty(problem.out_shape, dtype=out_dtype_of(q.dtype)), lse


def _check_is_given(out: Tensor | None) -> None:
    # Torch's dispatcher takes None for any tensor.
    if out is None:
        raise TypeError("out must be a torch.Tensor, got NoneType")


def _call(args: tuple[Any, ...], out: Tensor | None) -> tuple[Any, Any, Any]:
    """An operator's arguments as :func:`run` takes them: the call, its longest lengths, options.

    The dispatcher leaves trailing arguments out that have their default values.
    """
    args = (*args, *_DEFAULTS[len(args) - _OUT :])
    q, k, v, softmax_scale, mask, window_size, return_lse = args[:7]
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, padded_q, padded_k = args[7:_OUT]
    bf16_cvt, q_descale, k_descale, v_descale = args[_OUT:]
    longest = (max_seqlen_q, max_seqlen_k)
    cu_seqlens = resolve_cu_seqlens(cu_seqlens_q, cu_seqlens_k, padded_q, padded_k, *longest)
    window = tuple(window_size)
    call = (q, k, v, softmax_scale, _mask_value(mask), window, return_lse, out, cu_seqlens)
    return call, longest, (bf16_cvt, resolve_descales(q_descale, k_descale, v_descale))


_DEFAULTS = ("rtne", None, None, None)  # of the options


def _fmha_fwd_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = _below_autograd(torch.ops.jitfmha.fmha_fwd.default, args, None)
    return results


def _fmha_fwd_out_autograd(*args: Any) -> Tensor:
    op = torch.ops.jitfmha.fmha_fwd_out.default
    lse: Tensor = _below_autograd(op, args, args[_OUT])
    return lse


def _below_autograd(op: Callable[..., Any], args: tuple[Any, ...], out: Tensor | None) -> Any:
    if torch.is_grad_enabled():
        q, k, v = args[:3]
        refuse_grad(q, k, v, out)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


for _name, _kernel, _autograd, _fake in (
    ("fmha_fwd", _fmha_fwd, _fmha_fwd_autograd, _fmha_fwd_fake),
    ("fmha_fwd_out", _fmha_fwd_out, _fmha_fwd_out_autograd, _fmha_fwd_out_fake),
):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    _library.impl(_name, _autograd, "Autograd")
    torch.library.register_fake(f"jitfmha::{_name}", _fake, lib=_library)
