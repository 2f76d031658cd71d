"""Checks that functions of the package have in common.

Nothing is silently ignored: an argument of another package's function that asks for what is not
served yet raises ``NotImplementedError`` naming it and its value.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def check_flags(**flags: object) -> None:
    """Raise ``TypeError`` for a flag that is not a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__} ({value!r})")


def check_ints(**numbers: object) -> None:
    """Raise ``TypeError`` for what is not an int."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")


def check_counts(least: int = 0, /, **numbers: int) -> None:
    """Raise ``TypeError`` for what is not an int, and ``ValueError`` for less than ``least``."""
    check_ints(**numbers)
    for name, value in numbers.items():
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def check_numbers(**numbers: object) -> None:
    """Raise ``TypeError`` for what is neither an int nor a float."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(value).__name__} ({value!r})")


# What the same is called elsewhere, in SDPA first of all.
_MEANT = {
    "causal": 'mask="causal"',
    "is_causal": 'mask=1 (top-left, as in SDPA) or mask="causal" (bottom-right)',
    "attn_mask": "bias (added to the scores, or bool as in SDPA)",
    "attn_bias": "bias",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "softcap": "logit_softcap",
    "dropout": "dropout_p",
    "enable_gqa": "nothing (k and v may have fewer heads than q anyway)",
    "return_softmax_lse": "return_lse",
}


def refuse_unexpected(
    function: str,
    names: Iterable[str],
    known: Iterable[str],
    elsewhere: Mapping[str, str] = _MEANT,
) -> NoReturn:
    """Raise ``TypeError`` for keyword arguments that are not known, of which some may be meant."""
    from difflib import get_close_matches  # of use where something goes wrong only

    meant = {
        # Names that share a word are not alike: output_scale and softmax_scale are at 0.64.
        name: elsewhere.get(name) or next(iter(get_close_matches(name, known, 1, 0.8)), None)
        for name in names
    }
    if len(meant) == 1:
        ((name, other),) = meant.items()
        advice = "" if other is None else f"; did you mean {other}?"
        raise TypeError(f"{function} got an unexpected keyword argument {name!r}{advice}")
    told = (
        f"{name!r}{'' if other is None else f' (did you mean {other}?)'}"
        for name, other in meant.items()
    )
    raise TypeError(f"{function} got unexpected keyword arguments: {', '.join(told)}")


# What flash-attn, AITER, SDPA, Triton's examples and Transformers call the same.
_SYNONYMS = (
    ("causal", "is_causal"),
    ("softmax_scale", "sm_scale", "scale", "scaling"),
    ("softcap", "logits_soft_cap", "logit_softcap", "logits_softcap"),
    ("dropout_p", "dropout", "p_dropout"),
    ("return_softmax_lse", "return_lse", "return_attn_probs", "return_softmax"),
    ("bias", "attn_bias", "attn_mask"),
    ("sink_ptr", "sink", "sinks", "s_aux", "learnable_sink"),
    ("cu_seqlens_k", "cu_seqlens_kv"),
    ("cu_seqlens_q", "cu_seqlens"),
    ("max_seqlen_k", "max_seqlen_kv"),
    ("max_seqlen_q", "max_seqlen"),
    ("block_table", "page_table", "block_tables"),
    ("window_size", "sliding_window", "window"),
)


