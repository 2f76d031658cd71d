"""Values from JSON as what annotations say: the fields of NamedTuples and dataclasses, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .score_features import SCORE_FEATURES, AskedModifiers

Hints = Mapping[str, Any]
_MODIFIERS: Hints = {
    row.name: str | bool | None if row.default is None else type(row.default)
    for row in SCORE_FEATURES
}


class FieldError(ValueError):
    """A value that is not what its place is for; the text names both."""


def typed(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``: lists become tuples, objects NamedTuples and dataclasses.

    Raises ``FieldError``, naming the place below ``where``, for whatever is not of that type, and
    for fields that are missing or not known.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and type(None) in parts:
            return None
        return _first_that_fits([x for x in parts if x is not type(None)], kind, value, where)
    if origin is Literal:
        fits = any(type(value) is type(x) and value == x for x in parts)
    elif origin is tuple:
        return _as_tuple(parts, kind, value, where)
    elif origin is not None:  # a mapping
        if not isinstance(value, dict):
            raise _wrong(kind, value, where)
        return {name: typed(parts[1], x, f"{where}.{name}") for name, x in value.items()}
    elif is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(**fields(hints_of(kind), value, where))
    elif kind is float and type(value) is int and value.bit_length() < 1000:
        return float(value)
    else:
        fits = type(value) is kind
    if not fits:
        raise _wrong(kind, value, where)
    return value


def hints_of(kind: Any) -> Hints:
    """The types of the fields by name."""
    return _MODIFIERS if kind is AskedModifiers else get_type_hints(kind)


def fields(hints: Hints, value: Any, where: str) -> dict[str, Any]:
    """All fields of an object, each as its type; ``where`` is empty for the whole."""
    if not isinstance(value, dict):
        raise FieldError(f"{where} is {value!r:.60}, not an object")
    places = {name: f"{where}.{name}" if where else name for name in (*hints, *value)}
    for name, place in places.items():
        if name not in value:
            raise FieldError(f"{place} is missing")
        if name not in hints:
            raise FieldError(f"{place:.100} is not known")
    return {name: typed(hint, value[name], places[name]) for name, hint in hints.items()}


def _first_that_fits(kinds: list[Any], kind: Any, value: Any, where: str) -> Any:
    if len(kinds) == 1:
        return typed(kinds[0], value, where)
    for each in kinds:
        try:
            return typed(each, value, where)
        except FieldError:
            continue
    raise _wrong(kind, value, where)


def _as_tuple(parts: tuple[Any, ...], kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(kind, value, where)
    of_each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
    if len(of_each) != len(value):
        raise _wrong(kind, value, where)
    pairs = zip(of_each, value, strict=True)
    return tuple(typed(part, x, f"{where}[{i}]") for i, (part, x) in enumerate(pairs))


def _wrong(kind: Any, value: Any, where: str) -> FieldError:
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return FieldError(f"{where} is {value!r:.60}, expected {name.replace('typing.', '')}")
