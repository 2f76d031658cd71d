"""Operators of functions beside attention, which are declared by a tuple of their arguments.

They are what torch.compile, transforms and tensor subclasses see. Calls of plain tensors go past
them, with their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic

import torch

from ...problem.arguments import new_tuple
from ...problem.torch_parts import (
    has_watchers,
    implement,
    is_watched,
    operator_of_gradients,
    operator_with_gradient,
    register_derivative,
)
from ..known_calls import Arguments, Prepared

library = torch.library.Library("jitfmha", "FRAGMENT")
_SCHEMAS = {"Tensor": "Tensor", "float": "float", "bool": "bool", "torch.dtype": "ScalarType"}


class Operator(Generic[Arguments]):
    """``torch.ops.jitfmha.<name>``.

    Args:
        arguments: a named tuple, of whose types the schema is made: others than tensors, numbers,
            flags and dtypes are words.
        results: their schema; of several that not every call has ``Tensor[]``.
        prepare: what computes them, of the tensors, which stand first.
        fake: what has their shapes and dtypes, after all checks.
        vmap: as ``torch.library.register_vmap`` takes it.
        before: what a call does first, such as to say what the dispatcher says less clearly.
        written: a letter for each argument that is written to.
    """

    def __init__(
        self,
        name: str,
        arguments: type[Arguments],
        results: str,
        prepare: Prepared[Arguments],
        fake: Callable[[Arguments], Any],
        vmap: Callable[..., Any],
        before: Callable[[Arguments], object] | None = None,
        written: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._arguments, self._before = name, arguments, before
        marks, types = written or {}, arguments.__annotations__
        declared = ", ".join(
            f"{_schema(each.__forward_arg__, marks.get(of, ''))} {of}" for of, each in types.items()
        )
        tensors = sum(each.__forward_arg__.startswith("Tensor") for each in types.values())
        self._tensors = first = slice(tensors)
        self._known = prepare.known
        self.launch: Callable[[Arguments], Any] = lambda given: prepare(given)(*given[first])
        library.define(f"{name}({declared}) -> {results}")
        implement(
            *(library, name),
            lambda *given: self.launch(new_tuple(arguments, given)),
            lambda *given: fake(new_tuple(arguments, given)),
        )
        torch.library.register_vmap(f"jitfmha::{name}", vmap, lib=library)
        self._operator = getattr(torch.ops.jitfmha, name)

    def call(self, arguments: Arguments) -> Any:
        """Go through torch's dispatcher."""
        if self._before is not None:
            self._before(arguments)
        return self._operator(*arguments)

    def differentiated(
        self, save: Callable[..., None], backward: Callable[..., Any], what: str
    ) -> Any:
        """Give it a derivative, and return the autograd function of calls of plain tensors."""
        name, make, launch = self._name, self._arguments, self.launch
        function = operator_with_gradient(name, save, backward)
        register_derivative(library, name, function, what)

        def forward(ctx: Any, *given: Any) -> Any:
            results = launch(new_tuple(make, given))
            save(ctx, given, results)
            return results

        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(f"Eager_{name}", (torch.autograd.Function,), functions)

    def not_differentiated(self, what: str) -> None:
        """Say of gradients of this that they have none."""
        register_derivative(library, self._name, operator_of_gradients(self._name, what), what)

    def run(self, arguments: Arguments, *, may_have_gradient: bool = False) -> Any:
        """Past torch's dispatcher, where nobody has to know of the call."""
        if not (may_have_gradient or has_watchers()):
            known = self._known(arguments)
            if known is not None:
                return known(*arguments[self._tensors])
        given = [x for x in arguments[self._tensors] if x is not None]
        if may_have_gradient or (given and is_watched(given[0], given[0], given[0], *given[1:])):
            return self.call(arguments)
        return self.launch(arguments)


def _schema(annotated: str, mark: str) -> str:
    kind, _, optional = annotated.partition(" | ")
    of_torch = _SCHEMAS.get(kind, "str")
    return f"{of_torch}{f'({mark}!)' if mark else ''}{'?' if optional else ''}"
