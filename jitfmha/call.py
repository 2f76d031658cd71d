"""From checked arguments to a launched kernel, once slowly and from then on quickly.

The first call of a kind is checked, planned and bound; the result is kept under everything that
the check looked at. Later calls look it up, allocate the outputs and launch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .dispatch import Launch, select
from .emulated_here import emulated_run_here
from .huge_pages import LEAST_BYTES, request_huge_pages
from .mask import INT64_MAX, OPEN_WINDOW, Mask, parse_mask
from .problem import (
    Bf16Cvt,
    Problem,
    check_cu_seqlens_values,
    make_problem,
    may_overlap,
    out_dtype_of,
)
from .target import AmdTarget, target_of

CuSeqlens = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, q padded, k padded
Descales = tuple[Tensor | None, Tensor | None, Tensor | None]  # q, k, v

_MOST_PREPARED = 4096


@dataclass(frozen=True, eq=False, repr=False)
class PreparedCall:
    """A call of which everything but the tensors' addresses is settled."""

    problem: Problem
    launch: Launch | None  # None where there is no output element to compute
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    out_dtype: torch.dtype | None  # None where it is q's
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]  # contiguous; given, because that is quicker
    spans: tuple[int, ...]  # bytes from the first to behind the last element: q, k, v, out
    reads_cu_seqlens: bool
    wants_huge_pages: bool  # for a new output


_prepared: dict[Hashable, PreparedCall] = {}


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    mask: int | str | Mask,
    window_size: tuple[int, int],
    return_lse: bool,
    out: Tensor | None,
    cu_seqlens: CuSeqlens | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    bf16_cvt: Bf16Cvt = "rtne",
    descales: Descales | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention eagerly; the arguments are those of ``fmha_fwd``.

    Tensors must be plain: no subclass, no tracing, no transform in effect.
    """
    try:
        key: Hashable = (
            (q.shape, q.stride(), q.dtype, q.device),
            (k.shape, k.stride(), k.dtype, k.device),
            (v.shape, v.stride(), v.dtype, v.device),
            # 1, 1.0 and True are one key, but not all of them are valid: add what tells them apart.
            (softmax_scale, softmax_scale.__class__, mask, mask.__class__),
            None if window_size is OPEN_WINDOW else repr(window_size),
            (return_lse, return_lse.__class__, bf16_cvt),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            None if cu_seqlens is None else _described_cu_seqlens(*cu_seqlens),
            None if descales is None else _described(descales),
            # CPU tensors are an emulated GPU's inside of `emulate`, and only there.
            None if (run_here := emulated_run_here()) is None else run_here.emulation,
        )
        call = _prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not a tensor, not hashable, not strided: the checks below say what is wrong, if anything.
        key = call = None
    if call is None:
        call = _prepare(
            *(q, k, v, softmax_scale, mask, window_size, return_lse, out, cu_seqlens),
            *(bf16_cvt, descales),
        )
        if key is not None:
            if len(_prepared) >= _MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = call
    covered = True
    if cu_seqlens is not None:
        if call.reads_cu_seqlens:
            covered = check_cu_seqlens_values(call.problem, cu_seqlens, max_seqlen_q, max_seqlen_k)
        else:
            covered = cu_seqlens[0] is cu_seqlens[2]
    if out is None:
        if call.out_dtype is None:
            out = q.new_empty_strided(call.out_shape, call.out_strides)
        else:
            out = q.new_empty_strided(call.out_shape, call.out_strides, dtype=call.out_dtype)
        if call.wants_huge_pages:
            request_huge_pages(out)
        if not covered:
            out.zero_()
    else:
        _refuse_shared_memory(out, q, k, v, call.spans)
        if not out.is_inference():
            # Autograd must notice the write if it has saved out for a backward pass.
            torch.autograd.graph.increment_version(out)
    lse = None
    if return_lse:
        lse = q.new_empty_strided(call.lse_shape, call.lse_strides, dtype=torch.float32)
        if not covered:
            lse.fill_(-torch.inf)
    if call.launch is not None:
        call.launch(q, k, v, out, lse, cu_seqlens, max_seqlen_q, descales)
    return out, lse


def resolve_cu_seqlens(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_k_padded: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> CuSeqlens | None:
    """The four prefix sums of a gm1 call, or None for gm0.

    Raises ``ValueError`` where only some of what gm1 needs is given.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        for name, value in (
            ("cu_seqlens_q_padded", cu_seqlens_q_padded),
            ("cu_seqlens_k_padded", cu_seqlens_k_padded),
            ("max_seqlen_q", max_seqlen_q),
            ("max_seqlen_k", max_seqlen_k),
        ):
            if value is not None:
                given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{name} is given without cu_seqlens_q and cu_seqlens_k ({given})")
        return None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} is missing; group mode needs cu_seqlens_q and cu_seqlens_k")
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value is None or (value.__class__ is int and 0 <= value <= INT64_MAX):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative")
        if isinstance(value, int) and value > INT64_MAX:
            raise ValueError(f"{name}={value} must be less than 2**63")
    return (
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded,
        cu_seqlens_k if cu_seqlens_k_padded is None else cu_seqlens_k_padded,
    )


