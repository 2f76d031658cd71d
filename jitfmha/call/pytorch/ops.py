"""The operators ``torch.ops.jitfmha.*``: what torch.compile, export and tensor subclasses see.

``fmha_fwd`` in eager mode goes past them, straight to :func:`jitfmha.call.run.run`, where no
gradient is asked for; they end in the same function. Their schemas are made from
:class:`jitfmha.problem.arguments.AttentionOptions`; ``autograd.py`` has their derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ...problem.arguments import Arguments, AttentionOptions, Modifiers
from ...problem.mask import Mask, parse_mask
from ...problem.problem import make_problem, out_dtype_of
from ..backward import BackwardArguments, make_backward_problem, new_gradients, run_backward
from ..run import run

# A schema has no union of int and str, so `mask` is text; lengths may be symbolic.
_SCHEMA_TYPES = {
    **dict.fromkeys(("q", "k", "v", "dout", "lse"), "Tensor"),
    "softmax_scale": "float?",
    "mask": "str",
    "window_size": "SymInt[2]",
    "return_lse": "bool",
    "max_seqlen_q": "SymInt?",
    "max_seqlen_k": "SymInt?",
    "bf16_cvt": "str",
    "logit_softcap": "float",
    "sink_size": "SymInt",
    "dropout_p": "float",
    "num_splits": "int",
    **dict.fromkeys(("with_dbias", "with_dsink"), "bool"),
    **dict.fromkeys(("deterministic", "atomic_fp32"), "bool?"),
}
_DEFAULTS = {
    "bf16_cvt": '="rtne"',
    **dict.fromkeys(("q_descale", "k_descale", "v_descale", "p_descale"), "=None"),
    **dict.fromkeys(("bias", "alibi_slopes", "sink", "rng_state", "block_table"), "=None"),
    **dict.fromkeys(("logit_softcap", "dropout_p"), "=0.0"),
    **dict.fromkeys(("sink_size", "num_splits"), "=0"),
    **dict.fromkeys(("with_dbias", "with_dsink"), "=False"),
    **dict.fromkeys(("deterministic", "atomic_fp32"), "=None"),
}


def _names() -> Iterator[str]:
    yield from ("q", "k", "v")
    for name in AttentionOptions.__annotations__:
        yield name
        if name == "window_size":
            yield "return_lse"
        if name == "cu_seqlens_k_padded":
            yield "out"  # before all that have defaults


def _schema(names: tuple[str, ...], out: str = "Tensor(a!)") -> str:
    types = {**_SCHEMA_TYPES, "out": out}
    return ", ".join(
        f"{types.get(name, 'Tensor?')} {name}{_DEFAULTS.get(name, '')}" for name in names
    )


NAMES_WITH_OUT = tuple(_names())
NAMES = tuple(name for name in NAMES_WITH_OUT if name != "out")
# What only a backward pass is told, beside its tensors.
_BACKWARD_CHOICES = ("with_dbias", "with_dsink", "deterministic", "atomic_fp32")
BACKWARD_NAMES = (
    *("dout", "q", "k", "v", "out", "lse", "dlse"),
    *(name for name in NAMES[3:] if name != "return_lse"),
    *_BACKWARD_CHOICES,
)
_BACKWARD_TENSORS = 7
library = torch.library.Library("jitfmha", "DEF")
library.define(f"fmha_fwd({_schema(NAMES)}) -> (Tensor out, Tensor lse)")
library.define(f"fmha_fwd_out({_schema(NAMES_WITH_OUT)}) -> Tensor lse")
library.define(
    f"fmha_bwd({_schema(BACKWARD_NAMES, out='Tensor')}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
_NUMBERS = {"0": 0, "1": 1, "2": 2}


def call_operator(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Go through torch's dispatcher: the output and the log-sum-exp, empty if not asked for."""
    flat = arguments.flattened()
    flat["mask"] = _mask_as_text(flat["mask"])
    out: Tensor | None = flat["out"]
    if out is None:
        results: tuple[Tensor, Tensor] = torch.ops.jitfmha.fmha_fwd(*[flat[x] for x in NAMES])
        return results
    return out, torch.ops.jitfmha.fmha_fwd_out(*[flat[x] for x in NAMES_WITH_OUT])


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def call_backward_operator(arguments: BackwardArguments) -> Gradients:
    """Go through torch's dispatcher: dq, dk, dv, dbias and dsink, in new tensors.

    The last two are empty where they are not asked for.
    """
    flat = arguments.forward.flattened()
    flat["mask"] = _mask_as_text(flat["mask"])
    flat |= {"lse": arguments.lse, "dout": arguments.dout, "dlse": arguments.dlse}
    flat |= {name: getattr(arguments, name) for name in _BACKWARD_CHOICES}
    results: Gradients = torch.ops.jitfmha.fmha_bwd(*[flat[x] for x in BACKWARD_NAMES])
    return results


