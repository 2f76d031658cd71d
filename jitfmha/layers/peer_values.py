"""What flash-attn's and AITER's callers pass, as the Python values that ``fmha_fwd`` takes.

Their functions end in C++ bindings that convert numbers of any kind: a 0-dim tensor, as
``cu_seqlens.diff().max()`` is, a NumPy number, 1 or None for a flag. The same values are converted
here, before anything is computed. Reading a tensor on a GPU waits for it.

All conversions raise ``TypeError`` or ``ValueError`` that names the argument and its value.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ..problem.arguments import Options
from ..problem.checks import check_all_beside, check_layout, describe, with_clear_errors
from ..problem.dtypes import EIGHT_BIT_DTYPES, FP8_NAMES
from ..problem.mask import INT64_MAX, OPEN_WINDOW
from ..problem.memory import overlaps_itself, write_values
from ..problem.torch_parts import has_watchers, is_any_special, is_traced
from .known_attention import KnownAttention, note_left_out, noted

P = ParamSpec("P")
R = TypeVar("R")


def ends_in(
    core: Callable[..., R], fills_in: bool = True, /, **own_names: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of one that is declared only, with a signature and a docstring.

    Its calls go to ``core`` with every argument by its name, with ``fills_in`` those that were left
    out included. ``own_names`` are what it calls arguments of the function that ``core`` ends in,
    whose errors then say so.
    """

    def served(declared: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(declared).parameters
        names = tuple(parameters)
        defaults = {}
        if fills_in:
            defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}

        @functools.wraps(declared)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            declared(*arguments, **named)  # what is missing or not known ends in Python's own error
            given = defaults.copy()
            given.update(zip(names, arguments, strict=False))
            given.update(named)
            try:
                return core(**given)
            except (TypeError, ValueError, NotImplementedError) as error:
                if not own_names:
                    raise
                raise type(error)(_WORD.sub(own_name, str(error))) from error

        def own_name(word: re.Match[str]) -> str:
            return own_names.get(word[0], word[0])

        return with_clear_errors(call)

    return served


def attends_in(
    core: Callable[..., R], fills_in: bool = True, /, **own_names: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """:func:`ends_in`, of a function that has :class:`KnownAttention`."""

    def served(declared: Callable[P, R]) -> Callable[P, R]:
        longest = own_names.get("max_seqlen_k", "max_seqlen_k")
        known = KnownAttention(core, declared, longest)
        return ends_in(known, fills_in, **own_names)(declared)

    return served


# An "a" is a name where a verb follows.
_WORD = re.compile(r"(?<![\w.])(?:a(?= (?:has|is|must) )|[b-z]|[a-z]\w+)(?!\w)")
_STRIDED = torch.strided
_PLAIN_TYPES = (int, float, torch.SymInt, torch.SymFloat)  # a bool is an int


def as_flag(name: str, value: object) -> bool:
    """A bool, also from 0, 1, None, a NumPy bool or a 0-dim tensor."""
    if value is True or value is False:
        return value
    found = _python_value(value)
    if isinstance(found, bool):
        return found
    if found is None:
        return False
    if not isinstance(found, int):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__} ({value!r})")
    if found not in (0, 1):
        raise ValueError(f"{name}={value!r} is no flag; use False or True, 0 or 1")
    return found == 1


def as_int(name: str, value: object) -> int:
    """An int, also from a NumPy integer or a 0-dim tensor of integers."""
    if type(value) is int:
        return value
    found = _python_value(value)
    if isinstance(found, bool) or not isinstance(found, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
    return found  # type: ignore[return-value]  # what stands for an int in a trace


def as_number(name: str, value: object) -> float:
    """A number, also from a NumPy number or a 0-dim tensor."""
    if type(value) is float:
        return value
    found = _python_value(value)
    if isinstance(found, bool) or not isinstance(found, _PLAIN_TYPES):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} ({value!r})")
    return found  # type: ignore[return-value]  # what stands for a number in a trace


def as_length(name: str, value: object) -> int | None:
    """The longest length of sequences, which may be left out."""
    return None if value is None else as_int(name, value)


def as_softmax_scale(value: object) -> float | None:
    """What scores are multiplied with, or None for the default."""
    return None if value is None else as_number("softmax_scale", value)


