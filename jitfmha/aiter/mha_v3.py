"""AITER's functions with the arguments of flash-attn 3.

Source: ``aiter/ops/triton/attention/mha_v3.py`` of github.com/ROCm/aiter. They have the names of
others in this package, and are imported from that place: ``aiter.ops.triton.attention.mha_v3``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.interface import OFF, fmha_fwd
from ..layers import kv_cache
from ..layers.kv_cache import starts_in_batch
from ..layers.peer_values import (
    as_flag,
    as_int,
    as_softcap,
    as_softmax_scale,
    as_window,
    drop_without_effect,
    ends_in,
    window_pair,
    with_contiguous_rows,
)
from ..problem.arguments import Options
from ..problem.checks import (
    check_layout,
    check_prefix_sums,
    describe,
    not_a_tensor,
    refuse_given,
    require_cu_seqlens,
    requires_any_grad,
)
from .fp8 import quantized

__all__ = [
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_varlen_fp8_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def _refuse(qv: Tensor | None, attention_chunk: object, sm_margin: object) -> None:
    refuse_given(qv=qv)
    as_int("sm_margin", sm_margin)  # how many compute units to leave alone is no number of a result
    if as_int("attention_chunk", attention_chunk) != 0:
        raise NotImplementedError(f"attention_chunk={attention_chunk!r} is not implemented yet")


def _attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: object,
    causal: object,
    window_size: object,
    softcap: object,
    attention_chunk: object,
    sm_margin: object,
    deterministic: object,
    qv: Tensor | None = None,
    num_splits: object = 0,
    pack_gqa: object = None,
    **others: Any,
) -> Tensor:
    _refuse(qv, attention_chunk, sm_margin)
    left, right, _ = as_window(window_size)
    as_int("num_splits", num_splits)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if name in others:
            others[name] = as_int(name, others[name])
    options: Options = {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if as_flag("causal", causal) else 0,
        "window_size": window_pair(left, right),
        "logit_softcap": as_softcap("softcap", softcap) or OFF,
        "deterministic": as_flag("deterministic", deterministic) or None,
        **others,  # type: ignore[typeddict-item]  # scales, and the lengths of packed sequences
    }
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    return fmha_fwd(q, k, v, **options)


def _attend_cache(
    *,
    qv: Tensor | None,
    attention_chunk: object,
    sm_margin: object,
    page_table: Tensor | None,
    rotary_seqlens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    _refuse(qv, attention_chunk, sm_margin)
    refuse_given(
        rotary_seqlens=rotary_seqlens, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new
    )
    drop_without_effect(others, "pack_gqa", "max_seqlen_q")
    return kv_cache.flash_attn_with_kvcache(
        block_table=page_table, rotary_interleaved=False, **others
    )


def _attend_in_fp8(*, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
    given, is_group = {"q": q, "k": k, "v": v}, "cu_seqlens_q" in others
    if is_group:
        require_cu_seqlens(cu_seqlens_q=others["cu_seqlens_q"], cu_seqlens_k=others["cu_seqlens_k"])
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        check_layout(name, x)
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"{name} has dtype {x.dtype}; it must be bf16, fp16 or fp32")
        if x.dim() != (3 if is_group else 4) or 0 in x.shape[-2:]:
            shape = "(rows, heads, hdim)" if is_group else "(batch, seqlen, heads, hdim)"
            raise ValueError(f"{name} is {describe(x)}; expected {shape}")
    heads_k = k.shape[-2]
    if q.shape[-2] % heads_k or v.shape[-2] != heads_k:
        raise ValueError(
            f"q is {describe(q)}, k {describe(k)} and v {describe(v)}; expected as many heads of "
            "v as of k, and of q a multiple of them"
        )
    options: dict[str, Tensor] = {}
    with_gradient = torch.is_grad_enabled() and requires_any_grad(q, k, v)
    for name, x in given.items():
        if is_group:
            sums_name = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
            sums = others[sums_name]
            check_prefix_sums(sums_name, sums, name, x)
        else:
            sums = starts_in_batch(x.shape[0], x.shape[1], x.device)
        rows = x if is_group else x.flatten(0, 1)
        rounded, scale, as_rounded = quantized(rows, heads_k, sums)
        if with_gradient:
            given[name] = as_rounded.view(x.shape)
        else:
            given[name], options[f"{name}_descale"] = rounded.view(x.shape), scale
    return _attend(**given, **options, **others).float()


@ends_in(_attend)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """:func:`jitfmha.flash_attn_func` with the arguments of flash-attn 3, which returns out alone.

    q_descale, k_descale, v_descale: what fp8 inputs are multiplied with.
    qv, attention_chunk: None and 0; others are refused.
    num_splits, pack_gqa, sm_margin: no effect.
    """


@ends_in(_attend)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """:func:`flash_attn_func` for sequences that are packed one after the other."""


@ends_in(_attend_in_fp8)
def flash_attn_fp8_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """:func:`flash_attn_func` of tensors of 16 or 32 bits, which are rounded to fp8.

    Each sequence and head of keys has its scales. The result is float32. Where a gradient is asked
    for, attention is computed in q's dtype with the numbers as they are rounded, and rounding has
    the derivative 1.
    """


@ends_in(_attend_in_fp8)
def flash_attn_varlen_fp8_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """:func:`flash_attn_fp8_func` for sequences that are packed one after the other."""


@ends_in(_attend_cache, block_table="page_table")
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, cache_seqlens: Tensor | int | None = None,
    softmax_scale: float | None = None, causal: bool = True,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    max_seqlen_q: int | None = None, return_softmax_lse: bool = False,
    page_table: Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`jitfmha.flash_attn_with_kvcache` with the arguments of flash-attn 3.

    page_table: its ``block_table``.
    rotary_cos, rotary_sin: rotate halves (GPT-NeoX).
    qv, attention_chunk, rotary_seqlens, cu_seqlens_q, cu_seqlens_k_new: None and 0; others are
        refused.
    pack_gqa, sm_margin, max_seqlen_q: no effect.
    """
