"""From the arguments of a call to a launched kernel, once slowly and from then on quickly.

A call is looked up under everything that the checks look at, allocates its outputs and launches.
What is not there yet is prepared, on one of two ways. The first call of a kind is checked, planned
and bound. Lengths and strides do not belong to the kind: a call with new ones is checked for them
alone, and gets a launch of the kernel that the kind has.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from .arguments import Arguments, CuSeqlens, Descales, Tensors
from .detection import target_of
from .dispatch import plan_for
from .mask import OPEN_WINDOW
from .memory import HUGE_PAGES_FROM_BYTES, extent, may_overlap, request_huge_pages
from .plan import Kernel, Launch
from .problem import (
    Problem,
    Sizes,
    check_cu_seqlens_values,
    check_sizes,
    make_problem,
    out_dtype_of,
)
from .target import TARGET_HERE, Target

_Kept = TypeVar("_Kept")
_MOST_KEPT = 4096


@dataclass(frozen=True, eq=False, repr=False)
class PreparedCall:
    """A call of which everything but the tensors' addresses is settled."""

    launch: Launch | None  # None where there is no output element to compute
    sizes: Sizes
    # In shape, strides and dtype, and of ordinary size: allocating such an output is quicker.
    out_is_like_q: bool
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]  # contiguous; given, because that is quicker
    spans: tuple[int, ...]  # bytes from the first to behind the last element: q, k, v, out
    reads_cu_seqlens: bool
    wants_huge_pages: bool  # for a new output


class CallKind:
    """Calls that differ in lengths, strides and addresses only, and the kernels that serve them."""

    def __init__(self, problem: Problem, target: Target) -> None:
        self._problem = problem
        self._target = target
        self._kernels: list[Kernel] = []

    def prepare(self, sizes: Sizes, arguments: Arguments) -> PreparedCall:
        """Settle a call with ``sizes``."""
        problem, seqlen_q = self._problem, sizes.seqlen_q
        heads_q, out = problem.heads_q, arguments.out
        out_shape: tuple[int, ...] = (seqlen_q, heads_q, problem.hdim_v)
        lse_shape: tuple[int, ...] = (heads_q, seqlen_q)
        lse_strides: tuple[int, ...] = (seqlen_q, 1)
        if problem.mode == "gm0":
            out_shape = (problem.batch, *out_shape)
            lse_shape = (problem.batch, *lse_shape)
            lse_strides = (heads_q * seqlen_q, *lse_strides)
        q = arguments.q
        wants_huge_pages = (
            q.device.type == "cpu" and prod(out_shape) * q.element_size() >= HUGE_PAGES_FROM_BYTES
        )
        return PreparedCall(
            launch=self._launch_for(sizes),
            sizes=sizes,
            out_is_like_q=(
                out_shape == q.shape
                and sizes.out == sizes.q
                and not problem.is_fp8
                and not wants_huge_pages
            ),
            out_shape=out_shape,
            out_dtype=out_dtype_of(q.dtype),
            lse_shape=lse_shape,
            lse_strides=lse_strides,
            spans=()
            if out is None
            else tuple([extent(x)[1] for x in (q, arguments.k, arguments.v, out)]),
            reads_cu_seqlens=self._target.has_host_memory,
            wants_huge_pages=wants_huge_pages,
        )

    def _launch_for(self, sizes: Sizes) -> Launch | None:
        problem = self._problem
        if problem.batch * sizes.seqlen_q * problem.heads_q == 0:
            # What nobody serves is refused, also where there is nothing to compute.
            plan_for(problem.with_sizes(sizes), self._target)
            return None
        for kernel in self._kernels:
            launch = kernel.launch_for(sizes)
            if launch is not None:
                return launch
        kernel = plan_for(problem.with_sizes(sizes), self._target).bind()
        launch = kernel.launch_for(sizes)
        assert launch is not None, "a kernel serves the sizes that it was planned for"
        self._kernels.insert(0, kernel)
        return launch


_prepared: dict[Hashable, PreparedCall] = {}
_kinds: dict[Hashable, CallKind] = {}