def as_dropout_p(value: object) -> float:
    """Convert ``dropout_p`` to a float, which is at least 0 and below 1."""
    dropout_p = as_number("dropout_p", value)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p={value!r} must be at least 0 and less than 1")
    # Diffusers asks for 1e-30, to get an lse from flash-attn: that drops nothing.
    return dropout_p if 1 - dropout_p < 1 else 0.0


def as_softcap(name: str, value: object) -> float:
    """A soft cap of the scores; 0 is off."""
    softcap = as_number(name, value)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"{name}={value!r} must be 0 (off) or a finite number above it")
    return softcap


def check_num_splits(num_splits: object) -> None:
    """``num_splits`` is a number from 0 on, and has no effect."""
    if as_int("num_splits", num_splits) < 0:
        raise ValueError(f"num_splits={num_splits!r} must not be negative; 0 leaves the choice")


def as_window(window_size: object) -> tuple[int, int, int]:
    """``(left, right, sink_size)`` of a ``window_size`` with two entries, or AITER's with three.

    It may be a sequence, or a tensor or an array of one dimension. Negative sides are open, and
    become -1; ``sink_size`` is 0 where it is not given. None, as vLLM has it, is open.
    """
    # Compiled code has no `is` of tuples in torch 2.10 and 2.11.
    if window_size is None or (not is_traced() and window_size is OPEN_WINDOW):
        return -1, -1, 0
    entries = window_size if isinstance(window_size, (tuple, list)) else _listed(window_size)
    if not isinstance(entries, (tuple, list)) or len(entries) not in (2, 3):
        raise TypeError(
            f"window_size must be (left, right) or (left, right, sink_size), got {window_size!r}"
        )
    left = as_window_side("window_size", entries[0], window_size)
    right = as_window_side("window_size", entries[1], window_size)
    sink_size = 0
    if len(entries) == 3:
        sink_size = as_int("window_size", entries[2])
        if not 0 <= sink_size <= INT64_MAX:
            raise ValueError(f"window_size={window_size!r}: sink_size is a number of keys")
    return left, right, sink_size


def as_window_side(name: str, side: object, given: object = None) -> int:
    """One side of a window; -1 stands for all negative ones, which leave the side open.

    ``given`` is the argument that the side is a part of.
    """
    number = as_int(name, side)
    if isinstance(number, int) and number > INT64_MAX:
        raise ValueError(f"{name}={side if given is None else given!r}: a side is less than 2**63")
    return -1 if number < 0 else number


def window_pair(left: int, right: int) -> tuple[int, int]:
    """The ``window_size`` of ``fmha_fwd``, which knows the open one quickly by its identity."""
    return OPEN_WINDOW if left == -1 and right == -1 else (left, right)


@noted
def as_sink(sink: Tensor | None) -> Tensor | None:
    """Sinks in float32, also of models that keep them with 16 bits."""
    if isinstance(sink, Tensor) and sink.dtype in (torch.bfloat16, torch.float16):
        return sink.float()
    return sink


def int32_vector(name: str, x: Tensor) -> Tensor:
    """``x``, which is int32 of one dimension."""
    return _vector(name, x, "int32", torch.int32)


def as_lengths(name: str, x: Tensor) -> Tensor:
    """``x``, which is int32 or int64 of one dimension."""
    return _vector(name, x, "int32 or int64", torch.int32, torch.int64)


