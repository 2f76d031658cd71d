"""flash-attn 2's functions: the same names, arguments, order and results.

Source: ``flash_attn/flash_attn_interface.py`` of github.com/Dao-AILab/flash-attention. All six
end in :func:`jitfmha.fmha_fwd`; the packed forms pass views of the packed tensor, not copies.

What they have in common:

* Dtypes, GQA and head dimensions are those of :func:`jitfmha.fmha_fwd`. A tensor whose last
  dimension is not contiguous is copied first, as flash-attn does; all others are read in place.
* ``causal`` is aligned to the bottom-right corner: query i sees key j when
  ``j <= i + seqlen_k - seqlen_q``.
* ``window_size`` is (left, right): query i sees the keys from ``i + seqlen_k - seqlen_q - left`` to
  ``i + seqlen_k - seqlen_q + right`` inclusive, a negative side being open. With ``causal`` the
  right side is 0 whatever is given. AITER's third entry is the ``sink_size`` of
  :func:`jitfmha.fmha_fwd`. The formula holds exactly, also where flash-attn's CUDA code widens
  or clips a side that is longer than ``seqlen_k``.
* Numbers and flags may also be 0-dim tensors and NumPy numbers, flags 0, 1 and None, and
  ``window_size`` a list, a tensor or an array.
* A query that sees no key gets 0 and lse -inf (flash-attn: lse +inf).
* ``deterministic`` takes backward kernels that give the same bits in every run, as
  ``torch.use_deterministic_algorithms`` does for all calls. The forward pass always gives them.
* With ``return_attn_probs`` the result is ``(out, softmax_lse, S_dmask)``. ``S_dmask`` is an empty
  tensor without dropout. With it, it is ``(b, hq, sq, sk)`` in q's dtype, of packed sequences
  ``(b, hq, max_seqlen_q, max_seqlen_k)``: the probabilities, negative where they were dropped. It
  is as large as it looks, and meant for tests.
* ``softcap`` and ``alibi_slopes`` are ``logit_softcap`` and ``alibi_slopes`` of
  :func:`jitfmha.fmha_fwd`; so is ``dropout_p``, whose random numbers come from torch's own
  generator for the device.
* What no kernel serves raises ``NotImplementedError``. Every other violation of a rule is a
  ``TypeError`` or a ``ValueError`` that names the argument and its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import torch
from torch import Tensor

from ..call.interface import OFF, fmha_fwd
from ..layers.kv_cache import check_page_numbers, flash_attn_with_kvcache, starts_in_batch
from ..layers.peer_values import (
    as_dropout_p,
    as_flag,
    as_length,
    as_softcap,
    as_softmax_scale,
    as_window,
    ends_in,
    window_pair,
    with_contiguous_rows,
)
from ..problem.arguments import Arguments, Options
from ..problem.checks import describe, not_a_tensor, require_cu_seqlens, requires_any_grad
from ..problem.dropout import new_rng_state
from ..problem.float64_reference import signed_probabilities

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


P = ParamSpec("P")
WithProbs = tuple[Tensor, Tensor, Tensor]
Attention = Tensor | WithProbs


class Function(Protocol[P]):
    """One of the six. What it returns follows from ``return_attn_probs`` where that is known."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # P has it too, as False
        self, *arguments: Any, return_attn_probs: Literal[True], **named: Any
    ) -> WithProbs: ...
    @overload
    def __call__(
        self, *arguments: Any, return_attn_probs: Literal[False], **named: Any
    ) -> Tensor: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *arguments: Any, return_attn_probs: bool, **named: Any
    ) -> Attention: ...
    @overload
    def __call__(self, *arguments: P.args, **named: P.kwargs) -> Tensor: ...


def _attending(declared: Callable[P, Attention]) -> Function[P]:
    return cast("Function[P]", ends_in(_attend)(declared))


def _attend(
    *,
    dropout_p: object,
    softmax_scale: object,
    causal: object,
    window_size: object,
    softcap: object,
    alibi_slopes: Tensor | None,
    deterministic: object,
    return_attn_probs: object,
    block_table: Tensor | None = None,
    **given: Any,
) -> Attention:
    """What all six end in; ``given`` are the tensors and the lengths of packed sequences."""
    lengths = _lengths(given)
    q, k, v = _tensors(given, is_group=bool(lengths))
    left, right, sink_size = as_window(window_size)
    drop = as_dropout_p(dropout_p)
    options: Options = {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if as_flag("causal", causal) else 0,
        "window_size": window_pair(left, right),
        "sink_size": sink_size,
        "logit_softcap": as_softcap("softcap", softcap) or OFF,
        "alibi_slopes": alibi_slopes,
        "dropout_p": drop or OFF,
        # False is the default, and leaves the choice to torch's own setting.
        "deterministic": as_flag("deterministic", deterministic) or None,
        **lengths,
    }
    if block_table is not None:
        ends = _checked_ends(k, v, block_table, options["cu_seqlens_k"])
        if torch.is_grad_enabled() and requires_any_grad(q, k, v):
            # The backward pass needs rows, and is followed by that of the gathering.
            k, v, options["cu_seqlens_k_padded"] = _gathered(k, v, block_table, ends)
        else:
            options["block_table"] = with_contiguous_rows(block_table)
    with_probs = as_flag("return_attn_probs", return_attn_probs)
    q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
    if drop > 0 and with_probs and isinstance(q, Tensor):
        options["rng_state"] = new_rng_state(q.device)
    result = fmha_fwd(q, k, v, return_lse=with_probs, **options)
    if isinstance(result, Tensor):
        return result
    out, softmax_lse = result
    if drop > 0:
        return out, softmax_lse, signed_probabilities(Arguments.of(q, k, v, options))
    return out, softmax_lse, q.new_empty(0)


