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

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

from torch import Tensor

from ..layers.known_attention import note_left_out
from ..layers.kv_cache import flash_attn_with_kvcache
from ..layers.peer_values import as_flag, as_int, attends_in
from ..problem.checks import refuse_given
from .attend import attend
from .without_gradients import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
# Private, and imported by libraries nevertheless. In flash-attn the first four are functions, and
# the others the operators of torch that these are registered as.
_PASSES = (
    "_flash_attn_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
)
OFFERED = (*_PASSES, *(f"_wrapped{name}" for name in _PASSES))
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

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
    def __call__(  # type: ignore[overload-overlap]  # of flash_attn_varlen_func
        self, *arguments: Any, return_softmax_lse: Literal[True], **named: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *arguments: P.args, **named: P.kwargs) -> Tensor: ...


def _attending(declared: Callable[P, Attention]) -> Function[P]:
    return cast("Function[P]", attends_in(_attend, False)(declared))


def _attend(*, return_attn_probs: object = False, with_lse: bool = False, **given: Any) -> Any:
    """What all six end in, with what is given to them."""
    with_probs = as_flag("return_attn_probs", return_attn_probs)
    out, lse, probabilities, _ = attend(
        with_lse=with_lse or with_probs,
        with_probabilities=with_probs,
        with_rng_state=with_probs,
        **given,
    )
    if with_probs:
        return out, lse, out.new_empty(0) if probabilities is None else probabilities
    return (out, lse) if with_lse else out


# Of vLLM's function of this name. What is refused would change numbers.
_REFUSED = ("dynamic_causal", "mask_mod", "aux_tensors")
_WITHOUT_EFFECT = {"scheduler_metadata", "fa_version", "cp_rank", "cp_tot_seqused_k"}
_OF_VLLM = _WITHOUT_EFFECT.union(_REFUSED)


def _attend_varlen(
    *, return_softmax_lse: object = False, cp_world_size: object = 1, **given: Any
) -> Any:
    with_lse = as_flag("return_softmax_lse", return_softmax_lse)
    if as_int("cp_world_size", cp_world_size) != 1:
        raise NotImplementedError("cp_world_size is not 1: keys of other ranks are not known here")
    if not _OF_VLLM.isdisjoint(given):
        refuse_given(**{name: given.pop(name) for name in _REFUSED if name in given})
        for name in _WITHOUT_EFFECT.intersection(given):
            note_left_out(given.pop(name))
    return _attend(with_lse=with_lse, **given)


def _attending_varlen(
    declared: Callable[P, Attention | tuple[Tensor, Tensor]],
) -> Function[P]:
    return cast("Function[P]", attends_in(_attend_varlen, False, sink="s_aux")(declared))


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


@_attending_varlen
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None, out: Tensor | None = None, return_softmax_lse: bool = False,
    s_aux: Tensor | None = None, num_splits: int = 0,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, output_scale: Tensor | None = None,
    scheduler_metadata: Tensor | None = None, fa_version: int | None = None,
    cp_world_size: int = 1, cp_rank: int = 0, cp_tot_seqused_k: Tensor | None = None,
    q_v: Tensor | None = None, dynamic_causal: Tensor | None = None,
    mask_mod: Callable[..., Any] | None = None, aux_tensors: list[Tensor] | None = None,
) -> Attention | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over sequences of different lengths, packed one after the other (gm1).

    Args:
        q: ``(total_q, hq, hdim)``; k: ``(total_k, hk, hdim)``; v: ``(total_k, hk, hdim_v)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(b + 1,)``, prefix sums of the lengths, from 0.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        softmax_scale: finite and > 0; ``1 / sqrt(hdim)`` by default.
        block_table: int32 ``(b, most pages)``, the pages of each sequence, where k and v are
            ``(num_pages, page_size, hk, hdim)``, with any page size.

    The other arguments by position, and what is raised: see the module. vLLM's function of this
    name has more, which are given by name:

        seqused_k: int32 ``(b,)``, how many keys of each sequence count, from its first on; with a
            block table it takes the place of cu_seqlens_k.
        out: where to write the result, ``(total_q, hq, hdim_v)``.
        return_softmax_lse: return ``(out, softmax_lse)``.
        s_aux: ``(hq,)``, the ``sink`` of :func:`jitfmha.fmha_fwd`.
        num_splits, q_descale, k_descale, v_descale: those of :func:`jitfmha.fmha_fwd`; that of
            a tensor of 16 or 32 bits has no effect.
        output_scale: one number, which the result is divided by before it is written to an ``out``
            of any dtype, such as fp8.
        scheduler_metadata, fa_version, cp_rank, cp_tot_seqused_k: no effect.
        q_v: ``(total_q, hq, hdim_v)``, whose products with v are added to the scores, where v and k
            are the first and the last columns of one tensor, which is not copied: latent attention.
            ``softmax_scale`` then is ``1 / sqrt(hdim + hdim_v)`` by default.
        dynamic_causal, mask_mod, aux_tensors: None; others are refused, as is a ``cp_world_size``
            other than 1.

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