def _vector(name: str, x: Tensor, expected: str, *dtypes: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype not in dtypes or x.dim() != 1:
        raise TypeError(f"{name} must be an {expected} tensor of one dimension, got {describe(x)}")
    return x


def drop_without_effect(given: dict[str, Any], *names: str) -> None:
    """Take out of ``given`` what has no effect, by default all of it.

    What is no strided tensor is refused even so.
    """
    for name in names or tuple(given):
        x = given.pop(name)
        if isinstance(x, Tensor):
            check_layout(name, x)
            note_left_out(x)


def descales_of(
    q: Tensor,
    k: Tensor,
    *,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> Options:
    """Those of the scales that have a meaning, by the names of ``fmha_fwd``: of 8-bit tensors.

    A scale of one number may have any number of dimensions.
    """
    if q_descale is k_descale is v_descale is None:
        return {}
    scales = {"q_descale": (q, q_descale), "k_descale": (k, k_descale), "v_descale": (k, v_descale)}
    given = {}
    for name, (of, x) in scales.items():
        if isinstance(x, Tensor):
            check_layout(name, x)
        if has_8_bits(of):
            given[name] = _as_vector(x) if isinstance(x, Tensor) and x.numel() == 1 else x
        else:
            note_left_out(x)
    return cast("Options", given)


@noted
def _as_vector(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(1)


def has_8_bits(x: object) -> bool:
    """Whether it is a tensor of which there may be a scale."""
    return isinstance(x, Tensor) and x.dtype in EIGHT_BIT_DTYPES


@noted
def sums_of(lengths: Tensor) -> Tensor:
    """The prefix sums of lengths ``(b,)``, int32 ``(b + 1,)``.

    Raises as :func:`sums_of_numbers` where the lengths can be read.
    """
    if lengths.is_cpu and not (has_watchers() or is_any_special(lengths)):
        return sums_of_numbers(lengths.tolist())
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def sums_of_numbers(lengths: Iterable[int]) -> Tensor:
    """The same of a list, on the CPU; raises ``ValueError`` where int32 does not hold them."""
    ends = [*accumulate(lengths, initial=0)]
    try:
        # A third of the time that torch.tensor takes.
        return torch.frombuffer(array("i", ends), dtype=torch.int32)
    except OverflowError:
        most = max(ends, key=abs)
        raise ValueError(f"all sequences have {most} keys; {2**31 - 1} are served") from None


def softmax_delta(dout: Tensor, out: Tensor) -> Tensor:
    """The sum of ``dout * out`` for each query and head, with heads before queries."""
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()


def written_to(
    out: Tensor | None, result: Tensor, output_scale: Tensor | None = None, name: str = "out"
) -> Tensor:
    """``result`` in an ``out`` of any dtype; with ``output_scale`` divided by it.

    Where ``out`` has 8 bits it holds the nearest that it can.
    """
    out = check_out(name, out, result)
    if output_scale is not None:
        if not isinstance(output_scale, Tensor) or output_scale.numel() != 1:
            raise ValueError(
                f"output_scale is {describe(output_scale)}; expected a tensor of one number"
            )
        result = result.float() / output_scale
    if out.dtype.itemsize == 1:
        largest = torch.finfo(out.dtype).max
        result = result.clamp(-largest, largest)
    write_values(out, result)
    return out


_WRITTEN_DTYPES = (*FP8_NAMES, torch.bfloat16, torch.float16, torch.float32)


def check_out(name: str, out: Tensor | None, like: Tensor) -> Tensor:
    """``out``, to which a result with the shape of ``like`` can be written.

    Raises ``TypeError`` or ``ValueError`` where it cannot.
    """
    if not isinstance(out, Tensor) or out.shape != like.shape:
        raise ValueError(
            f"{name} is {describe(out)}; expected a tensor of shape {tuple(like.shape)}, of the "
            "dtype that is to be written"
        )
    check_all_beside((("the result", like), (name, out)))
    if out.requires_grad:
        raise ValueError(f"{name} requires grad; what is written to it has no gradient")
    if out.dtype not in _WRITTEN_DTYPES:
        raise TypeError(f"{name} has dtype {out.dtype}; it must be fp8 (e4m3), bf16, fp16 or fp32")
    if overlaps_itself(out):
        raise ValueError(f"{name} has strides {out.stride()} with which its elements overlap")
    return out


@noted
def with_contiguous_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it where its last dimension is not contiguous.

    What is no strided tensor is refused later, as are dtypes of which torch makes no copy.
    """
    if isinstance(x, Tensor) and x.layout is _STRIDED and x.dim() > 0 and x.stride(-1) != 1:
        with suppress(NotImplementedError):
            return x.contiguous()
    return x


def _python_value(value: object) -> object:
    """The Python value in a 0-dim tensor, array or NumPy number; anything else as it is."""
    if isinstance(value, _PLAIN_TYPES) or getattr(value, "ndim", None) != 0:
        return value
    try:
        return value.item()  # type: ignore[attr-defined]  # what has a ndim has an item
    except (AttributeError, RuntimeError, NotImplementedError):
        return value  # without a value, as meta tensors are: the caller refuses it


def _listed(entries: object) -> object:
    """The entries of a tensor or an array of one dimension as a list; anything else as it is."""
    if getattr(entries, "ndim", None) != 1:
        return entries
    try:
        return entries.tolist()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return entries
