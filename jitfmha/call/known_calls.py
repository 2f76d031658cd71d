"""Calls of functions beside ``fmha_fwd`` that were there before, which skip the checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from ..planning.target import CALLS_HERE, TARGET_HERE, KeptCalls
from ..problem.torch_parts import PLAIN_TYPES

Run = Callable[..., Any]
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Prepare = Callable[[Arguments], Run]


class Prepared(Generic[Arguments]):
    """A function that returns what it did for the same options and tensors of the same layout.

    Its arguments are one tuple, of so many tensors and then options.
    """

    def __init__(self, kept: str, tensors: int, prepare: Prepare[Arguments]) -> None:
        self._kept, self._prepare = kept, prepare
        self._first, self._behind = slice(tensors), slice(tensors, None)

    def __call__(self, arguments: Arguments) -> Run:
        try:
            calls, key = self._calls(), self.key_of(arguments)
            run: Run | None = calls.prepared.get(key)
        except (AttributeError, TypeError, RuntimeError):  # the checks say of what
            return self._prepare(arguments)
        if run is None:
            run = self._prepare(arguments)
            calls.keep(key, run)
        return run

    def known(self, arguments: Arguments) -> Run | None:
        """What an earlier call left behind, of plain tensors: it asks of each once.

        None where there was none like it. Nobody may watch the call.
        """
        try:
            key = self.key_of(arguments, of_plain=True)
            return None if key is None else self.get(key)
        except (AttributeError, TypeError, RuntimeError):
            return None

    def get(self, key: Hashable) -> Run | None:
        """What was kept under a key of :meth:`key_of`."""
        return self._calls().prepared.get(key)

    def keep(self, key: Hashable, run: Run) -> None:
        """What :meth:`get` gives from now on."""
        self._calls().keep(key, run)

    def _calls(self) -> KeptCalls:
        target = TARGET_HERE.get()
        return (CALLS_HERE if target is None else target.calls)[self._kept]

    def key_of(self, arguments: Arguments, *, of_plain: bool = False) -> tuple[object, ...] | None:
        """What tells calls apart. None only with ``of_plain``, where a tensor is not plain.

        Raises ``AttributeError``, ``TypeError`` or ``RuntimeError`` where there is no such thing.
        """
        options = arguments[self._behind]
        # 1, 1.0 and True are one key, but not all of them are valid.
        key: list[object] = [options, *map(type, options)]
        for x in arguments[self._first]:
            if x is None:
                key.append(None)
            elif of_plain and (type(x) not in PLAIN_TYPES or x.is_neg()):
                return None
            else:
                # With a list of tuples a call takes 0.2 us longer.
                key.append((x.shape, x.stride(), x.dtype, x.is_cpu or x.device))
        return tuple(key)


def keeps_calls(kept: str, tensors: int) -> Callable[[Prepare[Arguments]], Prepared[Arguments]]:
    """Make a :class:`Prepared` of a function that prepares calls."""
    return lambda prepare: Prepared(kept, tensors, prepare)
