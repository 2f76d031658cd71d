"""Calls of functions beside ``fmha_fwd`` that were there before, which skip the checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..planning.target import CALLS_HERE, TARGET_HERE

Run = Callable[..., Any]
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Prepare = Callable[[Arguments], Run]


def keeps_calls(kept: str, tensors: int) -> Callable[[Prepare[Arguments]], Prepare[Arguments]]:
    """Let a function return what it did for the same options and tensors of the same layout.

    Its arguments are one tuple, of so many tensors and then options.
    """
    first, behind = slice(tensors), slice(tensors, None)

    def keeping(prepare: Prepare[Arguments]) -> Prepare[Arguments]:
        def prepared(arguments: Arguments) -> Run:
            target = TARGET_HERE.get()
            calls = (CALLS_HERE if target is None else target.calls)[kept]
            try:
                options = arguments[behind]
                # 1, 1.0 and True are one key, but not all of them are valid.
                key: list[object] = [options, *[x.__class__ for x in options]]
                for x in arguments[first]:
                    key.append(  # noqa: PERF401 - with a list of tuples a call takes 0.2 us longer
                        None if x is None else (x.shape, x.stride(), x.dtype, x.is_cpu or x.device)
                    )
                run: Run | None = calls.prepared.get(tuple(key))
            except (AttributeError, TypeError, RuntimeError):  # the checks say of what
                return prepare(arguments)
            if run is None:
                run = prepare(arguments)
                calls.keep(tuple(key), run)
            return run

        return prepared

    return keeping
