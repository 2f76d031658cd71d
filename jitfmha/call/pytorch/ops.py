"""The operators ``torch.ops.jitfmha.*``: what torch.compile, export and tensor subclasses see.

``fmha_fwd`` in eager mode goes past them, straight to :func:`jitfmha.call.run.run`, where no
gradient is asked for; they end in the same function. Their schemas are made from
``jitfmha.problem.arguments.OPTIONS``; ``autograd.py`` has their derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...problem.arguments import OPTIONS, Arguments
from ...problem.dtypes import out_dtype_of
from ...problem.mask import Mask, parse_mask
from ...problem.problem import make_problem
from ...problem.score_features import Modifiers
from ...problem.torch_parts import implement, is_profiled
from ..backward import BackwardArguments, make_backward_problem, new_gradients, run_backward
from ..run import new_parts, run, run_parts

_SCHEMAS = {
    **{name: f"Tensor {name}" for name in ("q", "k", "v", "dout", "lse")},
    "dlse": "Tensor? dlse",
    **{
        option.name: f"{option.schema} {option.name}"
        + ("" if option.default is None else f"={option.default}")
        for option in OPTIONS
    },
    **{name: f"bool {name}=False" for name in ("with_dbias", "with_dsink")},
    **{name: f"bool? {name}=None" for name in ("deterministic", "atomic_fp32")},
}


def _schema(names: tuple[str, ...], **other: str) -> str:
    return ", ".join(other.get(name, _SCHEMAS[name]) for name in names)


NAMES_WITH_OUT = ("q", "k", "v", *(option.name for option in OPTIONS))
_IN_BOTH_PASSES = tuple(name for name in NAMES_WITH_OUT if name != "out")
# The last one is for the gradients, which a call with `out` has none of.
NAMES = (*_IN_BOTH_PASSES, "deterministic")
# What only a backward pass is told, beside its tensors.
_BACKWARD_CHOICES = ("with_dbias", "with_dsink", "deterministic", "atomic_fp32")
BACKWARD_NAMES = (
    *("dout", "q", "k", "v", "out", "lse", "dlse"),
    *(name for name in _IN_BOTH_PASSES[3:] if name != "return_lse"),
    *_BACKWARD_CHOICES,
)
_BACKWARD_TENSORS = 7
library = torch.library.Library("jitfmha", "DEF")
library.define(f"fmha_fwd({_schema(NAMES)}) -> (Tensor out, Tensor lse)")
library.define(f"fmha_fwd_out({_schema(NAMES_WITH_OUT)}) -> Tensor lse")
library.define(
    f"fmha_bwd({_schema(BACKWARD_NAMES, out='Tensor out')}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
# Of the results of parts of the keys, which have no gradients.
PARTS_NAMES = (
    *("q", "k", "v", "softmax_scale", "mask", "window_size", "cu_seqlens_q", "cu_seqlens_k"),
    *("max_seqlen_q", "max_seqlen_k", "block_table", "num_splits"),
)
library.define(
    f"mha_fwd_splitkv({_schema(PARTS_NAMES)}) -> "
    "(Tensor out, Tensor lse, Tensor out_accum, Tensor lse_accum)"
)
_NUMBERS = {"0": 0, "1": 1, "2": 2}


def call_operator(arguments: Arguments, deterministic: bool | None) -> tuple[Tensor, Tensor]:
    """Go through torch's dispatcher: the output and the log-sum-exp, empty if not asked for."""
    flat = arguments.flattened() | {"deterministic": deterministic}
    flat["mask"] = _mask_as_text(flat["mask"])
    out: Tensor | None = flat["out"]
    if out is None:
        results: tuple[Tensor, Tensor] = torch.ops.jitfmha.fmha_fwd(*[flat[x] for x in NAMES])
        return results
    return out, torch.ops.jitfmha.fmha_fwd_out(*[flat[x] for x in NAMES_WITH_OUT])


Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def call_parts_operator(arguments: Arguments) -> Parts:
    """Go through torch's dispatcher: the results for all keys, and those for each part of them."""
    flat = arguments.flattened()
    flat["mask"] = _mask_as_text(flat["mask"])
    results: Parts = torch.ops.jitfmha.mha_fwd_splitkv(*[flat[x] for x in PARTS_NAMES])
    return results


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
    out, lse = run(arguments, is_profiled=is_profiled())
    return out, _lse_or_empty(arguments.q, lse)


def _fmha_fwd_out(*given: Any) -> Tensor:
    arguments = arguments_of(NAMES_WITH_OUT, given)
    _, lse = run(arguments, is_profiled=is_profiled())
    return _lse_or_empty(arguments.q, lse)


def _mha_fwd_splitkv(*given: Any) -> Parts:
    return run_parts(arguments_of(PARTS_NAMES, given))


def _mha_fwd_splitkv_fake(*given: Any) -> Parts:
    arguments = arguments_of(PARTS_NAMES, given)._replace(return_lse=True)
    return *_fake_results(arguments), *new_parts(arguments)


def _fmha_fwd_fake(*given: Any) -> tuple[Tensor, Tensor]:
    return _fake_results(arguments_of(NAMES, given))


def _fmha_fwd_out_fake(*given: Any) -> Tensor:
    return _fake_results(arguments_of(NAMES_WITH_OUT, given))[1]


def _fake_results(arguments: Arguments) -> tuple[Tensor, Tensor]:
    q, problem = arguments.q, make_problem(arguments)
    lse = q.new_empty(problem.lse_shape if problem.has_lse else 0, dtype=torch.float32)
    return q.new_empty(problem.out_shape, dtype=out_dtype_of(q.dtype)), lse


def _fmha_fwd_out_resolved(*given: Any) -> Tensor:
    """Serve tensors with the negative bit. What torch does by itself fails on a returned lse."""
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
    dq, dk, dv, dbias, dsink = run_backward(arguments, is_profiled=is_profiled())
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
    ("mha_fwd_splitkv", _mha_fwd_splitkv, _mha_fwd_splitkv_fake),
):
    implement(library, _name, _kernel, _fake)
library.impl("fmha_fwd_out", _fmha_fwd_out_resolved, "Negative")
# No dtype that is served has this bit; torch would fail on it before the dtype is seen.
library.impl("fmha_fwd_out", torch.library.fallthrough_kernel, "Conjugate")
