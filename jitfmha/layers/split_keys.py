"""Attention with the keys split into parts, and the combination of such parts.

Sources: ``mha_fwd_splitkv`` is named after AITER's C++ function, whose accumulated outputs and lse
it returns in the layout of flash-attn's kernels; ``flash_attn_combine`` is flash-attn 3's function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.pytorch.autocast import under_autocast
from ..call.pytorch.ops import call_parts_operator
from ..call.run import run_parts
from ..problem.arguments import (
    MAX_NUM_SPLITS,
    Arguments,
    gather_cu_seqlens,
    gather_keys,
)
from ..problem.checks import check_all_beside, describe, with_clear_errors
from ..problem.mask import OPEN_WINDOW
from ..problem.problem import make_problem
from ..problem.torch_parts import is_any_autocast_enabled, is_watched, refuse_derivatives
from .peer_values import as_int, check_out, written_to


@with_clear_errors
def mha_fwd_splitkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_splits: int,
    *,
    softmax_scale: float | None = None,
    mask: int | str = 0,
    window_size: tuple[int, int] = OPEN_WINDOW,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention with the results of ``num_splits`` parts of the keys beside those of all keys.

    Args:
        q, k, v: as for :func:`jitfmha.fmha_fwd`.
        num_splits: into how many parts the keys of a sequence are split, 1 to 128. A part is a
            whole number of key tiles, so that the last parts of short sequences are empty.
        softmax_scale, mask, window_size, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            block_table: as for :func:`jitfmha.fmha_fwd`.

    Returns:
        ``(out, lse, out_accum, lse_accum)``: out and lse as :func:`jitfmha.fmha_fwd` returns them
        with the same ``num_splits``. ``out_accum`` and ``lse_accum`` are what attention to each
        part alone gives, in float32: ``(num_splits, b, hq, sq, hdim_v)`` and
        ``(num_splits, b, hq, sq)``, in gm1 ``(num_splits, hq, total_q, hdim_v)`` and
        ``(num_splits, hq, total_q)``. A part in which a query sees no key is 0, and -inf in
        lse_accum.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: what no kernel serves; also inputs that require grad while grad mode is
            on, because the parts have no backward pass.
    """
    refuse_derivatives("mha_fwd_splitkv", q=q, k=k, v=v)
    count = as_int("num_splits", num_splits)
    if not 1 <= count <= MAX_NUM_SPLITS:
        raise ValueError(f"num_splits={num_splits!r} must be a number from 1 to {MAX_NUM_SPLITS}")
    cu_seqlens = gather_cu_seqlens(
        *(cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
    )
    arguments = Arguments(
        *(q, k, v, softmax_scale, mask, window_size),
        return_lse=True,
        cu_seqlens=cu_seqlens,
        keys=gather_keys(block_table, count, cu_seqlens),
    )
    is_seen = is_watched(q, k, v) or arguments.has_special_options()
    if not (is_seen or is_any_autocast_enabled()):
        return run_parts(arguments)
    if not torch.compiler.is_compiling():
        make_problem(arguments)
    return call_parts_operator(under_autocast(arguments))


@with_clear_errors
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The result for all keys, from those of parts of them.

    Args:
        out_partial: float32 ``(num_splits, b, sq, hq, hdim_v)``; what
            :func:`jitfmha.mha_fwd_splitkv` returns is to be transposed, as flash-attn's own kernel
            has it.
        lse_partial: float32 ``(num_splits, b, sq, hq)``, -inf where a part has no keys.
        out: where to write the result, ``(b, sq, hq, hdim_v)``.
        out_dtype: of a new result; that of ``out_partial`` by default.

    Returns:
        ``(out, lse)``, lse being float32 ``(b, sq, hq)``. Where no part has a key, out is 0 and lse
        -inf; where the lse of one is NaN or inf, both are NaN.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
    """
    for name, x, dimensions in (("out_partial", out_partial, 5), ("lse_partial", lse_partial, 4)):
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            raise TypeError(f"{name} must be a float32 tensor, got {describe(x)}")
        if x.dim() != dimensions:
            raise ValueError(f"{name} is {describe(x)}; expected {dimensions} dimensions")
    if out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"lse_partial has shape {tuple(lse_partial.shape)}, out_partial "
            f"{tuple(out_partial.shape)}; all but the last dimension agree"
        )
    check_all_beside((("out_partial", out_partial), ("lse_partial", lse_partial)))
    if not isinstance(out_dtype, torch.dtype | None):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {out_dtype!r}")
    if lse_partial.shape[0] == 0:
        raise ValueError(f"lse_partial has shape {tuple(lse_partial.shape)}; there is no part")
    if out is not None and out_dtype not in (None, check_out("out", out, out_partial[0]).dtype):
        raise ValueError(f"out_dtype={out_dtype}, but out has dtype {out.dtype}")
    largest = lse_partial.amax(0)
    shift = largest.masked_fill(largest == -torch.inf, 0)
    weights = (lse_partial - shift).exp()
    total = weights.sum(0)
    sees_keys = largest != -torch.inf
    divisor = total.masked_fill(~sees_keys, 1)
    # What a part without keys holds does not count, whatever it is.
    counted = out_partial.masked_fill((weights == 0)[..., None], 0)
    combined = (counted * weights[..., None]).sum(0) / divisor[..., None]
    lse = (divisor.log() + shift).masked_fill(~sees_keys, -torch.inf)
    if out is not None:
        return written_to(out, combined), lse
    return combined.to(out_dtype or out_partial.dtype), lse
