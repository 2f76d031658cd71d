"""``qk_norm_rope_cache``: the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem.checks import check_flags, requires_any_grad, with_clear_errors
from ...problem.torch_parts import has_forward_mode, refuse_derivatives
from .ops import operator
from .problem import HeadArguments


@with_clear_errors
def qk_norm_rope_cache(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """RMSNorm of each head of q and k, their rotation by position, and k and v into a cache.

    All in one pass, computed in float32; every part of it is optional.

    Args:
        q, k, v: float32, bfloat16 or float16 ``(b, s, heads, hdim)``, or ``(tokens, heads, hdim)``
            of one sequence; any strides but the last, so that they may be parts of one packed
            tensor. hdim is 1 to 576, that of q and k the same. Or k and v int8, which go into an
            int8 cache as they are.
        q_weight, k_weight: ``(hdim,)`` in q's dtype or float32: heads are normalised, and
            multiplied with it. None: they are not.
        eps: of the norms, at least 0.
        cos, sin: ``(positions, rotary_dim / 2)``, of which each token has a row that rotates the
            first ``rotary_dim`` elements of each head of q and k; float32, bfloat16 or float16.
            Scaled frequencies are those of these tables.
        positions: int64 ``(b, s)`` or ``(tokens,)``, the rows of cos and sin; by default tokens
            follow each other from ``cache_seqlens`` on, or from 0.
        interleaved: whether neighbouring elements are rotated together (GPT-J), or the halves of
            the first ``rotary_dim`` elements (GPT-NeoX, Llama).
        k_cache, v_cache: ``(b_cache, capacity, heads, hdim)`` or pages of it, ``(pages, page_size,
            heads, hdim)``, or AITER's packed pages as :func:`jitfmha.fmha_fwd` takes them; of k's
            dtype, or ``torch.float8_e4m3fn``, ``torch.float8_e4m3fnuz`` or ``torch.int8``.
        slots: int64 as ``positions``, where keys go: ``page * page_size + row``. Negative ones are
            not written.
        cache_seqlens: int32 ``(b,)``, in place of slots: how many keys each sequence has, behind
            which the new ones go.
        block_table: int32 ``(b, most pages)``, the pages of each sequence; with cache_seqlens.
        cache_batch_idx: int32 ``(b,)``, which sequence of the cache each one is; with
            cache_seqlens, not with a block table. By default they are the same.
        k_scale, v_scale: float32 ``(1,)`` or ``(heads,)``, what a cache of 8 bits is multiplied
            with when it is read (``k_descale`` elsewhere); 1 by default. What does not fit becomes
            the largest number, and NaN in int8 0.
        inplace: write q and k where they are.

    What is written shares no memory with another argument, but for caches of a latent: v_cache may
    be the first columns of k_cache, where v are those of k.

    Vectors and tables may have any strides; what does not lie in rows is copied.

    Returns:
        ``(q, k)``: new tensors, or with ``inplace``, and where nothing is done to them, the given
        ones. k is None where it went into a cache alone.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value. On a GPU
            nobody reads positions, slots, lengths and block tables to find out.
        NotImplementedError: what no kernel serves; also tensors that require grad while grad mode
            is on, because there is no backward pass.
        jitfmha.BuildError: the kernel could not be compiled on first use.
    """
    check_flags(interleaved=interleaved, inplace=inplace)
    q_out = _result(q, q_weight, cos, inplace=inplace)
    k_out = None
    if inplace or k_cache is None:
        k_out = _result(k, k_weight, cos, inplace=inplace)
    tensors = (
        *(q, k, v, q_out, k_out, q_weight, k_weight, cos, sin, positions, k_cache, v_cache, slots),
        *(cache_seqlens, block_table, cache_batch_idx, k_scale, v_scale),
    )
    arguments = HeadArguments(*tensors, eps, interleaved)
    is_asked = torch.is_grad_enabled() and requires_any_grad(*tensors)
    if is_asked or has_forward_mode():
        refuse_derivatives("qk_norm_rope_cache", **arguments._asdict())
    operator.run(arguments)
    if inplace or (k_out is None and k_cache is None):
        k_out = k
    return q if q_out is None else q_out, k_out


def _result(
    x: Tensor | None, weight: Tensor | None, cos: Tensor | None, *, inplace: bool
) -> Tensor | None:
    """Where x goes; None where nothing is done to it."""
    if not isinstance(x, Tensor) or (weight is None and cos is None):
        return None
    return x if inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
