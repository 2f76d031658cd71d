"""Calls of other libraries' functions that were there before: from their tensors to the kernel.

The first call of a kind goes all the way down, and what is made of its tensors is noted there. A
later call does that once more with its own tensors, and nothing else. So each tensor must be known
to be passed on as it is, to be what a noted one was made of, or to be left out; a call of which
this is not known for one tensor goes all the way every time.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..call.interface import fmha_fwd
from ..call.known_calls import Prepared
from ..call.run import PreparedCall, prepared_call, run_prepared
from ..problem.arguments import Arguments, CuSeqlens, Descales, KeyOptions
from ..problem.checks import requires_any_grad
from ..problem.mask import INT64_MAX
from ..problem.score_features import Modifiers
from ..problem.torch_parts import PLAIN_TYPES, has_watchers, is_any_autocast_enabled, is_traced

P = ParamSpec("P")
R = TypeVar("R")
Picker = Callable[[Sequence[Any]], tuple[Any, ...]]

# A value, and the function and the arguments that made it.
_Made = tuple[object, Callable[..., object], tuple[object, ...]]
_NESTED = CuSeqlens, Descales, KeyOptions, Modifiers


class _Notes:
    """What a call made on its way: ``made`` of what, by what; ``left_out``; its attention."""

    def __init__(self) -> None:
        self.made: list[_Made] = []
        self.left_out: list[object] = []
        self.attended: list[tuple[Arguments, tuple[Tensor | None, ...]]] = []


class _Taken(threading.local):
    notes: _Notes | None = None


_TAKEN = _Taken()


def _notes() -> _Notes | None:
    return None if is_traced() else _TAKEN.notes


def noted(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes something of its arguments by their values, and nothing of others.

    It is asked again in a known call. What is no tensor must be equal then.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        result = function(*arguments, **named)
        notes = _notes()
        if notes is not None and not any(result is x for x in arguments):
            assert not named, "a known call gives arguments by position"
            notes.made.append((result, function, arguments))
        return result

    return call


def note_left_out(*given: object) -> None:
    """That nothing is made of these, as far as their values go."""
    notes = _notes()
    if notes is not None:
        notes.left_out += given


def attend_noted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
    *,
    return_lse: bool,
    is_all: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What ``fmha_fwd`` gives; with ``is_all`` nothing else is done that a known call has to do."""
    found = fmha_fwd(q, k, v, return_lse=return_lse, **options)
    out, lse = (found, None) if isinstance(found, Tensor) else found
    notes = _notes()
    if notes is not None and is_all:
        arguments = Arguments.of(q, k, v, {**options, "return_lse": return_lse})
        notes.attended.append((arguments, (out, lse)))
    return out, lse


class _Step(NamedTuple):
    """A noted function, what takes its arguments out of what is there, and what it must return."""

    function: Callable[..., object]
    pick: Picker
    expected: object


class _Known(NamedTuple):
    """A call of which everything but its tensors is settled.

    Attributes:
        constants: of options.
        steps: that make something of tensors and constants, the arguments of attention in the end.
        results_of: what the call returns of ``(out, lse)``.
        is_tuple: whether that is one, also where it is of one tensor.
    """

    prepared: PreparedCall
    constants: Sequence[object]
    steps: Sequence[_Step]
    results_of: Picker
    is_tuple: bool

    def run(self, *given: object) -> Any:
        """Its results for tensors and the longest length; ``NotImplemented`` for other values."""
        prepared, constants, steps, results_of, is_tuple = self
        there: list[Any] = [*given, *constants]
        for function, pick, expected in steps:
            x = function(*pick(there))
            if expected is not _ANY and x != expected:
                return NotImplemented
            there.append(x)
        results = results_of(run_prepared(prepared, there[-1]))
        return results if is_tuple else results[0]


_ANY, _ABSENT, _LONGEST = object(), object(), object()
# Windows that no length closes.
_OPEN = {(-1, -1), (-1, -1, 0), (None,), (_ABSENT,)}
# Options that are what they look like: a tensor of one number may hold another one next time.
_PLAIN_OPTIONS = frozenset((int, float, bool, str, type(None), torch.dtype, object))


