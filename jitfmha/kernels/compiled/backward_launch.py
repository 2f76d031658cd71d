"""The kernels of a compiled backward pass, loaded, and their launches."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from ...amd.code_object import CodeObject
from ...amd.kernel_arguments import GRADIENT_TENSORS, TENSOR_STRIDES
from ...amd.manifest import KernelRow
from ...problem.arguments import Gradients, Tensors
from ...problem.dtypes import DTYPE_BYTES
from ...problem.problem import GradientStrides, Problem
from ..amd_plan import AmdPlan
from ..launcher import (
    BACKWARD_CALL,
    BACKWARD_KERNEL,
    BACKWARD_PASS,
    BACKWARD_TENSORS,
    SIZES,
    TENSORS,
    BoundKernel,
)
from ..modifiers import read_tensors
from ..ready.key_split import ONE_SPLIT
from .modifiers import modifier_constants, packed_modifiers, values_beside, window_of

Rows = Literal["q", "k"]
"""Whose rows the workgroups of a kernel have."""

_NO_PAGES = (0,) * 7
_FLOAT_BYTES = 4
_pack_strides = TENSOR_STRIDES.packer.pack
_NO_STRIDES = _pack_strides(0, 0, 0)
# `BACKWARD_TENSORS`, of which the strides of the gradients come packed: they do not change from
# call to call.
_STRIDES_BEGIN = GRADIENT_TENSORS.offsets["dout_strides"]
_packer = struct.Struct(
    f"{TENSORS.packer.format}{_STRIDES_BEGIN // 8}Q{GRADIENT_TENSORS.size - _STRIDES_BEGIN}s"
    f"3Q{TENSOR_STRIDES.size}sq"
)
assert _packer.size == BACKWARD_TENSORS.size
_pack_tensors = _packer.pack


class BackwardKernel(NamedTuple):
    """A kernel of a backward pass.

    Attributes:
        row: how the launcher knows it.
        rows: whose rows its workgroups have.
        own_rows: how many each.
        slices: of the columns of its gradient, each of which has workgroups of its own.
        leaves_alone: tensors of the call that it neither reads nor writes.
    """

    row: KernelRow
    rows: Rows
    own_rows: int
    slices: int = 1
    leaves_alone: frozenset[str] = frozenset()


LoadedKernels = list[tuple[BoundKernel, BackwardKernel]]
"""In the order of their launches."""


def load_kernels(
    plan: AmdPlan, kernels: Sequence[BackwardKernel], code_object: CodeObject
) -> LoadedKernels:
    """The kernels of a plan, all of them in ``code_object``, loaded as ``BoundKernel`` says."""
    return [
        (BoundKernel(plan.problem, plan.target, plan.block, kernel.row, code_object), kernel)
        for kernel in kernels
    ]


def backward_launch(
    problem: Problem,
    kernels: LoadedKernels,
    *,
    adds_dq_up: bool,
    shifts_rows: bool = False,
    turns: int = 0,
) -> BackwardLaunch:
    """The launch of loaded kernels for the lengths and strides of a problem.

    Args:
        adds_dq_up: whether the kernels need room for float32 sums that dq is made of.
        shifts_rows: whether they leave a shift of each row for each other.
        turns: how many integers they need, by which workgroups know whose turn it is.
    """
    assert problem.gradients is not None
    first, _ = kernels[0]
    beside = values_beside(problem.sizes.v[-1] * DTYPE_BYTES[problem.dtype])
    packed_sizes = first.launch_for(problem.sizes, ONE_SPLIT, None).sizes
    query_rows = math.prod(problem.lse_shape)
    constants = modifier_constants(problem)
    return BackwardLaunch(
        first,
        first.entry,
        first.current_stream,
        first.device_index,
        _packed_pass(problem, packed_sizes, kernels),
        [
            (bound, _packed_pass(problem, packed_sizes, [(bound, kernel)]), kernel.leaves_alone)
            for bound, kernel in kernels
        ]
        if first.launching is not None
        else [],
        problem.seqlen_q,
        problem.seqlen_k,
        query_rows,
        query_rows * problem.hdim_q if adds_dq_up else 0,
        query_rows if shifts_rows else 0,
        turns,
        _packed_strides(problem, problem.gradients),
        constants,
        beside,
        window_of(problem.mask)
        if first.kind.block == "ready"
        else packed_modifiers(None, None, _NO_PAGES, constants, beside),
    )


class BackwardLaunch(NamedTuple):
    """Bound kernels with all that they need but the tensors' addresses.

    Attributes:
        first: the kernel that is launched first.
        entry: the launcher's function.
        current_stream, device_index: where it is launched.
        packed: the ``BACKWARD_PASS``.
        one_by_one: where somebody watches launches: each kernel, a pass of it alone, and what it
            leaves alone.
        seqlen_q, seqlen_k: gm0 of every sequence, gm1 of all together.
        query_rows: of all heads and sequences together.
        dq_floats: that dq is added up in; 0 where it is not.
        shifts: what is subtracted from the scores of each row; 0 where that is nothing.
        turns: integers by which workgroups know whose turn it is; 0 where it is everybody's.
        strides: those of ``GRADIENT_TENSORS``, packed in order.
        constants: the numbers among the modifiers.
        beside: what else they hold.
        unmodified: the packed modifiers of a call without any; of ready kernels the window.
    """

    first: BoundKernel
    entry: Callable[..., int]
    current_stream: Callable[[int], int]
    device_index: int
    packed: bytes
    one_by_one: list[tuple[BoundKernel, bytes, frozenset[str]]]
    seqlen_q: int
    seqlen_k: int
    query_rows: int
    dq_floats: int
    shifts: int
    turns: int
    strides: bytes
    constants: tuple[float, ...]
    beside: tuple[int, ...]
    unmodified: bytes

    def __call__(self, tensors: Tensors) -> None:
        # Written out, here and below: loops over the tensors, and stars, would take longer.
        (
            first,
            entry,
            current_stream,
            device_index,
            packed,
            one_by_one,
            longest_q,
            longest_k,
            query_rows,
            dq_floats,
            shifts,
            turns,
            strides,
            constants,
            beside,
            modifying,
        ) = self
        q, k, v, out, lse, cu_seqlens, _, modifiers, dropout, gradients, *_ = tensors
        assert lse is not None, "a backward pass reads the lse"
        assert gradients is not None, "a backward pass has gradients"
        dout, dlse, dq, dk, dv, dbias = gradients
        sums_q = sums_k = padded_q = padded_k = 0
        if cu_seqlens is not None:
            q_sums, k_sums, q_padded, k_padded, max_seqlen_q, max_seqlen_k = cu_seqlens
            sums_q = sums_k = q_sums.data_ptr()
            if k_sums is not q_sums:
                sums_k = k_sums.data_ptr()
            padded_q = sums_q if q_padded is q_sums else q_padded.data_ptr()
            padded_k = sums_k if k_padded is k_sums else k_padded.data_ptr()
            # Where nobody says, all rows: no sequence is longer.
            if max_seqlen_q is not None and max_seqlen_q < longest_q:
                longest_q = max_seqlen_q
            if max_seqlen_k is not None and max_seqlen_k < longest_k:
                longest_k = max_seqlen_k
        # What the kernels leave for each other, in float32 like the lse: sums of dq, then the lse,
        # delta and shift of each row, then the turns.
        between = lse.new_empty(dq_floats + 2 * query_rows + shifts + turns)
        dq_sums = between.data_ptr()
        lse_log2 = dq_sums + dq_floats * _FLOAT_BYTES
        delta = lse_log2 + query_rows * _FLOAT_BYTES
        packed_tensors = _pack_tensors(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0,
            0,
            sums_q,
            sums_k,
            padded_q,
            padded_k,
            0,
            0,
            0,
            longest_q,
            1,
            current_stream(device_index),
            dout.data_ptr(),
            lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            lse_log2,
            delta,
            strides,
            dq_sums,
            delta + (query_rows + shifts) * _FLOAT_BYTES if turns else 0,
            0 if dbias is None else dbias.data_ptr(),
            _NO_STRIDES if dbias is None else _pack_strides(*_row_strides(dbias.stride()[:-1])),
            longest_k,
        )
        if modifiers is not None or dropout is not None:
            modifying = packed_modifiers(modifiers, dropout, _NO_PAGES, constants, beside)
        launching = first.launching
        if launching is None:
            status = entry(packed, modifying, packed_tensors)
            if status != 0:
                raise first.error(status)
            return
        # Who watches sees each launch with the memory that it may touch.
        touched = (*(cu_seqlens or ())[:4], *read_tensors(modifiers, dropout), between)
        for kernel, alone, leaves_alone in one_by_one:
            with launching((*_but(leaves_alone, tensors, gradients), *touched)):
                status = entry(alone, modifying, packed_tensors)
            if status != 0:
                raise kernel.error(status)


def _packed_pass(
    problem: Problem, sizes: bytes, kernels: Sequence[tuple[BoundKernel, BackwardKernel]]
) -> bytes:
    heads: dict[Rows, int] = {"q": problem.heads_q, "k": problem.heads_k}
    packed = BACKWARD_PASS.ctype(
        kernel_count=len(kernels), sizes=SIZES.ctype.from_buffer_copy(sizes)
    )
    for i, (bound, kernel) in enumerate(kernels):
        packed.kernels[i] = BACKWARD_KERNEL.ctype(
            call=BACKWARD_CALL.ctype.from_buffer_copy(bound.call),
            heads=heads[kernel.rows],
            rows=kernel.own_rows,
            slices=kernel.slices,
            has_rows_of_keys=kernel.rows == "k",
        )
    return bytes(packed)


def _but(
    leaves_alone: frozenset[str], tensors: Tensors, gradients: Gradients
) -> list[Tensor | None]:
    named = {name: getattr(tensors, name) for name in ("q", "k", "v", "out", "lse")}
    named |= gradients._asdict()
    return [x for name, x in named.items() if name not in leaves_alone]


def _packed_strides(problem: Problem, gradients: GradientStrides) -> bytes:
    def by_head(name: str) -> list[int]:
        """Bytes between batches, heads and rows of ``([b,] s, h, d)``."""
        *batch, _, head, _ = getattr(gradients, name)
        strides = batch[0] if batch else 0, head, problem.row_stride(name)
        return [DTYPE_BYTES[problem.dtype] * x for x in strides]

    # The lse has no last dimension, and heads first.
    strides = (
        by_head("dout"),
        _row_strides(gradients.lse),
        (0, 0, 0) if gradients.dlse is None else _row_strides(gradients.dlse),
        *(by_head(name) for name in ("dq", "dk", "dv")),
    )
    return b"".join(_pack_strides(*each) for each in strides)


def _row_strides(strides: Sequence[int]) -> tuple[int, int, int]:
    """The strides of batch, head and row of a tensor ``(b, h, s)``, or in gm1 ``(h, s)``."""
    *batch, head, row = strides
    return (batch[0] if batch else 0), head, row