def run(arguments: Arguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention eagerly: the output, and the log-sum-exp where it is asked for.

    Tensors must be plain: no subclass, no tracing, no transform in effect.
    """
    q, k, v, scale, mask, window, return_lse, out, cu_seqlens, bf16_cvt, descales = arguments
    key: Hashable
    try:
        key = (
            (q.shape, q.stride(), q.dtype, q.device),
            (k.shape, k.stride(), k.dtype, k.device),
            (v.shape, v.stride(), v.dtype, v.device),
            # 1, 1.0 and True are one key, but not all of them are valid: add what tells them apart.
            scale,
            scale.__class__,
            mask,
            mask.__class__,
            None if window is OPEN_WINDOW else repr(window),
            return_lse,
            return_lse.__class__,
            bf16_cvt,
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            None if cu_seqlens is None else _described_cu_seqlens(cu_seqlens),
            None if descales is None else _described_descales(descales),
            # CPU tensors are somebody else's where a target is set, and only there.
            TARGET_HERE.get(),
        )
        prepared = _prepared.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not a tensor, not hashable, not strided: the checks say what is wrong, if anything.
        key = prepared = None
    if prepared is None:
        prepared = _prepare(key, arguments)
    covered = True
    if cu_seqlens is not None:
        if prepared.reads_cu_seqlens:
            covered = check_cu_seqlens_values(prepared.sizes, cu_seqlens)
        else:
            covered = cu_seqlens.q_padded is cu_seqlens.q
    if out is None:
        if prepared.out_is_like_q:
            out = _empty_like(q)
        else:
            out = q.new_empty_strided(
                prepared.out_shape, prepared.sizes.out, dtype=prepared.out_dtype
            )
            if prepared.wants_huge_pages:
                request_huge_pages(out)
        if not covered:
            out.zero_()
    else:
        _refuse_shared_memory(out, q, k, v, prepared.spans)
        if not out.is_inference():
            # Autograd must notice the write if it has saved out for a backward pass.
            torch.autograd.graph.increment_version(out)
    lse = None
    if return_lse:
        lse = q.new_empty_strided(prepared.lse_shape, prepared.lse_strides, dtype=torch.float32)
        if not covered:
            lse.fill_(-torch.inf)
    if prepared.launch is not None:
        prepared.launch(_new_tuple(Tensors, (q, k, v, out, lse, cu_seqlens, descales)))
    return out, lse


_empty_like = torch.empty_like
# What a NamedTuple's own constructor ends in, at half of its cost.
_new_tuple = tuple.__new__


def _prepare(key: Any, arguments: Arguments) -> PreparedCall:
    """Settle a call that is not kept under ``key``; None stands for one that cannot be kept."""
    if key is None:
        return _first_of_kind(arguments)[1]
    kind_key = _without_sizes(key)
    kind = _kinds.get(kind_key)
    if kind is None:
        kind, prepared = _first_of_kind(arguments)
        _keep(_kinds, kind_key, kind)
    else:
        prepared = kind.prepare(check_sizes(arguments), arguments)
    _keep(_prepared, key, prepared)
    return prepared


def _first_of_kind(arguments: Arguments) -> tuple[CallKind, PreparedCall]:
    problem = make_problem(arguments)
    kind = CallKind(problem, target_of(arguments.q.device))
    return kind, kind.prepare(problem.sizes, arguments)


def _keep(kept: dict[Hashable, _Kept], key: Hashable, value: _Kept) -> None:
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = value


def _without_sizes(key: Any) -> Hashable:
    """The part of a call's key that tells kinds apart: no lengths, no strides."""
    q, k, v, *options, out, cu_seqlens, descales, target = key
    described = []
    for shape, _, dtype, device in (q, k, v):
        # Where a dimension is missing or one too many, the kind is another one.
        described.append((len(shape), shape[:-3], shape[-2:], dtype, device))
    return (
        *(*described, *options),
        None if out is None else out[2:],
        *(cu_seqlens, descales, target),
    )


def _described_descales(descales: Descales) -> tuple[object, ...]:
    """What the checks look at."""
    return tuple(
        [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in descales]
    )


def _described_cu_seqlens(cu_seqlens: CuSeqlens) -> tuple[object, ...]:
    """What the checks look at; mostly the padded ones are the plain ones, and say nothing new."""
    q, k, q_padded, k_padded, _, _ = cu_seqlens
    plain = (q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device)
    if q_padded is q and k_padded is k:
        return plain
    padded = [(x.shape, x.stride(), x.dtype, x.device) for x in (q_padded, k_padded)]
    return (*plain, *padded)


def _refuse_shared_memory(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: tuple[int, ...]
) -> None:
    start = out.data_ptr()
    end = start + spans[3]
    for name, x, span in (("q", q, spans[0]), ("k", k, spans[1]), ("v", v, spans[2])):
        other = x.data_ptr()
        if start < other + span and other < end and may_overlap(out, x):
            raise ValueError(f"out shares memory with {name}; give it memory of its own")
