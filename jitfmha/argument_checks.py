"""Checks of arguments that other packages' attention functions have and ``fmha_fwd`` has not.

Nothing is silently ignored: an argument that asks for what is not served yet raises
``NotImplementedError`` naming it and its value.
"""

from __future__ import annotations

from torch import Tensor


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


def check_dropout(dropout_p: object) -> None:
    """Accept ``dropout_p`` 0; other probabilities are not served, the rest is an error."""
    number = _number("dropout_p", dropout_p)
    if not 0 <= number < 1:
        raise ValueError(f"dropout_p={dropout_p!r} must be at least 0 and less than 1")
    refuse_nonzero(dropout_p=number)


def refuse_nonzero(**numbers: object) -> None:
    """Raise ``NotImplementedError`` for a number other than 0, which turns a feature on."""
    for name, value in numbers.items():
        if _number(name, value) != 0:
            raise NotImplementedError(f"{name}={value!r} is not implemented yet; use 0")


def refuse_given(**optional: object) -> None:
    """Raise ``NotImplementedError`` for an optional argument that is given."""
    for name, value in optional.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} ({_describe(value)}) is not implemented yet; use None"
            )


def require_cu_seqlens(**cu_seqlens: object) -> None:
    """Raise ``ValueError`` for prefix sums that are None, which elsewhere asks for batch mode."""
    for name, value in cu_seqlens.items():
        if value is None:
            raise ValueError(f"{name}=None: packed sequences need the prefix sums of their lengths")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} ({value!r})")
    return value


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)
