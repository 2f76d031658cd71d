"""AITER's functions for latent attention (MLA), as vLLM and SGLang call them.

Source: ``aiter/mla.py`` of github.com/ROCm/aiter. They end in :func:`jitfmha.mla_absorbed_fwd`,
which shares the work out and puts parts of keys together by itself: what
:func:`jitfmha.aiter.get_mla_metadata_v1` fills in has no effect.
"""

from __future__ import annotations

from typing import Any

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
    written_to,
)
from ..problem.arguments import Options
from ..problem.checks import describe, not_a_tensor, require_cu_seqlens
from ..problem.dtypes import out_dtype_of
from .batch_prefill import lists_of_pages

__all__ = ["mla_decode_fwd", "mla_prefill_fwd"]


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
    require_cu_seqlens(qo_indptr=qo_indptr)
    for name, tensor in (("q", q), ("kv_buffer", kv_buffer)):
        if not isinstance(tensor, Tensor):
            raise not_a_tensor(name, tensor)
    if kv_buffer.dim() != 4 or kv_buffer.shape[2] != 1:
        raise ValueError(
            f"kv_buffer is {describe(kv_buffer)}; expected (num_pages, page_size, 1, rank + r)"
        )
    if not isinstance(o, Tensor) or o.dim() != 3:
        raise ValueError(f"o is {describe(o)}; expected (total_q, hq, rank)")
    latent = kv_buffer[:, :, 0]
    scale = as_softmax_scale(sm_scale)
    options: Options = {
        "softmax_scale": max(latent.shape[-1], 1) ** -0.5 if scale is None else scale,
        "mask": 2 if as_flag("causal", causal) else 0,
        "logit_softcap": max(as_number("logit_cap", logit_cap), 0.0) or OFF,
        "cu_seqlens_q": qo_indptr,
        "max_seqlen_q": as_int("max_seqlen_q", max_seqlen_q),
        # One asks for sums in one order, whatever else is in the batch.
        "num_splits": 1 if type(num_kv_splits) is int and num_kv_splits == 1 else OFF,
    }
    options |= lists_of_pages(kv_indptr, kv_indices, kv_last_page_lens, latent.shape[1])
    options |= descales_of(q, kv_buffer, q_descale=q_scale, k_descale=kv_scale, v_descale=kv_scale)
    if o.dtype == out_dtype_of(q.dtype):
        options["out"] = o
    with_lse = as_flag("return_lse", return_lse)
    found = mla_absorbed_fwd(q, latent, o.shape[-1], return_lse=with_lse, **options)
    out, lse = (found, None) if isinstance(found, Tensor) else found
    if "out" not in options:
        written_to(o, out)
    return o, None if lse is None else lse.T


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
