"""AITER's functions that are written in Triton, with the arguments of flash-attn 2 and a sink.

Source: ``aiter/ops/triton/attention/mha.py`` of github.com/ROCm/aiter. They end in what
:mod:`jitfmha.aiter` has; the lse of packed sequences is ``(total_q, hq)``, as it is there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .....layers import kv_cache
from .....layers.peer_values import as_flag, ends_in
from ....forward import called_by_models, forward_batch, forward_group

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_batch, _packed = called_by_models(forward_batch), called_by_models(forward_group)


def _attend(*, sink: Tensor | None, config: object, **given: Any) -> Any:
    return _batch(sink_ptr=sink, **given)


def _attend_packed(*, sink: Tensor | None, config: object, return_lse: object, **given: Any) -> Any:
    with_lse = as_flag("return_lse", return_lse)
    found = _packed(sink_ptr=sink, return_lse=with_lse, **given)
    return (found[0], found[1].T, *found[2:]) if with_lse else found


@ends_in(_attend, sink_ptr="sink")
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, deterministic: bool = True,
    return_lse: bool = False, return_attn_probs: bool = False,
    sink: Tensor | None = None, config: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """:func:`jitfmha.aiter.flash_attn_func`.

    sink: its ``sink_ptr``; config: no effect.
    """


@ends_in(_attend_packed, sink_ptr="sink")
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_lse: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None, out: Tensor | None = None,
    sink: Tensor | None = None, config: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """:func:`jitfmha.aiter.flash_attn_varlen_func`, with lse ``(total_q, hq)``.

    sink: its ``sink_ptr``; config: no effect.
    """


@ends_in(kv_cache.flash_attn_with_kvcache)
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None, softmax_scale: float | None = None,
    causal: bool = True, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    num_splits: int = 0, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None, alibi_slopes: Tensor | None = None,
    rotary_interleaved: bool = True, return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`jitfmha.flash_attn_with_kvcache` in another order, and causal by default."""
