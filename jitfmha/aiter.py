"""AITER's ``fmha_v3_fwd`` and ``fmha_v3_varlen_fwd``: the same arguments in the same order.

Source: ``aiter/ops/mha.py`` and ``csrc/py_itfs_cu/asm_mha_fwd.cu``, ``asm_mha_varlen_fwd.cu`` of
github.com/ROCm/aiter. What is different here: any head dimensions up to 512, float32 and empty
batches on the CPU, and an lse of -inf (not +inf) where there are no keys.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .argument_checks import check_dropout, check_flags, check_ints, refuse_given, refuse_nonzero
from .arguments import Bf16Cvt
from .interface import fmha_fwd
from .mask import check_window_size
from .problem import BF16_CVTS


def fmha_v3_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    how_v3_bf16_cvt: int,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over a batch of sequences of equal length (gm0).

    Args:
        q: ``(b, sq, hq, hdim)``; k: ``(b, sk, hk, hdim)``; v: ``(b, sk, hk, hdim_v)``. Dtypes and
            strides as for :func:`jitfmha.fmha_fwd`.
        dropout_p: 0 only, for now.
        softmax_scale: finite and > 0, or None for ``1 / sqrt(hdim)``.
        is_causal: bottom-right causal mask; ``window_size_left`` stays in force, and
            ``window_size_right`` becomes 0.
        window_size_left, window_size_right: keys around the bottom-right diagonal; -1, and every
            value from sk up, leaves the side open.
        return_softmax_lse: whether to compute the log-sum-exp.
        return_dropout_randval: False only, for now.
        how_v3_bf16_cvt: how probabilities are rounded to bfloat16: 0 to nearest even, 1 to nearest
            away from zero, 2 toward zero. It chooses on gfx942 with bf16 inputs; elsewhere there
            is only one way, and it has no effect.
        out: where to write the result, ``(b, sq, hq, hdim_v)``.
        q_descale, k_descale, v_descale: what fp8 inputs are multiplied with, as for
            :func:`jitfmha.fmha_fwd`; None is 1.
        bias, alibi_slopes, gen: None only, for now.

    Returns:
        ``(out, softmax_lse, p, rng_state)``: lse float32 ``(b, hq, sq)``, or empty where it was not
        asked for; p the dropout's random values, empty; rng_state int64 ``(2,)``, zero without
        dropout.

    Raises:
        NotImplementedError: an argument asks for what is not served yet; the text names it.
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
    """
    check_flags(
        is_causal=is_causal,
        return_softmax_lse=return_softmax_lse,
        return_dropout_randval=return_dropout_randval,
    )
    bf16_cvt = _check_v3_options(dropout_p, return_dropout_randval, how_v3_bf16_cvt)
    check_ints(window_size_left=window_size_left, window_size_right=window_size_right)
    refuse_given(bias=bias, alibi_slopes=alibi_slopes, gen=gen)
    seqlen_k = k.shape[1] if isinstance(k, Tensor) and k.dim() > 1 else 0
    result = fmha_fwd(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        mask=2 if is_causal else 0,
        window_size=_window(is_causal, window_size_left, window_size_right, seqlen_k),
        return_lse=return_softmax_lse,
        out=out,
        bf16_cvt=bf16_cvt,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return _with_dropout_outputs(result, q)


def fmha_v3_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float,
    softmax_scale: float | None,
    logits_soft_cap: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax_lse: bool,
    return_dropout_randval: bool,
    how_v3_bf16_cvt: int,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gen: Generator | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over sequences of different lengths, packed one after the other (gm1).

    Args:
        q: ``(total_q, hq, hdim)``; k: ``(total_k, hk, hdim)``; v: ``(total_k, hk, hdim_v)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(b + 1,)``, prefix sums of the lengths, from 0.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        min_seqlen_q: 0 only, for now (other values skip sequences that are not longer).
        logits_soft_cap: 0 only, for now.
        zero_tensors: also set the rows of ``out`` to 0 that belong to no sequence. A fresh output
            has them 0 in any case.
        window_size_left, window_size_right: as for :func:`fmha_v3_fwd`; -1, and every value from
            ``max_seqlen_k`` up, leaves the side open.
        block_table: None only, for now.
        cu_seqlens_q_padded, cu_seqlens_k_padded: int32 ``(b + 1,)``, where each sequence starts if
            there are unused rows between them.

    The other arguments, and what is raised, are those of :func:`fmha_v3_fwd`.

    Returns:
        ``(out, softmax_lse, p, rng_state)`` as :func:`fmha_v3_fwd`, with lse ``(hq, total_q)``.
    """
    check_flags(
        zero_tensors=zero_tensors,
        is_causal=is_causal,
        return_softmax_lse=return_softmax_lse,
        return_dropout_randval=return_dropout_randval,
    )
    bf16_cvt = _check_v3_options(dropout_p, return_dropout_randval, how_v3_bf16_cvt)
    check_ints(
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        min_seqlen_q=min_seqlen_q,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
    )
    refuse_nonzero(min_seqlen_q=min_seqlen_q, logits_soft_cap=logits_soft_cap)
    refuse_given(block_table=block_table, bias=bias, alibi_slopes=alibi_slopes, gen=gen)
    result = fmha_fwd(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        mask=2 if is_causal else 0,
        window_size=_window(is_causal, window_size_left, window_size_right, max_seqlen_k),
        return_lse=return_softmax_lse,
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
        bf16_cvt=bf16_cvt,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    if zero_tensors and out is not None:
        padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        _zero_unused_rows(out, cu_seqlens_q, padded)
    return _with_dropout_outputs(result, q)


def _check_v3_options(
    dropout_p: float, return_dropout_randval: bool, how_v3_bf16_cvt: int
) -> Bf16Cvt:
    """The rounding that ``how_v3_bf16_cvt`` numbers, once all three are checked."""
    check_dropout(dropout_p)
    if return_dropout_randval:
        raise NotImplementedError("return_dropout_randval=True is not implemented yet; use False")
    check_ints(how_v3_bf16_cvt=how_v3_bf16_cvt)
    if not 0 <= how_v3_bf16_cvt < len(BF16_CVTS):
        raise ValueError(f"how_v3_bf16_cvt={how_v3_bf16_cvt} is not known; use 0, 1 or 2")
    return BF16_CVTS[how_v3_bf16_cvt]


def _window(is_causal: bool, left: int, right: int, seqlen_k: int) -> tuple[int, int]:
    left, right = check_window_size((left, right))
    if left >= seqlen_k:
        left = -1
    if is_causal or right >= seqlen_k:
        right = -1
    return left, right


def _zero_unused_rows(out: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> None:
    if cu_seqlens_padded.shape[0] == 1:  # no sequence at all
        out.zero_()
        return
    rows = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    # The sequence that a row would belong to; rows behind the last one count to the last.
    sequence = torch.searchsorted(cu_seqlens_padded[1:], rows, right=True).clamp(
        max=cu_seqlens_padded.shape[0] - 2
    )
    used = rows - cu_seqlens_padded[sequence] < cu_seqlens.diff()[sequence]
    out.masked_fill_(~used[:, None, None], 0)


def _with_dropout_outputs(
    result: Tensor | tuple[Tensor, Tensor], q: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """AITER's results; without dropout there are no random values and no state of a generator."""
    if isinstance(result, Tensor):
        out, lse = result, q.new_empty(0, dtype=torch.float32)
    else:
        out, lse = result
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64)
