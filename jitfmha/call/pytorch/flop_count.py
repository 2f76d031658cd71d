"""How many floating-point operations attention takes, for ``torch.utils.flop_counter``.

What counts is the matrix products, with two operations for each multiply-add, of the pairs of query
and key that the mask shows: two products in forward, and in backward five, one of which computes
the scores again. What a boolean bias hides counts, as do probabilities that are dropped; the
softmax does not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...problem.mask import Mask
from ...problem.packed_pages import shape_of_keys
from ...problem.page_lists import most_pages
from ...problem.torch_parts import dispatch_modes
from .ops import BACKWARD_NAMES, NAMES, NAMES_WITH_OUT, mask_of

_OPERATIONS = 2  # a multiplication and an addition


def join_flop_counters(formulas: Mapping[Any, Any] | None = None) -> None:
    """Let every ``FlopCounterMode`` count our operators, those too that are counting already.

    They are attention's where no ``formulas`` of others are given.

    The module is not imported for that: with it comes Triton, which takes long.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    counters = [getattr(mode, "counter", None) for mode in dispatch_modes()]
    counting = [x.flop_registry for x in counters if isinstance(x, module.FlopCounterMode)]
    for registry in (module.flop_registry, *counting):
        for operator, formula in (formulas or _formulas()).items():
            registry.setdefault(operator, formula)


def _formulas() -> dict[Any, Any]:
    operators = torch.ops.jitfmha
    return {
        operators.fmha_fwd: _forward_flops,
        operators.fmha_fwd_out: _forward_flops_with_out,
        operators.fmha_bwd: _backward_flops,
    }


def _forward_flops(*given: Any, out_val: object = None, **named: Any) -> int:
    return _flops(dict(zip(NAMES, given, strict=False)) | named, of_q=1, of_v=1)


def _forward_flops_with_out(*given: Any, out_val: object = None, **named: Any) -> int:
    return _flops(dict(zip(NAMES_WITH_OUT, given, strict=False)) | named, of_q=1, of_v=1)


def _backward_flops(*given: Any, out_val: object = None, **named: Any) -> int:
    return _flops(dict(zip(BACKWARD_NAMES, given, strict=False)) | named, of_q=3, of_v=2)


def _flops(flat: dict[str, Any], *, of_q: int, of_v: int) -> int:
    """Products along the head dimension of q and k, and products along that of v."""
    q, v = flat["q"], flat["v"]
    mask, sink_size = mask_of(flat["mask"], flat["window_size"]), flat.get("sink_size", 0)
    pairs = sum(visible_pairs(sq, sk, mask, sink_size) for sq, sk in _lengths(flat))
    hdims = of_q * q.shape[-1] + of_v * v.shape[-1]
    count: int = _OPERATIONS * q.shape[-2] * hdims * pairs
    return count


def _lengths(flat: dict[str, Any]) -> list[tuple[int, int]]:
    """Queries and keys of each sequence.

    Where tensors have no values, packed sequences count as if all were equally long.
    """
    q, k, sums_q, sums_k = flat["q"], flat["k"], flat["cu_seqlens_q"], flat["cu_seqlens_k"]
    if sums_q is None:
        return [(q.shape[1], k.shape[1])] * q.shape[0]
    batch = sums_q.shape[0] - 1
    if all(type(x) is Tensor and not x.is_meta for x in (sums_q, sums_k)):
        of_q, of_k = (x.diff().tolist() for x in (sums_q, sums_k))
        return list(zip(of_q, of_k, strict=True))
    table = flat.get("block_table")
    longest_k = k.shape[0] // max(batch, 1)
    if table is not None:
        longest_k = most_pages(table, batch) * shape_of_keys(k)[1]
    return [(q.shape[0] // max(batch, 1), longest_k)] * batch


def visible_pairs(seqlen_q: int, seqlen_k: int, mask: Mask, sink_size: int) -> int:
    """How many pairs of query and key the mask shows, with the sink tokens of its left side."""
    shift = 0 if mask.top_left else seqlen_k - seqlen_q
    if mask.right is None:
        pairs = seqlen_q * seqlen_k
    else:
        pairs = _pairs_up_to(shift + mask.right, seqlen_q, seqlen_k)
    if mask.left is None:
        return pairs
    first_hidden = shift - mask.left - 1
    hidden = _pairs_up_to(first_hidden, seqlen_q, seqlen_k)
    return pairs - hidden + _pairs_up_to(first_hidden, seqlen_q, min(sink_size, seqlen_k))


def _pairs_up_to(diagonal: int, seqlen_q: int, seqlen_k: int) -> int:
    """How many pairs have ``j <= i + diagonal``."""
    first = min(max(-diagonal, 0), seqlen_q)  # the first query that sees a key
    full = min(max(seqlen_k - diagonal, 0), seqlen_q)  # the first one that sees all, or behind it
    growing = (full - first) * (diagonal + 1) + (full * (full - 1) - first * (first - 1)) // 2
    return growing + (seqlen_q - full) * seqlen_k