def _lengths(given: Mapping[str, Any]) -> Options:
    """Prefix sums and longest lengths as ``fmha_fwd`` takes them; empty in batch mode."""
    if "cu_seqlens" in given:
        sums, longest = given["cu_seqlens"], as_length("max_seqlen", given["max_seqlen"])
        require_cu_seqlens(cu_seqlens=sums)
        sums_q, sums_k, longest_q, longest_k = sums, sums, longest, longest
    elif "cu_seqlens_q" in given:
        sums_q, sums_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        require_cu_seqlens(cu_seqlens_q=sums_q, cu_seqlens_k=sums_k)
        longest_q = as_length("max_seqlen_q", given["max_seqlen_q"])
        longest_k = as_length("max_seqlen_k", given["max_seqlen_k"])
    else:
        return {}
    return {
        "cu_seqlens_q": sums_q,
        "cu_seqlens_k": sums_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
    }


def _tensors(given: Mapping[str, Any], is_group: bool) -> Iterable[Tensor]:
    """q, k and v, of packed tensors as views."""
    if "qkv" in given:
        return _unpacked("qkv", given["qkv"], is_group)
    if "kv" in given:
        return (given["q"], *_unpacked("kv", given["kv"], is_group))
    return given["q"], given["k"], given["v"]


def _unpacked(name: str, packed: Tensor, is_group: bool) -> tuple[Tensor, ...]:
    """Views of q, k and v, or of k and v, in a tensor whose third last dimension holds them."""
    expected = f"{'total_tokens' if is_group else 'batch, seqlen'}, {len(name)}, heads, hdim"
    if not isinstance(packed, Tensor):
        raise not_a_tensor(name, packed)
    if packed.dim() != expected.count(",") + 1 or packed.shape[-3] != len(name):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; expected ({expected})")
    return packed.unbind(-3)


def _checked_ends(k: Tensor, v: Tensor, block_table: Tensor, ends: Tensor | None) -> Tensor:
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(
                f"{name} is {describe(x)}; with a block_table it is (num_pages, page_size, heads, "
                "hdim)"
            )
    is_table = isinstance(block_table, Tensor) and block_table.dtype == torch.int32
    if not is_table or block_table.dim() != 2:
        raise ValueError(
            f"block_table is {describe(block_table)}; expected int32 (batch, most pages)"
        )
    if not isinstance(ends, Tensor) or ends.shape != (block_table.shape[0] + 1,):
        raise ValueError(
            f"cu_seqlens_k is {describe(ends)}; with a block_table of {block_table.shape[0]} rows "
            f"it has {block_table.shape[0] + 1} entries"
        )
    return ends


def _gathered(
    k: Tensor, v: Tensor, block_table: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of paged sequences as rows, and where each sequence starts in them."""
    num_pages, page_size = k.shape[:2]
    # What a table holds behind the last page of a sequence has no meaning.
    first_keys = torch.arange(block_table.shape[1], device=k.device) * page_size
    pages = block_table.long().where(first_keys < ends.diff()[:, None], 0)
    check_page_numbers("k", pages, num_pages)
    starts = starts_in_batch(pages.shape[0], pages.shape[1] * page_size, k.device)
    return k[pages].flatten(0, 2), v[pages].flatten(0, 2), starts


@_attending
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attention:  # fmt: skip
    """Attention over a batch of sequences of equal length (gm0).

    Args:
        q: ``(b, sq, hq, hdim)``; k: ``(b, sk, hk, hdim)``; v: ``(b, sk, hk, hdim_v)``.
        softmax_scale: finite and > 0; ``1 / sqrt(hdim)`` by default.

    The other arguments, and what is raised: see the module.

    Returns:
        out ``(b, sq, hq, hdim_v)``; with ``return_attn_probs`` also softmax_lse, float32
        ``(b, hq, sq)``, and S_dmask.
    """


@_attending
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attention:  # fmt: skip
    """:func:`flash_attn_func` with k and v in one tensor ``kv`` of shape ``(b, sk, 2, hk, hdim)``.

    q is ``(b, sq, hq, hdim)``; the other arguments and the results are the same.
    """


@_attending
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attention:  # fmt: skip
    """:func:`flash_attn_func` with q, k and v in one tensor ``qkv`` ``(b, s, 3, h, hdim)``.

    The other arguments and the results are the same.
    """


@_attending
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Attention:  # fmt: skip
    """Attention over sequences of different lengths, packed one after the other (gm1).

    Args:
        q: ``(total_q, hq, hdim)``; k: ``(total_k, hk, hdim)``; v: ``(total_k, hk, hdim_v)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(b + 1,)``, prefix sums of the lengths, from 0.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        softmax_scale: finite and > 0; ``1 / sqrt(hdim)`` by default.
        block_table: int32 ``(b, most pages)``, the pages of each sequence, where k and v are
            ``(num_pages, page_size, hk, hdim)``, with any page size.

    The other arguments, and what is raised: see the module.

    Returns:
        out ``(total_q, hq, hdim_v)``; with ``return_attn_probs`` also softmax_lse, float32
        ``(hq, total_q)``, and S_dmask.
    """


@_attending
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attention:  # fmt: skip
    """:func:`flash_attn_varlen_func` with k and v in one tensor ``kv`` ``(total_k, 2, hk, hdim)``.

    q is ``(total_q, hq, hdim)``; the other arguments and the results are the same.
    """


@_attending
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attention:  # fmt: skip
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor ``(total, 3, h, hdim)``.

    cu_seqlens and max_seqlen hold for q, k and v alike; the other arguments and the results are
    the same.
    """