def _mask_as_text(mask: int | str) -> str:
    if isinstance(mask, str):
        return repr(mask) if mask in _NUMBERS else mask
    if isinstance(mask, int) and not isinstance(mask, bool):
        for text, number in _NUMBERS.items():
            if mask == number:  # under torch.compile the number may be symbolic
                return text
    return repr(mask)


def mask_of(mask: str, window_size: Sequence[int]) -> Mask:
    """The mask behind an operator's two arguments for it."""
    left, right = window_size
    return parse_mask(_NUMBERS.get(mask, mask), (left, right))


def arguments_of(names: tuple[str, ...], given: tuple[Any, ...]) -> Arguments:
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
    arguments = arguments_of(NAMES, given)
    out, lse = run(arguments, is_profiled=profiler._is_profiler_enabled)
    return out, _lse_or_empty(arguments.q, lse)


def _fmha_fwd_out(*given: Any) -> Tensor:
    arguments = arguments_of(NAMES_WITH_OUT, given)
    _, lse = run(arguments, is_profiled=profiler._is_profiler_enabled)
    return _lse_or_empty(arguments.q, lse)


def _fmha_fwd_fake(*given: Any) -> tuple[Tensor, Tensor]:
    return _fake_results(arguments_of(NAMES, given))


def _fmha_fwd_out_fake(*given: Any) -> Tensor:
    return _fake_results(arguments_of(NAMES_WITH_OUT, given))[1]


def _fake_results(arguments: Arguments) -> tuple[Tensor, Tensor]:
    q, problem = arguments.q, make_problem(arguments)
    lse = q.new_empty(problem.lse_shape if problem.has_lse else 0, dtype=torch.float32)
    return q.new_empty(problem.out_shape, dtype=out_dtype_of(q.dtype)), lse


def _fmha_fwd_out_resolved(*given: Any) -> Tensor:
    """For tensors with the negative bit. What torch does by itself fails on a returned lse."""
    arguments = arguments_of(NAMES_WITH_OUT, given)
    make_problem(arguments)
    resolved = [x.resolve_neg() if isinstance(x, Tensor) else x for x in given]
    lse: Tensor = torch.ops.jitfmha.fmha_fwd_out.default(*resolved)
    out, written = arguments.out, resolved[NAMES_WITH_OUT.index("out")]
    if out is not None and out.is_neg():
        out.copy_(written)
    return lse


def _backward_arguments_of(given: tuple[Any, ...]) -> BackwardArguments:
    dout, *forward, out, lse, dlse = given[:_BACKWARD_TENSORS]
    of_forward = slice(_BACKWARD_TENSORS, len(BACKWARD_NAMES) - len(_BACKWARD_CHOICES))
    names = ("q", "k", "v", "out", *BACKWARD_NAMES[of_forward])
    options = dict(zip(BACKWARD_NAMES, given, strict=False))
    choices = {name: options[name] for name in _BACKWARD_CHOICES if name in options}
    rest = given[of_forward]
    arguments = arguments_of(names, (*forward, out, *rest))
    return BackwardArguments(arguments, lse, dout, dlse, **choices)


def _fmha_bwd(*given: Any) -> Gradients:
    arguments = _backward_arguments_of(given)
    is_profiled = profiler._is_profiler_enabled
    dq, dk, dv, dbias, dsink = run_backward(arguments, is_profiled=is_profiled)
    empty = arguments.forward.q.new_empty
    return (
        *(dq, dk, dv),
        empty(0) if dbias is None else dbias,
        empty(0, dtype=torch.float32) if dsink is None else dsink,
    )


def _fmha_bwd_fake(*given: Any) -> Gradients:
    arguments = _backward_arguments_of(given)
    make_backward_problem(arguments)
    modifiers, empty = arguments.forward.modifiers or Modifiers(), arguments.forward.q.new_empty
    dbias, dsink = empty(0), empty(0, dtype=torch.float32)
    if arguments.with_dbias and modifiers.bias is not None:
        dbias = empty(modifiers.bias.shape, dtype=modifiers.bias.dtype)
    if arguments.with_dsink and modifiers.sink is not None:
        dsink = empty(modifiers.sink.shape, dtype=torch.float32)
    return (*new_gradients(arguments), dbias, dsink)


for _name, _kernel, _fake in (
    ("fmha_fwd", _fmha_fwd, _fmha_fwd_fake),
    ("fmha_fwd_out", _fmha_fwd_out, _fmha_fwd_out_fake),
    ("fmha_bwd", _fmha_bwd, _fmha_bwd_fake),
):
    library.impl(_name, _kernel, "CPU")
    library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"jitfmha::{_name}", _fake, lib=library)
library.impl("fmha_fwd_out", _fmha_fwd_out_resolved, "Negative")
# No dtype that is served has this bit; torch would fail on it before the dtype is seen.
library.impl("fmha_fwd_out", torch.library.fallthrough_kernel, "Conjugate")