class KnownAttention:
    """What ``core`` does, with known calls of the function that is declared so.

    ``longest`` is its argument that is the longest length of keys, another one in each step.
    """

    def __init__(
        self, core: Callable[..., Any], declared: Callable[..., object], longest: str
    ) -> None:
        self._core = core
        parameters = inspect.signature(declared).parameters.values()
        tensors = [x.name for x in parameters if "Tensor" in x.annotation]
        others = *tensors, "window_size", longest
        self._options = [x.name for x in parameters if x.name not in others]
        # Lists of pages are longer in every step, too.
        self._fixed = [name for name in tensors if name != "kv_page_indices"]
        self._tensors = (*self._fixed, *(name for name in tensors if name not in self._fixed))
        self._longest = longest
        name = f"{declared.__module__}.{declared.__qualname__}"
        self._calls = Prepared[Any](name, len(self._fixed), lambda _: _go_all_the_way)

    def __call__(self, **given: Any) -> Any:
        """What ``core`` returns for these arguments."""
        core = self._core
        tensors = tuple(map(given.get, self._tensors))
        if (
            has_watchers()
            or is_any_autocast_enabled()
            or (torch.is_grad_enabled() and requires_any_grad(*tensors))
        ):
            return core(**given)
        key, run = self._looked_up(given, tensors)
        if key is None:
            return core(**given)
        if run is None:
            # Of steps of which each has other numbers of queries nothing is noted.
            self._calls.keep(key, _note_the_next)
            return core(**given)
        if run is _note_the_next:
            return self._note(given, tensors, key)
        results = run(*tensors, given.get(self._longest))
        return core(**given) if results is NotImplemented else results

    def _looked_up(
        self, given: Mapping[str, Any], tensors: tuple[Any, ...]
    ) -> tuple[Any, Callable[..., Any] | None]:
        """What the call is known by, and what was kept under that.

        None where there is no such thing, or a tensor is not plain.
        """
        window, longest = given.get("window_size", _ABSENT), given.get(self._longest, _ABSENT)
        entries = window if window.__class__ in (tuple, list) else (window,)
        # Which tensors are one: what is made of one is not made of the other.
        numbers, fixed = [*map(id, tensors)], len(self._fixed)
        beside: tuple[object, ...] = window.__class__, *map(numbers.index, numbers)
        try:
            for x in tensors[fixed:]:
                if type(x) not in PLAIN_TYPES or x.is_neg():
                    return None, None
                beside += x.dim(), x.stride(), x.dtype, x.is_cpu or x.device
            if (
                longest.__class__ is int
                and 0 <= longest <= INT64_MAX
                and tuple(entries) in _OPEN
                and given.get("bias") is None
            ):
                longest = _LONGEST
            options = map(given.get, self._options, repeat(_ABSENT))
            all_of_it = *tensors[:fixed], *options, *entries, longest, beside
            key = self._calls.key_of(all_of_it, of_plain=True)
            return key, None if key is None else self._calls.get(key)
        except (AttributeError, TypeError, RuntimeError):
            return None, None

    def _note(
        self, given: Mapping[str, Any], tensors: tuple[Tensor | None, ...], key: tuple[Any, ...]
    ) -> Any:
        before, notes = _TAKEN.notes, _Notes()
        _TAKEN.notes = notes
        try:
            results = self._core(**given)
        finally:
            _TAKEN.notes = before
        run: Callable[..., Any] | None = None
        options = key[0][:-1]
        have_values = not any(x is not None and x.is_meta for x in tensors)
        if have_values and all(type(x) in _PLAIN_OPTIONS for x in options):
            longest = given[self._longest] if options[-1] is _LONGEST else None
            run = _known_of(notes, tensors, longest, results)
        self._calls.keep(key, run or _go_all_the_way)
        return results


def _go_all_the_way(*_: object) -> Any:
    return NotImplemented


def _note_the_next(*_: object) -> Any:
    return NotImplemented


def _known_of(
    notes: _Notes, tensors: tuple[Tensor | None, ...], longest: int | None, results: object
) -> Callable[..., Any] | None:
    """What a later call does in place of this one; None where that is not known."""
    if len(notes.attended) != 1:
        return None
    ((arguments, found),) = notes.attended
    if arguments.dropout is not None:  # which draws other numbers each time
        return None
    prepared, sums = prepared_call(arguments), arguments.cu_seqlens
    if longest is not None and sums is not None and sums.max_seqlen_k == longest:
        of_each: Any = _LONGEST
        arguments = arguments._replace(cu_seqlens=sums._replace(max_seqlen_k=of_each))
    nested: list[tuple[object, ...]] = [x for x in arguments if isinstance(x, _NESTED)]
    made: list[_Made] = [*notes.made, *((x, type(x), x) for x in (*nested, arguments))]
    parts = [x for _, _, of in made for x in of]
    constants = [x for x in parts if not isinstance(x, Tensor) and _place_of(x, nested) is None]
    there = [*tensors, _LONGEST, *constants]
    steps = []
    for result, function, of in made:
        picked = _picker(of, there)
        if picked is None:
            return None
        expected = _ANY if isinstance(result, (Tensor, tuple)) else result
        steps.append(_Step(function, picked, expected))
        there.append(result)
    results_of = _picker(results if type(results) is tuple else (results,), found)
    if results_of is None or any(_place_of(x, [*parts, *notes.left_out]) is None for x in tensors):
        return None
    is_tuple = type(results) is tuple
    return _Known(prepared, constants, steps, results_of, is_tuple).run


def _place_of(x: object, values: Sequence[object]) -> int | None:
    return next((at for at, y in enumerate(values) if y is x), None)


def _picker(values: Sequence[object], there: Sequence[object]) -> Picker | None:
    """What takes these out of what is there; None where one is not."""
    places = [at for x in values if (at := _place_of(x, there)) is not None]
    if len(places) != len(values):
        return None
    if len(places) == 1:
        return lambda there: (there[places[0]],)
    return itemgetter(*places)
