"""flash-attn's functions under ``torch.autograd``: one pass each, with all that the other needs.

Their names start with an underscore, and libraries import them nevertheless: Diffusers, and the
code of ring attention and of Ulysses, which have derivatives of their own. Arguments mean what they
mean in :mod:`jitfmha.flash_attn.flash_attn_interface`; those that are optional there have to be
given here, as in flash-attn. No result has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.interface import OFF, fmha_bwd
from ..layers.peer_values import (
    as_dropout_p,
    as_flag,
    as_int,
    as_lengths,
    as_softcap,
    as_softmax_scale,
    as_window_side,
    ends_in,
    int32_vector,
    softmax_delta,
    window_pair,
    with_contiguous_rows,
)
from ..problem.arguments import AttentionOptions
from ..problem.checks import (
    check_layout,
    describe,
    not_a_tensor,
    require_cu_seqlens,
)
from ..problem.memory import write_zeros
from ..problem.packed_rows import sequences_of_rows
from ..problem.torch_parts import can_be_read
from .attend import attend

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask, rng_state


def _forward(
    *,
    window_size_left: object,
    window_size_right: object,
    return_softmax: object,
    leftpad_k: Tensor | None = None,
    zero_tensors: object = False,
    **given: Any,
) -> Results:
    if leftpad_k is not None:
        given |= _without_padding(leftpad_k, **given)
    as_flag("zero_tensors", zero_tensors)  # unused rows of a new output are 0 in any case
    left = as_window_side("window_size_left", window_size_left)
    right = as_window_side("window_size_right", window_size_right)
    with torch.no_grad():
        out, lse, probabilities, rng_state = attend(
            with_lse=True,
            with_probabilities=as_flag("return_softmax", return_softmax),
            with_rng_state=True,
            window_size=(left, right),
            **given,
        )
    assert lse is not None
    probabilities = out.new_empty(0) if probabilities is None else probabilities
    rng_state = lse.new_zeros(2, dtype=torch.int64) if rng_state is None else rng_state
    return out, lse, probabilities, rng_state


def _without_padding(
    leftpad_k: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    **_: Any,
) -> dict[str, Tensor]:
    """Copies of keys and values in which each sequence starts with the key behind ``leftpad_k``."""
    skipped = int32_vector("leftpad_k", leftpad_k)
    if block_table is not None:
        raise NotImplementedError(
            f"leftpad_k ({describe(leftpad_k)}) cannot be combined with block_table: sequences "
            "begin where a page does"
        )
    require_cu_seqlens(cu_seqlens_k=cu_seqlens_k)
    sums = int32_vector("cu_seqlens_k", cu_seqlens_k)
    lengths = sums.diff() if seqused_k is None else as_lengths("seqused_k", seqused_k)
    if skipped.shape != lengths.shape or len(sums) != len(lengths) + 1:
        raise ValueError(
            f"leftpad_k is {describe(skipped)}, cu_seqlens_k {describe(sums)}; expected a number "
            f"for each of the {len(sums) - 1} sequences"
        )
    for name, x in (("k", k), ("v", v), ("cu_seqlens_k", sums), ("seqused_k", lengths)):
        if not isinstance(x, Tensor):
            raise not_a_tensor(name, x)
        if x.device != skipped.device:
            raise ValueError(f"{name} is on {x.device}, leftpad_k on {skipped.device}")
        check_layout(name, x)
    if can_be_read(skipped) and not bool(((skipped >= 0) & (skipped <= lengths)).all()):
        raise ValueError(f"leftpad_k is {skipped.tolist()}; sequences have {lengths.tolist()} keys")
    moved = {"k": k, "v": v}
    if len(lengths) and k.dim() > 0 and len(k) and v.shape[:1] == k.shape[:1]:
        row = torch.arange(len(k), device=k.device)
        source = row + skipped[sequences_of_rows(len(k), sums, sums)[0]]
        moved = {name: x[source.clamp(max=len(k) - 1)] for name, x in moved.items()}
    return {**moved, "seqused_k": lengths - skipped}


def _backward(
    *,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: object,
    softmax_scale: object,
    causal: object,
    window_size_left: object,
    window_size_right: object,
    softcap: object,
    alibi_slopes: Tensor | None,
    deterministic: object,
    rng_state: Tensor | None,
    zero_tensors: object = False,
    **lengths: Any,
) -> Tensor:
    if lengths:
        require_cu_seqlens(
            cu_seqlens_q=lengths["cu_seqlens_q"], cu_seqlens_k=lengths["cu_seqlens_k"]
        )
        for name in ("max_seqlen_q", "max_seqlen_k"):
            lengths[name] = as_int(name, lengths[name])
    drop = as_dropout_p(dropout_p)
    if drop > 0 and rng_state is None:
        raise ValueError(
            f"rng_state is missing; with dropout_p={dropout_p!r} it is what the forward pass "
            "returned"
        )
    left = as_window_side("window_size_left", window_size_left)
    right = as_window_side("window_size_right", window_size_right)
    options: AttentionOptions = {
        "softmax_scale": as_softmax_scale(softmax_scale),
        "mask": 2 if as_flag("causal", causal) else 0,
        "window_size": window_pair(left, right),
        "logit_softcap": as_softcap("softcap", softcap) or OFF,
        "alibi_slopes": alibi_slopes,
        "dropout_p": drop or OFF,
        **lengths,  # type: ignore[typeddict-item]  # cu_seqlens_q and so on
    }
    if drop > 0:
        options["rng_state"] = rng_state
    dout, q, k, v, out = (with_contiguous_rows(x) for x in (dout, q, k, v, out))
    gradients = fmha_bwd(
        *(dout, q, k, v, out, softmax_lse),
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=as_flag("deterministic", deterministic) or None,
        **options,
    )
    if as_flag("zero_tensors", zero_tensors):
        for x, side in zip(gradients, "qkk", strict=True):
            sums = lengths[f"cu_seqlens_{side}"]
            write_zeros(x, ~sequences_of_rows(x.shape[0], sums, sums)[2][:, None, None])
    return softmax_delta(dout, out)


@ends_in(_forward)
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, return_softmax: bool,
) -> Results:  # fmt: skip
    """The forward pass for a batch of sequences of equal length.

    Returns:
        ``(out, softmax_lse, S_dmask, rng_state)``: lse float32 ``(b, hq, sq)``; S_dmask as of
        ``flash_attn_func``, and empty without ``return_softmax``; rng_state int64 ``(2,)``, zero
        without dropout.
    """


@ends_in(_forward)
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> Results:  # fmt: skip
    """The forward pass for sequences that are packed one after the other.

    Args:
        seqused_k: int32 ``(b,)``, how many keys of each sequence count, from its first on.
        leftpad_k: int32 ``(b,)``, how many keys at the start of each sequence do not count, for
            which keys and values are copied; not with a block table.

    Returns:
        as :func:`_flash_attn_forward`, with lse ``(hq, total_q)``.
    """


@ends_in(_backward)
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The backward pass of :func:`_flash_attn_forward`; the gradients are written to dq, dk, dv.

    Returns:
        softmax_d, float32 ``(b, hq, sq)``: the sum of ``dout * out`` for each query and head.
    """


@ends_in(_backward)
def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """The backward pass of :func:`_flash_attn_varlen_forward`, likewise.

    zero_tensors: also set the rows of dq, dk and dv to 0 that belong to no sequence.

    Returns:
        softmax_d, float32 ``(hq, total_q)``.
    """
