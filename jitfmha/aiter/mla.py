"""AITER's functions for latent attention (MLA), as vLLM and SGLang call them.

Source: ``aiter/mla.py`` of github.com/ROCm/aiter. They end in :func:`jitfmha.mla_absorbed_fwd`,
which shares the work out and puts parts of keys together by itself: what
:func:`jitfmha.aiter.get_mla_metadata_v1` fills in has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.interface import OFF
from ..layers.mla import mla_absorbed_fwd
from ..layers.peer_values import (
    as_flag,
    as_int,
    as_number,
    as_softmax_scale,
    descales_of,
    drop_without_effect,
    ends_in,
    int32_vector,
    written_to,
)
from ..problem.arguments import Options
from ..problem.checks import (
    check_layout,
    describe,
    not_a_tensor,
    refuse_given,
    require_cu_seqlens,
    with_clear_errors,
)
from ..problem.dtypes import out_dtype_of
from ..problem.torch_parts import can_be_read
from .batch_prefill import lists_of_pages
from .paged import NAMES_OF_PROJECTED, attend_projected, pages_of_table, refuse_segments

__all__ = [
    "get_meta_param",
    "mla_decode_fwd",
    "mla_prefill_fwd",
    "mla_prefill_ps_fwd",
]
REFUSED = ("mla_decode_fwd_ds32", "mla_decode_fwd_v4_nm", "mla_v40_decode_fwd")
"""What is there for the sake of imports, and refuses every call."""
OFFERED = REFUSED


def _attend(
    *,
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor | None,
    max_seqlen_q: object,
    sm_scale: object,
    logit_cap: object,
    num_kv_splits: object,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    cp_world_size: object = 1,
    causal: object = True,
    return_lse: object = False,
    nhead_kv: object = 1,
    **without_effect: Any,
) -> tuple[Tensor, Tensor | None]:
    drop_without_effect(without_effect)
    if as_int("cp_world_size", cp_world_size) != 1:
        raise NotImplementedError(f"cp_world_size={cp_world_size!r}: keys of others are not known")
    if as_int("nhead_kv", nhead_kv) != 1:
        raise NotImplementedError(f"nhead_kv={nhead_kv!r}: a latent has one head")
    latent = _latent_of(kv_buffer)
    lse = _attend_pages(
        q=q,
        latent=latent,
        o=o,
        cu_seqlens_q=qo_indptr,
        pages=lists_of_pages(kv_indptr, kv_indices, kv_last_page_lens, latent.shape[1]),
        sm_scale=sm_scale,
        causal=causal,
        q_scale=q_scale,
        kv_scale=kv_scale,
        with_lse=as_flag("return_lse", return_lse),
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        logit_softcap=max(as_number("logit_cap", logit_cap), 0.0) or OFF,
        # One asks for sums in one order, whatever else is in the batch.
        num_splits=1 if type(num_kv_splits) is int and num_kv_splits == 1 else OFF,
    )
    return o, lse


def _latent_of(kv_buffer: Tensor) -> Tensor:
    """The pages without their dimension of one head."""
    if not isinstance(kv_buffer, Tensor):
        raise not_a_tensor("kv_buffer", kv_buffer)
    check_layout("kv_buffer", kv_buffer)
    if kv_buffer.dim() != 4 or kv_buffer.shape[2] != 1:
        raise ValueError(
            f"kv_buffer is {describe(kv_buffer)}; expected (num_pages, page_size, 1, rank + r)"
        )
    return kv_buffer[:, :, 0]


def _attend_pages(
    *,
    q: Tensor,
    latent: Tensor,
    o: Tensor,
    cu_seqlens_q: Tensor,
    pages: Options,
    sm_scale: object,
    causal: object,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    with_lse: bool,
    **given: Any,
) -> Tensor | None:
    """Write to ``o``, and return the lse ``(total_q, hq)`` where it is asked for."""
    require_cu_seqlens(qo_indptr=cu_seqlens_q)
    if not isinstance(q, Tensor):
        raise not_a_tensor("q", q)
    if not isinstance(o, Tensor) or o.dim() != 3:
        raise ValueError(f"o is {describe(o)}; expected (total_q, hq, rank)")
    scale = as_softmax_scale(sm_scale)
    options: Options = {
        "softmax_scale": max(latent.shape[-1], 1) ** -0.5 if scale is None else scale,
        "mask": 2 if as_flag("causal", causal) else 0,
        "cu_seqlens_q": cu_seqlens_q,
        **given,  # type: ignore[typeddict-item]
    }
    options |= pages
    options |= descales_of(q, latent, q_descale=q_scale, k_descale=kv_scale, v_descale=kv_scale)
    if o.dtype == out_dtype_of(q.dtype):
        options["out"] = o
    found = mla_absorbed_fwd(q, latent, o.shape[-1], return_lse=with_lse, **options)
    out, lse = (found, None) if isinstance(found, Tensor) else found
    if "out" not in options:
        written_to(o, out)
    return None if lse is None else lse.T


_NAMES = {
    "latent": "kv_buffer",
    "k": "kv_buffer",
    "v": "kv_buffer",
    "out": "o",
    "rank": "o",
    "cu_seqlens_q": "qo_indptr",
    "cu_seqlens_k": "kv_indptr",
    "cu_seqlens_k_padded": "kv_indptr",
    "block_table": "kv_indices",
    "kv_page_indices": "kv_indices",
    "softmax_scale": "sm_scale",
    "logit_softcap": "logit_cap",
    "q_descale": "q_scale",
    "k_descale": "kv_scale",
    "v_descale": "kv_scale",
}


@ends_in(_attend, **_NAMES)
def mla_decode_fwd(
    q: Tensor, kv_buffer: Tensor, o: Tensor,
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor | None,
    max_seqlen_q: int, page_size: int = 1, nhead_kv: int = 1,
    sm_scale: float | None = None, logit_cap: float = 0.0,
    num_kv_splits: int | None = None, num_kv_splits_indptr: Tensor | None = None,
    work_meta_data: Tensor | None = None, work_indptr: Tensor | None = None,
    work_info_set: Tensor | None = None, reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None, reduce_partial_map: Tensor | None = None,
    q_scale: Tensor | None = None, kv_scale: Tensor | None = None,
    intra_batch_mode: bool = False, return_logits: bool = False, return_lse: bool = False,
    g_kv_indptr: Tensor | None = None, cp_world_size: int = 1, cp_rank: int = 0,
    causal: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Latent attention of a few queries for each sequence, with the projection of keys in them.

    Args:
        q: ``(total_q, hq, rank + r)``.
        kv_buffer: ``(num_pages, page_size, 1, rank + r)``: the latent, then the positional key.
        o: where to write the result, ``(total_q, hq, rank)``.
        qo_indptr: int32 ``(b + 1,)``, prefix sums of the numbers of queries.
        kv_indptr, kv_indices, kv_last_page_lens: the pages of each sequence, as
            :func:`jitfmha.aiter.mha_batch_prefill` has them; the last is not looked at where a page
            holds one key.
        max_seqlen_q: the most queries of a sequence.
        sm_scale: ``1 / sqrt(rank + r)`` by default.
        logit_cap: a soft cap; up to 0 is none.
        num_kv_splits: 1 leaves keys in one piece. Others leave the choice.
        q_scale, kv_scale: what 8-bit queries and latents are multiplied with; no effect on others.
        causal: whether a query sees no keys behind its own, which are the last ones.
        cp_world_size, nhead_kv: 1; others are refused.
        page_size, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, reduce_indptr,
            reduce_final_map, reduce_partial_map, intra_batch_mode, return_logits, g_kv_indptr,
            cp_rank: no effect.

    Returns:
        ``(o, lse)``, lse being float32 ``(total_q, hq)``, and None where ``return_lse`` does not
        ask for it.
    """


