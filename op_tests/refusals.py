"""Calls that are refused: with an error of which type, and with which words in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Refusal = tuple[dict[str, Any], type[Exception], list[str]]


@contextmanager
def refused(error: type[Exception], *texts: str) -> Iterator[None]:
    """What is done inside ends in this error, whose message has all of these texts."""
    with pytest.raises(error) as raised:
        yield
    for text in texts:
        assert text in str(raised.value), f"{text!r} is not in {str(raised.value)!r}"


def values(error: type[Exception], **of_arguments: list[Any]) -> list[Refusal]:
    """Values of arguments that are refused by name, and given back."""
    return [
        ({name: value}, error, [name, repr(value)])
        for name, those in of_arguments.items()
        for value in those
    ]
