"""The cases of parametrized tests, drawn without listing the hundreds of thousands there are."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

Parameters = dict[str, Any]


@dataclass(frozen=True)
class ParametrizedTest:
    """A test function, and what each of its ``pytest.mark.parametrize`` gives."""

    name: str
    function: Callable[..., object]
    axes: tuple[tuple[Parameters, ...], ...]

    @property
    def count(self) -> int:
        return math.prod(len(axis) for axis in self.axes)

    def case(self, number: int) -> Parameters:
        """The parameters of one of ``count`` cases."""
        parameters: Parameters = {}
        for axis in self.axes:
            number, at = divmod(number, len(axis))
            parameters |= axis[at]
        return parameters

    def cases(self, rng: random.Random | None) -> Iterator[Parameters]:
        """All of them, in their order or in one that is drawn."""
        drawn: set[int] = set()
        for number in range(self.count):
            if rng is not None:
                number = rng.randrange(self.count)
                while number in drawn:
                    number = rng.randrange(self.count)
                drawn.add(number)
            yield self.case(number)


def parametrized_tests(module: ModuleType) -> list[ParametrizedTest]:
    """The test functions of a module."""
    return [
        ParametrizedTest(name, function, tuple(_axes(function)))
        for name, function in vars(module).items()
        if name.startswith("test_") and callable(function) and not _is_switched_off(function)
    ]


def _is_switched_off(function: Callable[..., object]) -> bool:
    marks = getattr(function, "pytestmark", ())
    return any(mark.name == "skip" or (mark.name == "skipif" and mark.args[0]) for mark in marks)


def _axes(function: Callable[..., object]) -> Iterator[tuple[Parameters, ...]]:
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize":
            assert mark.name == "skipif", f"a mark that is not known: {mark.name}"
            continue
        names, values = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        yield tuple(_parameters(names, value) for value in values)


def _parameters(names: list[str], value: Any) -> Parameters:
    if isinstance(value, type(pytest.param())):
        value = value.values if len(names) > 1 else value.values[0]
    return dict(zip(names, value if len(names) > 1 else (value,), strict=True))