def with_clear_errors(function: Callable[P, R]) -> Callable[P, R]:
    """The function; where it fails, what Python and torch say less clearly is looked for.

    A keyword that it lacks ends in a ``TypeError`` that says which may be meant, as does a sparse
    or nested tensor, wherever the function or torch came to grief over it. In torch.jit.trace, in
    which a tensor stands for a length, it is refused. (A ``**unexpected`` in its signature would do
    for keywords, but libraries read the signatures of flash-attn's and AITER's functions to find
    out what these take.)
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except Exception as error:
            if not isinstance(error, NotImplementedError):
                refuse_jit_trace()
            code = inspect.unwrap(function).__code__
            known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            unknown = [name for name in named if name not in known]
            takes_any = code.co_flags & inspect.CO_VARKEYWORDS
            if takes_any or not unknown or not isinstance(error, TypeError):
                if not isinstance(error, (TypeError, ValueError)):  # not of the package's own
                    for name, x in (*zip(known, arguments, strict=False), *named.items()):
                        if isinstance(x, Tensor):
                            check_layout(name, x)
                raise
        refuse_unexpected(function.__name__, unknown, known, _known_by_synonym(known))

    return call


def _known_by_synonym(known: Collection[str]) -> dict[str, str]:
    """What is known, by the names that it has elsewhere."""
    found: dict[str, str] = {}
    for names in _SYNONYMS:
        meant = next((name for name in names if name in known), None)
        if meant is not None:
            found |= dict.fromkeys(names, meant)
    return found


def refuse_jit_trace() -> None:
    """Raise ``NotImplementedError`` where torch.jit.trace records.

    It would keep the results for the example inputs as constants, or memory that nobody has
    written. No call gets past a first one of its kind: what stands for a length while it records is
    equal to none of an earlier call.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise NotImplementedError(
            "torch.jit.trace does not see this call, and would keep its result as a constant; use "
            "torch.export or torch.compile"
        )


def not_a_tensor(name: str, value: object) -> TypeError:
    """The error for an argument that is no tensor; of arrays it tells the type, not the data."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None:
        return TypeError(
            f"{name} must be a torch.Tensor, got {type(value).__name__} ({reprlib.repr(value)})"
        )
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    return TypeError(
        f"{name} must be a torch.Tensor, got {kind} of shape {shape} and dtype {dtype}; "
        f"torch.as_tensor({name}) makes one of it"
    )


def refuse_given(**optional: object) -> None:
    """Raise ``NotImplementedError`` for an optional argument that is given."""
    for name, value in optional.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} ({describe(value)}) is not implemented yet; use None"
            )


def result_requires_grad(name: str) -> NotImplementedError:
    """Refuse a tensor to be written that requires grad, as torch's own functions do."""
    return NotImplementedError(
        f"{name} requires grad; functions with out=... don't support automatic differentiation"
    )


def requires_any_grad(*optional: object) -> bool:
    """Whether any of the tensors among them requires grad."""
    for x in optional:  # noqa: SIM110 - a generator takes 2 us longer, with six tensors
        # Of None isinstance takes longer than all the rest.
        if x is not None and isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def require_cu_seqlens(**cu_seqlens: object) -> None:
    """Raise ``ValueError`` for prefix sums that are None, which elsewhere asks for batch mode."""
    for name, value in cu_seqlens.items():
        if value is None:
            raise ValueError(f"{name}=None: packed sequences need the prefix sums of their lengths")


def describe(value: object) -> str:
    """An argument in a message: a tensor by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)


def check_layout(name: str, x: Tensor) -> None:
    """Raise ``TypeError`` for a tensor without strides, or one of several lengths."""
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; pass the rows of all sequences as one tensor, such as "
            f"{name}.values(), and where they begin as cu_seqlens, such as {name}.offsets().int()"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; only torch.strided is served")


def check_not_negative(**written: object) -> None:
    """Raise ``ValueError`` for a tensor to be written whose memory holds its numbers negated."""
    for name, x in written.items():
        if isinstance(x, Tensor) and x.is_neg():
            raise ValueError(f"{name} has torch's negative bit; pass {name}.resolve_neg()")


def check_all_beside(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ``TypeError`` or ``ValueError`` where one is no tensor, has a layout that is not
    served, or is on another device than the first. None is passed over.
    """
    first: tuple[str, Tensor] | None = None
    for name, x in named:
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        check_layout(name, x)
        first = first or (name, x)
        if x.device != first[1].device:
            raise ValueError(
                f"{name} is on {x.device}, {first[0]} is on {first[1].device}; use one device"
            )


def check_prefix_sums(name: str, x: Tensor, rows_name: str, rows: Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is no int32 ``(batch + 1,)`` beside ``rows``.

    The numbers are not looked at.
    """
    check_all_beside(((rows_name, rows), (name, x)))
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be torch.int32")
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch + 1,)")


def check_last_dimension(name: str, x: Tensor) -> None:
    """Raise ``ValueError`` where the last dimension is not contiguous."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {x.stride(-1)} in its last dimension, which must be contiguous"
        )


def check_given(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is no tensor beside q."""
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    check_layout(name, x)
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device")
