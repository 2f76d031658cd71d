"""The operators ``torch.ops.jitfmha.*``: what torch.compile, export and tensor subclasses see.

``fmha_fwd`` in eager mode goes past them, straight to :func:`jitfmha.call.run`; they end in the
same function. Their schemas are made from :class:`jitfmha.arguments.Options`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import Arguments, Options
from .call import run
from .problem import make_problem, out_dtype_of

# A schema has no union of int and str, so `mask` is text; lengths may be symbolic.
_SCHEMA_TYPES = {
    "softmax_scale": "float? softmax_scale=None",
    "mask": 'str mask="0"',
    "window_size": "SymInt[2] window_size=[-1, -1]",
    "return_lse": "bool return_lse=False",
    "max_seqlen_q": "SymInt? max_seqlen_q=None",
    "max_seqlen_k": "SymInt? max_seqlen_k=None",
    "bf16_cvt": 'str bf16_cvt="rtne"',
}
_OPTIONS = ("return_lse", *(name for name in Options.__annotations__ if name != "out"))
_SCHEMA = ", ".join(_SCHEMA_TYPES.get(name, f"Tensor? {name}=None") for name in _OPTIONS)
_library = torch.library.Library("jitfmha", "DEF")
_library.define(f"fmha_fwd(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor out, Tensor lse)")
_library.define(
    f"fmha_fwd_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_SCHEMA}) -> Tensor lse"
)
_NUMBERS = {"0": 0, "1": 1, "2": 2}


def call_operator(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Go through torch's dispatcher: the output and the log-sum-exp, empty if not asked for."""
    q, k, v, out = arguments.q, arguments.k, arguments.v, arguments.out
    flat = arguments.flattened()
    flat["mask"] = _mask_as_text(flat["mask"])
    options = [flat[name] for name in _OPTIONS]
    if out is None:
        results: tuple[Tensor, Tensor] = torch.ops.jitfmha.fmha_fwd(q, k, v, *options)
        return results
    return out, torch.ops.jitfmha.fmha_fwd_out(q, k, v, out, *options)


def refuse_grad(arguments: Arguments) -> None:
    """Raise ``NotImplementedError`` where a derivative would have to go through the call."""
    named = zip(("q", "k", "v"), arguments[:3], strict=True)
    for name, x in (*named, ("out", arguments.out)):
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


def _mask_as_text(mask: int | str) -> str:
    if isinstance(mask, str):
        return repr(mask) if mask in _NUMBERS else mask
    if isinstance(mask, int) and not isinstance(mask, bool):
        for text, number in _NUMBERS.items():
            if mask == number:  # under torch.compile the number may be symbolic
                return text
    return repr(mask)


def _arguments_of(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *options: Any) -> Arguments:
    """The value behind an operator's arguments; the dispatcher leaves trailing defaults out."""
    given: dict[str, Any] = dict(zip(_OPTIONS, options, strict=False))
    if "mask" in given:
        given["mask"] = _NUMBERS.get(given["mask"], given["mask"])
    if "window_size" in given:
        given["window_size"] = tuple(given["window_size"])
    return Arguments.of(q, k, v, {**given, "out": out})


def _fmha_fwd(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out, lse = run(_arguments_of(q, k, v, None, *options))
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fmha_fwd_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *options: Any) -> Tensor:
    _, lse = run(_arguments_of(q, k, v, _given(out), *options))
    return q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fmha_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _fake_results(_arguments_of(q, k, v, None, *options))


def _fmha_fwd_out_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *options: Any) -> Tensor:
    return _fake_results(_arguments_of(q, k, v, _given(out), *options))[1]


def _fake_results(arguments: Arguments) -> tuple[Tensor, Tensor]:
    q, problem = arguments.q, make_problem(arguments)
    lse = q.new_empty(problem.lse_shape if problem.has_lse else 0, dtype=torch.float32)
    return q.new_empty(problem.out_shape, dtype=out_dtype_of(q.dtype)), lse


def _given(out: Tensor | None) -> Tensor:
    # Torch's dispatcher takes None for any tensor.
    if out is None:
        raise TypeError("out must be a torch.Tensor, got NoneType")
    return out


def _fmha_fwd_autograd(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = _below_autograd(
        torch.ops.jitfmha.fmha_fwd.default, Arguments(q, k, v), (q, k, v, *options)
    )
    return results


def _fmha_fwd_out_autograd(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *options: Any) -> Tensor:
    lse: Tensor = _below_autograd(
        torch.ops.jitfmha.fmha_fwd_out.default,
        Arguments(q, k, v, out=out),
        (q, k, v, out, *options),
    )
    return lse


def _below_autograd(op: Callable[..., Any], tensors: Arguments, given: tuple[Any, ...]) -> Any:
    if torch.is_grad_enabled():
        refuse_grad(tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*given)


for _name, _kernel, _autograd, _fake in (
    ("fmha_fwd", _fmha_fwd, _fmha_fwd_autograd, _fmha_fwd_fake),
    ("fmha_fwd_out", _fmha_fwd_out, _fmha_fwd_out_autograd, _fmha_fwd_out_fake),
):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    _library.impl(_name, _autograd, "Autograd")
    torch.library.register_fake(f"jitfmha::{_name}", _fake, lib=_library)
