"""Multi-head latent attention (MLA): keys and values of all heads are one latent for each token.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. With ``W_k`` and ``W_v`` the parts of a head's
``wkv_b``, of ``hdim`` and ``hdim_v`` rows, and c the latent of a token,

    score = q_nope . (W_k c) + q_pe . k_pe = (W_k^T q_nope) . c + q_pe . k_pe
    out   = sum of p * (W_v c)             = W_v (sum of p * c)

The left side projects keys and values and attends with the head dimensions of the model; the right
side projects queries and outputs, and all heads attend to the latent itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..call.detection import target_of
from ..call.interface import fmha_fwd
from ..planning.target import CpuTarget
from ..problem.arguments import AttentionOptions, Options
from ..problem.checks import check_flags, check_layout, describe, not_a_tensor, with_clear_errors
from ..problem.problem import MAX_HDIM

if TYPE_CHECKING:
    from typing_extensions import Unpack


@with_clear_errors
def mla_absorbed_fwd(
    q: Tensor,
    latent: Tensor,
    rank: int,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Latent attention whose queries have the projection of keys in them; forward and decode.

    All query heads attend to one key head, the latent with the positional part behind it. Its
    first ``rank`` columns are the values: a view, so that one tensor is read for both.

    Args:
        q: gm0 ``(b, sq, hq, rank + r)``, gm1 ``(total_q, hq, rank + r)``: what meets the latent,
            ``q_nope @ W_k``, then the positional part.
        latent: gm0 ``(b, sk, rank + r)``, gm1 ``(total_k, rank + r)``, of q's dtype: the latent,
            then the positional key; with ``block_table`` the pages, ``(pages, page_size, rank +
            r)``. Any strides with a contiguous last dimension, such as those of a cache with room
            for more keys; never copied.
        rank: columns of the latent, from 1 on; ``rank + r`` is at most 576.
        return_lse: also return the log-sum-exp of the scaled scores.
        options: those of :func:`jitfmha.fmha_fwd`, with the same meaning. ``softmax_scale`` has to
            be given, as the model's ``1 / sqrt(hdim + r)`` has the head dimension from before the
            projection in it. For decoding with a cache ``cu_seqlens_k`` has the lengths, and
            ``cu_seqlens_k_padded`` where sequences start.

    Returns:
        out ``(b, sq, hq, rank)`` or ``(total_q, hq, rank)``, which ``W_v`` is still to be applied
        to; or ``(out, lse)``, as of :func:`jitfmha.fmha_fwd`. q and ``latent`` have gradients, as
        far as :func:`jitfmha.fmha_fwd` has them.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call; the text lists the reasons.

    Source: see the module.
    """
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be an int, got {rank!r}")
    _check_dimensions("q", q, (4, 3), "(b, sq, hq, rank + r), or (total_q, hq, rank + r)")
    if options.get("block_table") is None:
        _check_dimensions("latent", latent, (q.dim() - 1,), "one dimension less than q: no heads")
    else:
        _check_dimensions("latent", latent, (3,), "(pages, page_size, rank + r): no heads")
    if latent.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"latent has {latent.shape[-1]} columns, q has hdim {q.shape[-1]}; they must be equal"
        )
    if not 1 <= rank <= latent.shape[-1]:
        raise ValueError(
            f"rank={rank} must be between 1 and the {latent.shape[-1]} columns of latent"
        )
    if options.get("softmax_scale") is None:
        raise TypeError(
            "softmax_scale is missing; it is 1 / sqrt(hdim + r) with the hdim from before the "
            "projection"
        )
    k, v = latent.unsqueeze(-2), latent[..., :rank].unsqueeze(-2)
    return fmha_fwd(q, k, v, return_lse=return_lse, **options)