def resolve_descales(
    q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> Descales | None:
    """The three scales of fp8 inputs, or None where all of them are 1."""
    if q_descale is None and k_descale is None and v_descale is None:
        return None
    return q_descale, k_descale, v_descale


def default_softmax_scale(q: Tensor) -> float:
    """``1 / sqrt(hdim)``; 1 where q has no head dimension to speak of (an error comes later)."""
    hdim = q.shape[-1] if q.dim() > 0 else 0
    return float(hdim) ** -0.5 if hdim > 0 else 1.0


def describe_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    mask: int | str | Mask,
    window_size: tuple[int, int],
    return_lse: bool,
    out: Tensor | None,
    cu_seqlens: CuSeqlens | None,
    bf16_cvt: Bf16Cvt = "rtne",
    descales: Descales | None = None,
) -> Problem:
    """The checked :class:`Problem` of a call; reads no tensor's data."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be a bool, got {return_lse!r}")
    return make_problem(
        q,
        k,
        v,
        softmax_scale=default_softmax_scale(q) if softmax_scale is None else softmax_scale,
        mask=mask if isinstance(mask, Mask) else parse_mask(mask, window_size),
        has_lse=return_lse,
        out=out,
        cu_seqlens=cu_seqlens,
        bf16_cvt=bf16_cvt,
        descales=descales,
    )


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    mask: int | str | Mask,
    window_size: tuple[int, int],
    return_lse: bool,
    out: Tensor | None,
    cu_seqlens: CuSeqlens | None,
    bf16_cvt: Bf16Cvt,
    descales: Descales | None,
) -> PreparedCall:
    problem = describe_problem(
        *(q, k, v, softmax_scale, mask, window_size, return_lse, out, cu_seqlens),
        *(bf16_cvt, descales),
    )
    target = target_of(q.device)
    plan = select(problem, target)
    strides = problem.out
    return PreparedCall(
        problem=problem,
        launch=None if problem.is_empty else plan.bind(),
        out_shape=problem.out_shape,
        out_strides=(
            *((strides.batch,) if problem.mode == "gm0" else ()),
            *(strides.seq, strides.head, 1),
        ),
        out_dtype=out_dtype_of(q.dtype) if problem.is_fp8 else None,
        lse_shape=problem.lse_shape,
        lse_strides=(
            *((problem.heads_q * problem.seqlen_q,) if problem.mode == "gm0" else ()),
            *(problem.seqlen_q, 1),
        ),
        spans=tuple(0 if x is None else _span(x) for x in (q, k, v, out)),
        # On a GPU the values stay unread: looking at them would wait for the device.
        reads_cu_seqlens=not isinstance(target, AmdTarget) or target.emulation is not None,
        wants_huge_pages=q.device.type == "cpu"
        and prod(problem.out_shape) * q.element_size() >= LEAST_BYTES,
    )


def _described(descales: Descales) -> tuple[object, ...]:
    """What the checks look at."""
    return tuple(
        [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in descales]
    )


def _described_cu_seqlens(q: Tensor, k: Tensor, padded_q: Tensor, padded_k: Tensor) -> object:
    """What the checks look at; mostly the padded ones are the plain ones, and say nothing new."""
    ends = (q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device)
    if padded_q is q and padded_k is k:
        return ends
    return ends, tuple([(x.shape, x.stride(), x.dtype, x.device) for x in (padded_q, padded_k)])


def _span(x: Tensor) -> int:
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _refuse_shared_memory(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: tuple[int, ...]
) -> None:
    start = out.data_ptr()
    end = start + spans[3]
    for name, x, span in (("q", q, spans[0]), ("k", k, spans[1]), ("v", v, spans[2])):
        other = x.data_ptr()
        if start < other + span and other < end and may_overlap(out, x):
            raise ValueError(f"out shares memory with {name}; give it memory of its own")
