"""The operator ``torch.ops.jitfmha.qk_norm_rope_cache_``.

It writes into ``q_out``, ``k_out`` and the caches, and has no derivative.
"""

from __future__ import annotations

from typing import Any

import torch

from ...call.pytorch.operator import Operator
from .problem import HeadArguments, traits_of
from .run import prepared_heads


class _HeadOperator(Operator[HeadArguments]):
    def call(self, arguments: HeadArguments) -> None:
        """Where nothing that is written may be what is read."""
        if not torch.compiler.is_compiling():
            traits_of(arguments)  # which says what the dispatcher says less clearly
        own: dict[str, Any] = {}
        for name, x in (("q_out", arguments.q), ("k_out", arguments.k)):
            if x is not None and getattr(arguments, name) is x:
                own[name] = torch.empty_like(x)
        super().call(arguments._replace(**own))
        for name, made in own.items():
            getattr(arguments, name).copy_(made)


def _fake(arguments: HeadArguments) -> None:
    traits_of(arguments)


def _map(*_: Any) -> None:
    raise NotImplementedError(
        "torch.vmap does not serve qk_norm_rope_cache, which writes to what it is given; pass the "
        "examples as sequences, (b, s, heads, hdim)"
    )


operator = _HeadOperator(
    *("qk_norm_rope_cache_", HeadArguments, "()", prepared_heads, _fake, _map),
    written={"q_out": "a", "k_out": "b", "k_cache": "c", "v_cache": "d"},
)
