"""The operators ``torch.ops.jitfmha.*``: what torch.compile, export and tensor subclasses see.

``fmha_fwd`` in eager mode goes past them, straight to :func:`jitfmha.call.run`; they end in the
same function. Their schemas are made from :class:`jitfmha.arguments.Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import Arguments, AttentionOptions, Modifiers
from .call import run
from .problem import make_problem, out_dtype_of

# A schema has no union of int and str, so `mask` is text; lengths may be symbolic.
_SCHEMA_TYPES = {
    **dict.fromkeys(("q", "k", "v"), "Tensor"),
    "softmax_scale": "float?",
    "mask": "str",
    "window_size": "SymInt[2]",
    "return_lse": "bool",
    "max_seqlen_q": "SymInt?",
    "max_seqlen_k": "SymInt?",
    "out": "Tensor(a!)",
    "bf16_cvt": "str",
    "logit_softcap": "float",
    "sink_size": "SymInt",
    "dropout_p": "float",
}
_DEFAULTS = {
    "bf16_cvt": '="rtne"',
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "=None"),
    **dict.fromkeys(("bias", "alibi_slopes", "sink", "rng_state"), "=None"),
    **dict.fromkeys(("logit_softcap", "dropout_p"), "=0.0"),
    "sink_size": "=0",
}


def _names() -> Iterator[str]:
    yield from ("q", "k", "v")
    for name in AttentionOptions.__annotations__:
        yield name
        if name == "window_size":
            yield "return_lse"
        if name == "cu_seqlens_k_padded":
            yield "out"  # before all that have defaults


def _schema(names: tuple[str, ...]) -> str:
    return ", ".join(
        f"{_SCHEMA_TYPES.get(name, 'Tensor?')} {name}{_DEFAULTS.get(name, '')}" for name in names
    )


_NAMES_WITH_OUT = tuple(_names())
_NAMES = tuple(name for name in _NAMES_WITH_OUT if name != "out")
_library = torch.library.Library("jitfmha", "DEF")
_library.define(f"fmha_fwd({_schema(_NAMES)}) -> (Tensor out, Tensor lse)")
_library.define(f"fmha_fwd_out({_schema(_NAMES_WITH_OUT)}) -> Tensor lse")
_NUMBERS = {"0": 0, "1": 1, "2": 2}


def call_operator(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Go through torch's dispatcher: the output and the log-sum-exp, empty if not asked for."""
    flat = arguments.flattened()
    flat["mask"] = _mask_as_text(flat["mask"])
    out: Tensor | None = flat["out"]
    if out is None:
        results: tuple[Tensor, Tensor] = torch.ops.jitfmha.fmha_fwd(*[flat[x] for x in _NAMES])
        return results
    return out, torch.ops.jitfmha.fmha_fwd_out(*[flat[x] for x in _NAMES_WITH_OUT])


def refuse_grad(arguments: Arguments) -> None:
    """Raise ``NotImplementedError`` where a derivative would have to go through the call."""
    named = zip(("q", "k", "v"), arguments[:3], strict=True)
    modifiers = arguments.modifiers
    others = () if modifiers is None else modifiers.tensors()
    for name, x in (*named, ("out", arguments.out), *others):
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


def _arguments_of(names: tuple[str, ...], given: tuple[Any, ...]) -> Arguments:
    """The value behind an operator's arguments; the dispatcher leaves trailing defaults out."""
    flat: dict[str, Any] = dict(zip(names, given, strict=False))
    flat["mask"] = _NUMBERS.get(flat["mask"], flat["mask"])
    flat["window_size"] = tuple(flat["window_size"])
    if flat.get("out", flat) is None:
        # The dispatcher takes None for any tensor.
        raise TypeError("out must be a torch.Tensor, got NoneType")
    arguments = Arguments.of(flat.pop("q"), flat.pop("k"), flat.pop("v"), flat)
    dropout = arguments.dropout
    if dropout is not None and dropout.rng_state is None:
        raise ValueError(
            f"rng_state=None: with dropout_p={dropout.p} the operators need the state of the "
            "random numbers; jitfmha.new_rng_state gives one"
        )
    return arguments


def _lse_or_empty(q: Tensor, lse: Tensor | None) -> Tensor:
    return q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fmha_fwd(*given: Any) -> tuple[Tensor, Tensor]:
    arguments = _arguments_of(_NAMES, given)
    out, lse = run(arguments)
    return out, _lse_or_empty(arguments.q, lse)


def _fmha_fwd_out(*given: Any) -> Tensor:
    arguments = _arguments_of(_NAMES_WITH_OUT, given)
    return _lse_or_empty(arguments.q, run(arguments)[1])


def _fmha_fwd_fake(*given: Any) -> tuple[Tensor, Tensor]:
    return _fake_results(_arguments_of(_NAMES, given))


def _fmha_fwd_out_fake(*given: Any) -> Tensor:
    return _fake_results(_arguments_of(_NAMES_WITH_OUT, given))[1]


def _fake_results(arguments: Arguments) -> tuple[Tensor, Tensor]:
    q, problem = arguments.q, make_problem(arguments)
    lse = q.new_empty(problem.lse_shape if problem.has_lse else 0, dtype=torch.float32)
    return q.new_empty(problem.out_shape, dtype=out_dtype_of(q.dtype)), lse


def _fmha_fwd_autograd(*given: Any) -> tuple[Tensor, Tensor]:
    op = torch.ops.jitfmha.fmha_fwd.default
    results: tuple[Tensor, Tensor] = _below_autograd(op, _NAMES, given)
    return results


def _fmha_fwd_out_autograd(*given: Any) -> Tensor:
    op = torch.ops.jitfmha.fmha_fwd_out.default
    lse: Tensor = _below_autograd(op, _NAMES_WITH_OUT, given)
    return lse


def _fmha_fwd_out_resolved(*given: Any) -> Tensor:
    """For tensors with the negative bit. What torch does by itself fails on a returned lse."""
    arguments = _arguments_of(_NAMES_WITH_OUT, given)
    make_problem(arguments)
    resolved = [x.resolve_neg() if isinstance(x, Tensor) else x for x in given]
    lse: Tensor = torch.ops.jitfmha.fmha_fwd_out.default(*resolved)
    out, written = arguments.out, resolved[_NAMES_WITH_OUT.index("out")]
    if out is not None and out.is_neg():
        out.copy_(written)
    return lse


def _below_autograd(op: Callable[..., Any], names: tuple[str, ...], given: tuple[Any, ...]) -> Any:
    if torch.is_grad_enabled():
        flat = dict(zip(names, given, strict=False))
        q, k, v = given[:3]
        modifiers = Modifiers(flat.get("bias"), flat.get("alibi_slopes"), sink=flat.get("sink"))
        refuse_grad(Arguments(q, k, v, out=flat.get("out"), modifiers=modifiers))
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
_library.impl("fmha_fwd_out", _fmha_fwd_out_resolved, "Negative")
# No dtype that is served has this bit; torch would fail on it before the dtype is seen.
_library.impl("fmha_fwd_out", torch.library.fallthrough_kernel, "Conjugate")