@with_clear_errors
def mla_fwd(
    q_nope: Tensor,
    q_pe: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    wkv_b: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Latent attention with the projections inside; forward and decode.

    Projects keys and values, or queries and outputs, whichever takes fewer multiplications: the
    former for as many queries as keys, the latter for decoding. Both are differentiable, and differ
    in where results are rounded to the inputs' dtype.

    Args:
        q_nope: gm0 ``(b, sq, hq, hdim)``, gm1 ``(total_q, hq, hdim)``; queries without positions.
        q_pe: ``(b, sq, hq, r)`` or ``(total_q, hq, r)``, queries with the rotary embedding.
        kv: ``(b, sk, c)`` or ``(total_k, c)``, the normalised latent.
        k_pe: ``(b, sk, r)`` or ``(total_k, r)``, keys with the rotary embedding; all heads have the
            same.
        wkv_b: ``(hq, hdim + hdim_v, c)``, for each head the projection of keys, then that of
            values. All five have one dtype and any strides.
        return_lse: also return the log-sum-exp of the scaled scores.
        options: ``softmax_scale``, ``1 / sqrt(hdim + r)`` by default, and the others that
            :func:`jitfmha.fmha_bwd` has, with the same meaning.

    Returns:
        out ``(b, sq, hq, hdim_v)`` or ``(total_q, hq, hdim_v)``; or ``(out, lse)``, as of
        :func:`jitfmha.fmha_fwd`. All five tensors have gradients, as far as
        :func:`jitfmha.fmha_fwd` has them.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call; the text lists the reasons.

    Source: see the module.
    """
    check_flags(return_lse=return_lse)
    hdim, hdim_v = _checked_hdims(q_nope, q_pe, kv, k_pe, wkv_b)
    if "out" in options:
        raise TypeError("mla_fwd has no argument out; write into it with out.copy_")
    scale = options.pop("softmax_scale", None)
    options["softmax_scale"] = (hdim + q_pe.shape[-1]) ** -0.5 if scale is None else scale
    inputs = q_nope, q_pe, kv, k_pe, wkv_b
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if (
        # AMD kernels hold the wide rows of a latent with 16 bits, and forward. Others they read
        # from memory again and again.
        (_is_on_cpu(q_nope) or (q_nope.dtype != torch.float32 and not needs_gradient))
        and _is_absorbed_form_less_work(q_nope, q_pe, kv, hdim_v, options.get("cu_seqlens_q"))
    ):
        out, lse = fmha_fwd(*absorbed_qkv(*inputs), return_lse=True, **options)
        projected = with_values_projected(out, wkv_b, hdim)
        return (projected, lse) if return_lse else projected
    return fmha_fwd(*projected_qkv(*inputs), return_lse=return_lse, **options)


def projected_qkv(
    q_nope: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor, wkv_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention with the model's head dimensions takes, of arguments of :func:`mla_fwd`."""
    hdim = q_nope.shape[-1]
    rows = torch.nn.functional.linear(kv, wkv_b.flatten(0, 1)).unflatten(-1, wkv_b.shape[:2])
    k_nope, v = rows.split([hdim, wkv_b.shape[1] - hdim], dim=-1)
    positional = k_pe.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
    return torch.cat([q_nope, q_pe], dim=-1), torch.cat([k_nope, positional], dim=-1), v


def absorbed_qkv(
    q_nope: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor, wkv_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention to the latent takes; :func:`with_values_projected` makes the output of it."""
    of_keys = wkv_b[:, : q_nope.shape[-1]]
    q = torch.cat([torch.einsum("...hd,hdc->...hc", q_nope, of_keys), q_pe], dim=-1)
    k = torch.cat([kv, k_pe], dim=-1).unsqueeze(-2)
    return q, k, k[..., : kv.shape[-1]]


def with_values_projected(out: Tensor, wkv_b: Tensor, hdim: int) -> Tensor:
    """The output of heads, of that of attention to the latent; ``hdim`` is that of ``q_nope``."""
    return torch.einsum("...hc,hdc->...hd", out, wkv_b[:, hdim:])


def _is_absorbed_form_less_work(
    q_nope: Tensor, q_pe: Tensor, kv: Tensor, hdim_v: int, cu_seqlens_q: Tensor | None
) -> bool:
    """Whether it takes fewer multiplications to project queries and outputs than keys and values.

    Lengths of packed sequences are not looked at: they count as equal.
    """
    hdim, r, rank = q_nope.shape[-1], q_pe.shape[-1], kv.shape[-1]
    if rank + r > MAX_HDIM:
        return False
    batch = q_nope.shape[0] if cu_seqlens_q is None else max(1, cu_seqlens_q.shape[0] - 1)
    queries, keys = q_nope.shape[:-2].numel(), kv.shape[:-1].numel()
    pairs = queries * keys // max(1, batch)
    projection = (hdim + hdim_v) * rank
    absorbed = queries * projection + pairs * (2 * rank + r)
    return absorbed < keys * projection + pairs * (hdim + r + hdim_v)


def _is_on_cpu(x: Tensor) -> bool:
    """Whether the CPU's kernels are meant; torch.compile cannot see what is emulated."""
    if x.device.type != "cpu":
        return False
    return torch.compiler.is_compiling() or isinstance(target_of(x.device), CpuTarget)


def _checked_hdims(
    q_nope: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor, wkv_b: Tensor
) -> tuple[int, int]:
    """The head dimensions of keys without positions and of values.

    Checks what only these five have to do with each other; the rest is left to ``fmha_fwd``.
    """
    _check_dimensions("q_nope", q_nope, (4, 3), "(b, sq, hq, hdim), or (total_q, hq, hdim)")
    _check_dimensions("q_pe", q_pe, (q_nope.dim(),), "as many dimensions as q_nope")
    for name, x in (("kv", kv), ("k_pe", k_pe)):
        _check_dimensions(name, x, (q_nope.dim() - 1,), "one dimension less than q_nope: no heads")
    _check_dimensions("wkv_b", wkv_b, (3,), "(hq, hdim + hdim_v, c)")
    for name, x in (("q_pe", q_pe), ("kv", kv), ("k_pe", k_pe), ("wkv_b", wkv_b)):
        if x.dtype != q_nope.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, q_nope has {q_nope.dtype}; use one dtype")
        if x.device != q_nope.device:
            raise ValueError(f"{name} is on {x.device}, q_nope on {q_nope.device}; use one device")
    for (name, x), (other, y) in (
        (("q_pe", q_pe), ("q_nope", q_nope)),
        (("k_pe", k_pe), ("kv", kv)),
    ):
        if x.shape[:-1] != y.shape[:-1]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, {other} {tuple(y.shape)}; all but the last "
                "dimension agree"
            )
    if q_pe.shape[-1] != k_pe.shape[-1]:
        raise ValueError(
            f"k_pe has {k_pe.shape[-1]} columns, q_pe has {q_pe.shape[-1]}; they must be equal"
        )
    heads, hdim = q_nope.shape[-2:]
    rows = wkv_b.shape[1]
    if wkv_b.shape[0] != heads or wkv_b.shape[2] != kv.shape[-1] or rows <= hdim:
        raise ValueError(
            f"wkv_b has shape {tuple(wkv_b.shape)}; expected ({heads}, {hdim} + hdim_v, "
            f"{kv.shape[-1]}) with an hdim_v of at least 1"
        )
    return hdim, rows - hdim


def _check_dimensions(name: str, x: object, allowed: tuple[int, ...], expected: str) -> None:
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    check_layout(name, x)
    if x.dim() not in allowed:
        raise ValueError(f"{name} is {describe(x)}; expected {expected}")
