"""AITER's forward functions for bf16 on gfx950, by the names that its tests import.

Source: ``aiter/ops/mha.py`` of github.com/ROCm/aiter. Here they serve what
:func:`jitfmha.fmha_fwd` does, on every target.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..call.interface import fmha_fwd
from ..layers.peer_values import as_flag, as_int, as_softmax_scale, ends_in
from ..problem.arguments import Options
from ..problem.checks import require_cu_seqlens


def _batch(
    *, q: Tensor, k: Tensor, v: Tensor, softmax_scale: object, causal: object, **others: Any
) -> Tensor:
    options: Options = {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if as_flag("causal", causal) else 0,
        **others,  # type: ignore[typeddict-item]  # out, and the lengths of packed sequences
    }
    return fmha_fwd(q, k, v, **options)


def _group(
    *,
    seqstart_q: Tensor,
    seqstart_k: Tensor,
    seqstart_q_pad: Tensor | None,
    seqstart_k_pad: Tensor | None,
    max_seqlen_q: object,
    max_seqlen_k: object,
    **others: Any,
) -> Tensor:
    require_cu_seqlens(seqstart_q=seqstart_q, seqstart_k=seqstart_k)
    return _batch(
        cu_seqlens_q=seqstart_q,
        cu_seqlens_k=seqstart_k,
        cu_seqlens_q_padded=seqstart_q_pad,
        cu_seqlens_k_padded=seqstart_k_pad,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=as_int("max_seqlen_k", max_seqlen_k),
        **others,
    )


@ends_in(_batch)
def fmha_fwd_bf16_opus_fwd(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`jitfmha.aiter.flash_attn_func` without options; the result may have a place, ``out``.

    q, k and v are ``(b, s, heads, hdim)``.
    """


@ends_in(
    _group,
    cu_seqlens_q="seqstart_q",
    cu_seqlens_k="seqstart_k",
    cu_seqlens_q_padded="seqstart_q_pad",
    cu_seqlens_k_padded="seqstart_k_pad",
)
def fmha_fwd_bf16_opus_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
    seqstart_q: Tensor, seqstart_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    out: Tensor | None = None,
    seqstart_q_pad: Tensor | None = None, seqstart_k_pad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """:func:`fmha_fwd_bf16_opus_fwd` for packed sequences, ``(total, heads, hdim)``.

    seqstart_q, seqstart_k, seqstart_q_pad and seqstart_k_pad are ``cu_seqlens_q``,
    ``cu_seqlens_k``, ``cu_seqlens_q_padded`` and ``cu_seqlens_k_padded`` of
    :func:`jitfmha.fmha_fwd`.
    """
