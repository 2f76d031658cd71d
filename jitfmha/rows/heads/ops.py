"""The operator ``torch.ops.jitfmha.qk_norm_rope_cache_``: what torch.compile and modes see.

It writes into ``q_out``, ``k_out`` and the caches, and has no derivative.
"""

from __future__ import annotations

from typing import Any

import torch

from ...problem.torch_parts import implement
from .problem import N_TENSORS, HeadArguments, traits_of
from .run import run_heads

_WRITTEN = ("q_out", "k_out", "k_cache", "v_cache")
_NAMES = HeadArguments._fields
_OPERATOR = "qk_norm_rope_cache_"


def _schema() -> str:
    marks = dict(zip(_WRITTEN, "abcd", strict=True))
    tensors = (
        f"Tensor({marks[name]}!)? {name}" if name in marks else f"Tensor? {name}"
        for name in _NAMES[:N_TENSORS]
    )
    return f"{_OPERATOR}({', '.join(tensors)}, float eps, bool interleaved, bool q_moves) -> ()"


_library = torch.library.Library("jitfmha", "FRAGMENT")
_library.define(_schema())


def call_operator(arguments: HeadArguments) -> None:
    """Go through torch's dispatcher, where nothing that is written may be what is read."""
    if not torch.compiler.is_compiling():
        traits_of(arguments)  # which says what the dispatcher says less clearly
    own: dict[str, Any] = {}
    for name, x in (("q_out", arguments.q), ("k_out", arguments.k)):
        if x is not None and getattr(arguments, name) is x:
            own[name] = torch.empty_like(x)
    torch.ops.jitfmha.qk_norm_rope_cache_(*arguments._replace(**own))
    for name, made in own.items():
        getattr(arguments, name).copy_(made)


def _run(*given: Any) -> None:
    run_heads(HeadArguments(*given))


def _fake(*given: Any) -> None:
    traits_of(HeadArguments(*given))


implement(_library, _OPERATOR, _run, _fake)


def _map(*_: Any) -> None:
    raise NotImplementedError(
        "torch.vmap does not serve qk_norm_rope_cache, which writes to what it is given; pass the "
        "examples as sequences, (b, s, heads, hdim)"
    )


torch.library.register_vmap("jitfmha::qk_norm_rope_cache_", _map, lib=_library)