@ends_in(_attend, **_NAMES)
def mla_prefill_fwd(
    q: Tensor, kv_buffer: Tensor, o: Tensor,
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_lens: Tensor | None,
    max_seqlen_q: int, sm_scale: float | None = None, logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """:func:`mla_decode_fwd` for prefill: causal, and without an lse."""


def _prefill_projected(
    *, output: Tensor, qo_indptr: Tensor, softmax_scale: object, **given: Any
) -> tuple[Tensor, Tensor]:
    reduction = "reduce_indptr", "reduce_final_map", "reduce_partial_map"
    drop_without_effect(given, "work_indptr", "work_info_set", *reduction)
    require_cu_seqlens(qo_indptr=qo_indptr)
    if not isinstance(output, Tensor) or output.dim() != 3:
        raise ValueError(f"output is {describe(output)}; expected (total_q, hq, hdim_v)")
    if softmax_scale is None:  # As in AITER: of v's head dimension.
        softmax_scale = max(output.shape[-1], 1) ** -0.5
    given |= {"output": output, "qo_indptr": qo_indptr, "softmax_scale": softmax_scale}
    _, lse = attend_projected(with_lse=True, **given)
    assert lse is not None
    return output, lse.T


@ends_in(_prefill_projected, **NAMES_OF_PROJECTED)
def mla_prefill_ps_fwd(
    Q: Tensor, K: Tensor, V: Tensor, output: Tensor,  # noqa: N803
    qo_indptr: Tensor, kv_indptr: Tensor, kv_page_indices: Tensor,
    work_indptr: Tensor | None, work_info_set: Tensor | None,
    max_seqlen_q: int, is_causal: bool,
    reduce_indptr: Tensor | None = None, reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None, softmax_scale: float | None = None,
    q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`jitfmha.aiter.mla_prefill_ps_asm_fwd` and what is to be done behind it, in one.

    softmax_scale: ``1 / sqrt(hdim_v)`` by default.
    reduce_indptr, reduce_final_map, reduce_partial_map: no effect.

    Returns:
        ``(output, lse)``, lse being float32 ``(total_q, hq)``; AITER's is that of its parts.
    """


@with_clear_errors
def get_meta_param(
    num_kv_splits: int | None, bs: int, total_kv: int, nhead: int, max_seqlen_q: int,
    dtype: torch.dtype, tg_factor: int = 1, ignore_total_kv: int = 0,
) -> tuple[int, Tensor]:  # fmt: skip
    """A number of splits for :func:`mla_decode_fwd`, and int32 ``(bs + 1,)``, multiples of it.

    The number is num_kv_splits, by default 2, which leaves the choice as others do. No other
    argument but ``bs`` has an effect.
    """
    count = 2 if num_kv_splits is None else as_int("num_kv_splits", num_kv_splits)
    return count, torch.arange(as_int("bs", bs) + 1, dtype=torch.int32) * count


# ---- With a block table, as AITER's Triton functions of the same names have it -------------------


def _attend_table(
    *,
    q: Tensor,
    kv_buffer: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_kv: object,
    block_tables: Tensor,
    softmax_scale: object,
    kv_lora_rank: object,
    qk_rope_head_dim: object,
    causal: object,
    q_descale: Tensor | None,
    kv_descale: Tensor | None,
    out_scale: Tensor | None,
    shuffled_kv_cache: object,
    is_uniform: bool = False,
) -> None:
    refuse_given(out_scale=out_scale)
    if as_flag("shuffled_kv_cache", shuffled_kv_cache):
        raise NotImplementedError("shuffled_kv_cache=True is not implemented yet")
    latent = _latent_of(kv_buffer)
    int32_vector("cu_seqlens_q", cu_seqlens_q)
    # A GPU is not asked for the most queries of a sequence.
    most = q.shape[0] if isinstance(q, Tensor) and q.dim() else 0
    if is_uniform:
        most = -(-most // max(len(cu_seqlens_q) - 1, 1))
        if can_be_read(cu_seqlens_q) and (cu_seqlens_q.diff() > most).any():
            raise ValueError(
                f"cu_seqlens_q is {cu_seqlens_q.tolist()}; expected {most} queries of each "
                "sequence, as q has it"
            )
    rank = as_int("kv_lora_rank", kv_lora_rank)
    columns = rank + as_int("qk_rope_head_dim", qk_rope_head_dim)
    if latent.shape[-1] != columns or not isinstance(out, Tensor) or out.shape[-1:] != (rank,):
        raise ValueError(
            f"kv_buffer is {describe(kv_buffer)} and out {describe(out)}; expected {columns} and "
            f"{rank} columns, by kv_lora_rank and qk_rope_head_dim"
        )
    _attend_pages(
        q=q,
        latent=latent,
        o=out,
        cu_seqlens_q=cu_seqlens_q,
        pages=pages_of_table("seqused_k", seqused_k, block_tables),
        sm_scale=softmax_scale,
        causal=causal,
        q_scale=q_descale,
        kv_scale=kv_descale,
        with_lse=False,
        max_seqlen_q=most,
        max_seqlen_k=as_int("max_seqlen_kv", max_seqlen_kv) or None,
    )


def _decode_table(*, q_scales: Tensor | None, skip_reduce: object, **others: Any) -> None:
    refuse_given(q_scales=q_scales)
    refuse_segments(skip_reduce)
    _attend_table(is_uniform=True, **others)


_NAMES_WITH_TABLE = {
    "latent": "kv_buffer",
    "k": "kv_buffer",
    "v": "kv_buffer",
    "o": "out",
    "rank": "out",
    "qo_indptr": "cu_seqlens_q",
    "cu_seqlens_k": "seqused_k",
    "block_table": "block_tables",
    "max_seqlen_k": "max_seqlen_kv",
    "k_descale": "kv_descale",
    "v_descale": "kv_descale",
    "sm_scale": "softmax_scale",
}


@ends_in(_decode_table, **_NAMES_WITH_TABLE)
def decode_of_triton(
    q: Tensor, kv_buffer: Tensor, out: Tensor,
    cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_kv: int, block_tables: Tensor,
    softmax_scale: float, kv_lora_rank: int, qk_rope_head_dim: int, causal: bool,
    q_descale: Tensor | None, kv_descale: Tensor | None, q_scales: Tensor | None = None,
    out_scale: Tensor | None = None, shuffled_kv_cache: bool = False, skip_reduce: bool = False,
) -> None:  # fmt: skip
    """Latent attention of a few queries for each sequence, over pages that a block table names.

    Args:
        q: ``(total_q, hq, rank + r)``.
        kv_buffer: ``(num_pages, page_size, 1, rank + r)``.
        out: where to write the result, ``(total_q, hq, rank)``.
        cu_seqlens_q: int32 ``(b + 1,)``, prefix sums of the numbers of queries, of which each
            sequence has as many.
        seqused_k: int32 or int64 ``(b,)``, how many keys each sequence has.
        max_seqlen_kv: at least the longest of them; 0 where it is not known.
        block_tables: int32 ``(b, most pages)``.
        kv_lora_rank, qk_rope_head_dim: rank and r.
        q_descale, kv_descale: what 8-bit queries and latents are multiplied with; no effect on
            others.
        q_scales, out_scale, shuffled_kv_cache, skip_reduce: None and False; others are refused.
    """


@ends_in(_attend_table, **_NAMES_WITH_TABLE)
def prefill_of_triton(
    q: Tensor, kv_buffer: Tensor, out: Tensor,
    cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_kv: int, block_tables: Tensor,
    softmax_scale: float, kv_lora_rank: int, qk_rope_head_dim: int, causal: bool,
    q_descale: Tensor | None, kv_descale: Tensor | None,
    out_scale: Tensor | None = None, shuffled_kv_cache: bool = False,
) -> None:  # fmt: skip
    """:func:`decode_of_triton` for prefill, with any number of queries of each sequence."""


# ---- What is refused -----------------------------------------------------------------------------


def _refused(name: str, what: str) -> Callable[..., Any]:
    def call(*arguments: object, **options: object) -> Any:
        raise NotImplementedError(f"{name} is not implemented yet: {what} {_ELSEWHERE}")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Raise ``NotImplementedError``: {what} are not served."
    return call


_ELSEWHERE = "are not served. mla_decode_fwd serves latents of 16 bits, and of 8 with one scale"
_SCALED = "fp8 latents with a scale for each block of columns, beside rotated columns of 16 bits,"
mla_decode_fwd_ds32 = _refused("mla_decode_fwd_ds32", _SCALED)
mla_v40_decode_fwd = _refused("mla_v40_decode_fwd", _SCALED)
mla_decode_fwd_v4_nm = _refused("mla_decode_fwd_v4_nm", _SCALED)
