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

from .call import describe_problem, resolve_cu_seqlens, run

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float? softmax_scale, str mask, SymInt[2] window_size, "
    "bool return_lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_k_padded"
)
_library = torch.library.Library("jitfmha", "DEF")
_library.define(f"fmha_fwd({_ARGUMENTS}) -> (Tensor out, Tensor lse)")
_library.define(f"fmha_fwd_out({_ARGUMENTS}, Tensor(a!) out) -> Tensor lse")


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


def _fmha_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    mask: str,
    window_size: list[int],
    return_lse: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_k_padded: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = run(
        q,
        k,
        v,
        softmax_scale,
        _mask_value(mask),
        (window_size[0], window_size[1]),
        return_lse,
        out,
        resolve_cu_seqlens(
            cu_seqlens_q,
            cu_seqlens_k,
            cu_seqlens_q_padded,
            cu_seqlens_k_padded,
            max_seqlen_q,
            max_seqlen_k,
        ),
        max_seqlen_q,
        max_seqlen_k,
    )
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fmha_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    mask: str,
    window_size: list[int],
    return_lse: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_k_padded: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    problem = describe_problem(
        q,
        k,
        v,
        softmax_scale,
        _mask_value(mask),
        (window_size[0], window_size[1]),
        return_lse,
        out,
        resolve_cu_seqlens(
            cu_seqlens_q,
            cu_seqlens_k,
            cu_seqlens_q_padded,
            cu_seqlens_k_padded,
            max_seqlen_q,
            max_seqlen_k,
        ),
    )
    lse = q.new_empty(problem.lse_shape if return_lse else 0, dtype=torch.float32)
    return q.new_empty(problem.out_shape), lse


def _fmha_fwd_out(*args: Any) -> Tensor:
    return _fmha_fwd(*args)[1]


def _fmha_fwd_out_fake(*args: Any) -> Tensor:
    return _fmha_fwd_fake(*args)[1]


def _fmha_fwd_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = _below_autograd(torch.ops.jitfmha.fmha_fwd.default, args, None)
    return results


def _fmha_fwd_out_autograd(*args: Any) -> Tensor:
    lse: Tensor = _below_autograd(torch.ops.jitfmha.fmha_fwd_out.default, args, args[-1])
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
