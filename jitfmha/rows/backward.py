"""The backward pass of a call over rows: its arguments, and its kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.detection import target_of
from ..call.known_calls import Run, looked_up
from ..planning.target import AmdTarget, CpuTarget
from .amd import MOST_STRIDE, AmdRows
from .cpu import cpu_entry
from .problem import Kind, RowArguments, as_rows, traits_of
from .run import NO_MEMORY
from .structs import CALLS

# A block of rows has a part of the weights' gradients of its own, which costs traffic; so it has
# some rows. A block of fewer elements is not worth a thread.
_LEAST_BLOCK_ROWS, _LEAST_BLOCK_ELEMENTS, _MOST_BLOCKS = 16, 1 << 14, 64
# A compute unit has one at most, so that there are few parts to add up.
_LEAST_ROWS_OF_WORKGROUP = 4


class RowGradients(NamedTuple):
    """Gradients of a call over rows; None is what nobody asked for."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


class RowBackwardArguments(NamedTuple):
    """The arguments of a backward pass.

    Attributes:
        dout, dsum: the gradients of the results; the latter of the sum with a residual, or None.
        x: what was normalised, with a residual the sum; of a softmax the result.
        bias: a tensor of the bias's dtype where its gradient is wanted.
        wants_weight: whether the gradient of the weight is.
    """

    kind: Kind
    dout: Tensor
    dsum: Tensor | None
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    wants_weight: bool


def run_rows_backward(arguments: RowBackwardArguments) -> RowGradients:
    """Check the arguments and launch the kernel.

    Raises what ``traits_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    kind, dout, dsum, x, weight, bias, eps, wants_weight = arguments
    tensors = dout, dsum, x, weight, bias
    run = looked_up("rows_bwd", (kind, eps, wants_weight), tensors, _prepare, arguments)
    gradients: RowGradients = run(*tensors)
    return gradients


def _prepare(arguments: RowBackwardArguments) -> Run:
    kind, dout, dsum, x, weight, bias, eps, wants_weight = arguments
    traits = traits_of(RowArguments(kind, x, dsum, weight, bias, eps, None))
    if dout.shape != x.shape or dout.dtype != x.dtype or dout.device != x.device:
        raise ValueError(
            f"dout is a {dout.dtype} tensor of shape {tuple(dout.shape)} on {dout.device}; it must "
            f"be as x, {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )
    shape, columns = x.shape, x.shape[-1]
    rows = x.numel() // columns
    target = target_of(x.device)
    wanted = (weight is not None and wants_weight) + (bias is not None)

    def blocks_for(units_of_block: int) -> int:
        blocks = min(rows, max(rows * columns // _LEAST_BLOCK_ELEMENTS, 1))
        if not wanted:
            return blocks
        least, most = _LEAST_BLOCK_ROWS, _MOST_BLOCKS
        if isinstance(target, AmdTarget):
            least = _LEAST_ROWS_OF_WORKGROUP
            most = target.compute_units // units_of_block
        return max(min(blocks, rows // least, most), 1)

    entry = amd = None
    if isinstance(target, AmdTarget):
        amd = AmdRows(traits, "backward", target, rows, columns)
    elif rows:
        entry = cpu_entry(traits, "backward", target.isa)
    pack = CALLS["backward"].packer.pack
    most_stride = None if isinstance(target, CpuTarget) else MOST_STRIDE
    empty = torch.empty_like if rows else torch.zeros_like

    def run(
        dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> RowGradients:
        dx = torch.empty(shape, dtype=x.dtype, device=x.device)
        dweight = empty(weight) if weight is not None and wants_weight else None
        gradients = RowGradients(dx, dweight, None if bias is None else empty(bias))
        if rows == 0:
            return gradients
        # They have to live as long as the kernel runs.
        as_given = [
            None if each is None else as_rows(each, most_stride) for each in (dout, x, dsum)
        ]
        flat = None if weight is None else weight.contiguous()
        strides = [0 if each is None else each.stride(0) for each in as_given]
        given = (*as_given, flat, *gradients)
        pointers = [0 if each is None else each.data_ptr() for each in given]
        kernel = amd.loaded(pointers, strides) if amd else None
        blocks = blocks_for(kernel.units_of_block if kernel else 1)
        partial = x.new_empty((wanted, blocks, columns), dtype=torch.float32) if wanted else None
        words = kernel.zeros(x.device) if kernel else None
        workspace = [0 if each is None else each.data_ptr() for each in (partial, words)]
        packed = pack(*pointers, *workspace, *strides, rows, columns, blocks, eps)
        if amd and kernel:
            amd.launch(kernel, packed, (*given, partial, words), blocks, wanted)
        elif entry and entry(packed):
            raise MemoryError(NO_MEMORY)
        return gradients

    return run
