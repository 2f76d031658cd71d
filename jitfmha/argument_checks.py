"""Checks that functions of the package have in common.

Nothing is silently ignored: an argument of another package's function that asks for what is not
served yet raises ``NotImplementedError`` naming it and its value.
"""

from __future__ import annotations

import torch
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


def refuse_given(**optional: object) -> None:
    """Raise ``NotImplementedError`` for an optional argument that is given."""
    for name, value in optional.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} ({describe(value)}) is not implemented yet; use None"
            )


def refuse_grad(function: str, **tensors: object) -> None:
    """Raise ``NotImplementedError`` where a gradient is asked for of a function without one."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad; {function} has no backward pass: call it under "
                "torch.no_grad()"
            )


def requires_any_grad(*optional: object) -> bool:
    """Whether any of the tensors among them requires grad."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in optional)


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
