"""The probabilities of attention as one large tensor: what flash-attn returns for its own tests.

Kernels never have them at once. They are made with torch's operators, from the lse that a kernel
returned and the random bytes that it dropped them by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dropout import dropout_randval, largest_kept
from .mask import parse_mask

if TYPE_CHECKING:
    from .arguments import Options


@torch.no_grad()
def signed_probabilities(q: Tensor, k: Tensor, lse: Tensor, options: Options) -> Tensor:
    """flash-attn's ``S_dmask``: the softmax's probabilities, negative where dropout dropped them.

    Args:
        q, k: as ``fmha_fwd`` had them.
        lse: what it returned.
        options: its options, with ``dropout_p`` and ``rng_state``.

    Returns:
        ``(b, hq, sq, sk)`` in q's dtype; for packed sequences ``(b, hq, max_seqlen_q,
        max_seqlen_k)``, 0 behind the end of each.
    """
    if options.get("cu_seqlens_q") is None:
        probabilities = _probabilities(q, k, lse, options.get("alibi_slopes"), options)
    else:
        probabilities = _of_packed(q, k, lse, options)
    rng_state, dropout_p = options["rng_state"], options["dropout_p"]
    assert rng_state is not None
    kept = dropout_randval(rng_state, *probabilities.shape) <= largest_kept(dropout_p)
    return torch.where(kept, probabilities, -probabilities)


def _of_packed(q: Tensor, k: Tensor, lse: Tensor, options: Options) -> Tensor:
    ends = [options["cu_seqlens_q"], options["cu_seqlens_k"]]
    starts = [options.get("cu_seqlens_q_padded"), options.get("cu_seqlens_k_padded")]
    longest = options["max_seqlen_q"], options["max_seqlen_k"]
    (lengths_q, lengths_k) = (x.diff().tolist() for x in ends if x is not None)
    (starts_q, starts_k) = (
        (end if start is None else start).tolist()  # type: ignore[union-attr]
        for start, end in zip(starts, ends, strict=True)
    )
    most_q, most_k = (
        max(lengths, default=0) if given is None else int(given)
        for given, lengths in zip(longest, (lengths_q, lengths_k), strict=True)
    )
    slopes, block_table = options.get("alibi_slopes"), options.get("block_table")
    whole = q.new_zeros(len(lengths_q), q.shape[1], most_q, most_k)
    for n, (sq, sk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows = slice(starts_q[n], starts_q[n] + sq)
        if block_table is None:
            keys = k[starts_k[n] : starts_k[n] + sk]
        else:
            keys = k[block_table[n, : -(-sk // k.shape[1])].long()].flatten(0, 1)[:sk]
        one = (q[None, rows], keys[None], lse[None, :, rows])
        slopes_of_one = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
        whole[n, :, :sq, :sk] = _probabilities(*one, slopes_of_one, options)[0]
    return whole


def _probabilities(
    q: Tensor, k: Tensor, lse: Tensor, slopes: Tensor | None, options: Options
) -> Tensor:
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.float() * scale, keys)
    softcap = options.get("logit_softcap", 0)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    # How far a key is to the right of the diagonal.
    j, i = torch.arange(k.shape[1], device=q.device), torch.arange(q.shape[1], device=q.device)
    ahead = j - (i + k.shape[1] - q.shape[1])[:, None]
    if slopes is not None:
        scores = scores - slopes.view(-1, q.shape[2], 1, 1) * ahead.abs()
    mask = parse_mask(options.get("mask", 0), options["window_size"])
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if mask.left is not None:
        hidden |= (ahead < -mask.left) & (j >= options.get("sink_size", 0))
    if mask.right is not None:
        hidden |= ahead > mask.right
    return torch.exp(scores - lse[..., None]).masked_fill(hidden, 0).to(q.dtype)
