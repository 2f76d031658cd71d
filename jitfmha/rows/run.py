"""From the arguments of a call over rows to its kernel, once slowly and from then on quickly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.detection import target_of
from ..call.known_calls import Run, looked_up
from ..planning.target import AmdTarget, CpuTarget
from ..problem.memory import HUGE_PAGES_FROM_BYTES, request_huge_pages
from ..problem.problem import Direction
from .amd import MOST_STRIDE, AmdRows
from .cpu import cpu_entry
from .problem import (
    RowArguments,
    RowBackwardArguments,
    RowGradients,
    RowTraits,
    as_rows,
    traits_of,
)
from .structs import CALLS

# The result, the sum with a residual and the scales; None is what was not asked for.
RowResults = tuple[Tensor, Tensor | None, Tensor | None]
# A block of rows has a part of the weights' gradients of its own, which costs traffic; so it has
# some rows. A block of fewer elements is not worth a thread.
_LEAST_BLOCK_ROWS, _LEAST_BLOCK_ELEMENTS, _MOST_BLOCKS = 16, 1 << 14, 64
# A compute unit has one at most, so that there are few parts to add up.
_LEAST_ROWS_OF_WORKGROUP = 4
_NO_MEMORY = "the CPU kernel of rows could not allocate its scratch memory"


def run_rows(arguments: RowArguments) -> RowResults:
    """Make all checks, or find that they were made, and launch the kernel.

    Raises what ``traits_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    kind, x, residual, weight, bias, eps, out_dtype = arguments
    tensors = x, residual, weight, bias
    run = looked_up("rows", (kind, eps, out_dtype), tensors, _prepare, arguments)
    results: RowResults = run(*tensors)
    return results


def run_rows_backward(arguments: RowBackwardArguments) -> RowGradients:
    """The same for gradients."""
    kind, dout, dsum, x, weight, bias, eps, wants_weight = arguments
    tensors = dout, dsum, x, weight, bias
    options = kind, eps, wants_weight
    run = looked_up("rows_bwd", options, tensors, _prepare_backward, arguments)
    gradients: RowGradients = run(*tensors)
    return gradients


class _Kernel:
    """What a call's kernel is given, but for its tensors; ``wanted`` gradients of weights."""

    def __init__(
        self, traits: RowTraits, direction: Direction, x: Tensor, eps: float, wanted: int = 0
    ) -> None:
        self.rows, self.columns = x.shape[:-1].numel(), x.shape[-1]
        self.pack = CALLS[direction].packer.pack
        self._eps, self._wanted = eps, wanted
        self._target = target = target_of(x.device)
        self._most_stride = None if isinstance(target, CpuTarget) else MOST_STRIDE
        self.entry = self._amd = None
        if isinstance(target, AmdTarget):
            self._amd = AmdRows(traits, direction, target, self.rows, self.columns)
        elif self.rows:
            self.entry = cpu_entry(traits, direction, target.isa)
        self._blocks = self._blocks_of_gradients(1) if direction == "backward" else 0

    def as_rows(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each as the kernel takes it."""
        return [None if x is None else as_rows(x, self._most_stride) for x in tensors]

    def launch(self, tensors: Sequence[Tensor | None], strides: Sequence[int]) -> None:
        """Run it: tensors and strides in the order of its struct."""
        rows, columns, amd = self.rows, self.columns, self._amd
        wanted, blocks = self._wanted, self._blocks
        if rows == 0:
            return
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        device = tensors[0].device  # type: ignore[union-attr]
        words = partial = None
        if amd:
            kernel = amd.loaded(pointers, strides)
            words = kernel.zeros(device)
            blocks = self._blocks_of_gradients(kernel.units_of_block) if blocks else kernel.blocks
        if wanted:
            partial = torch.empty((wanted, blocks, columns), dtype=torch.float32, device=device)
        pointers.append(0 if partial is None else partial.data_ptr())
        pointers.append(0 if words is None else words.data_ptr())
        packed = self.pack(*pointers, *strides, rows, columns, blocks, self._eps)
        if amd:
            # They have to live as long as the kernel runs.
            amd.launch(kernel, packed, (*tensors, partial, words), blocks, wanted)
        elif self.entry and self.entry(packed):
            raise MemoryError(_NO_MEMORY)

    def _blocks_of_gradients(self, units_of_block: int) -> int:
        rows, least, most = self.rows, _LEAST_BLOCK_ROWS, _MOST_BLOCKS
        blocks = min(rows, max(rows * self.columns // _LEAST_BLOCK_ELEMENTS, 1))
        if not self._wanted:
            return blocks
        if isinstance(self._target, AmdTarget):
            least, most = _LEAST_ROWS_OF_WORKGROUP, self._target.compute_units // units_of_block
        return max(min(blocks, rows // least, most), 1)


def _prepare(arguments: RowArguments) -> Run:
    _, x, residual, weight, bias, eps, out_dtype = arguments
    traits = traits_of(arguments)
    shape, columns, batch = x.shape, x.shape[-1], x.shape[:-1]
    dtype = out_dtype or x.dtype
    wants_huge_pages = x.device.type == "cpu" and x.nbytes >= HUGE_PAGES_FROM_BYTES
    given = x, residual, weight, bias
    are_plain = all(each is None or each.is_contiguous() for each in given)
    kernel = _Kernel(traits, "forward", x, eps)

    def run(*given: Tensor | None) -> RowResults:
        x, residual, *_ = given
        assert x is not None
        device = x.device
        out = torch.empty(shape, dtype=dtype, device=device)
        total = None if residual is None else torch.empty(shape, dtype=x.dtype, device=device)
        scale = None
        if traits.is_quantised:
            scale = torch.empty(batch, dtype=torch.float32, device=device)
        for each in (out, total) if wants_huge_pages else ():
            if each is not None:
                request_huge_pages(each)
        strides = [columns, columns]
        if not are_plain:
            given = (*kernel.as_rows(given),)
            strides = [columns if each is None else each.stride(0) for each in given[:2]]
        kernel.launch((*given, out, total, scale), strides)
        return out, total, scale

    pack, entry, rows = kernel.pack, kernel.entry, kernel.rows

    def run_plain(
        x: Tensor, _: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> RowResults:
        # The same, with nothing left to ask: half of what a small call takes.
        out = _empty_like(x)
        packed = pack(
            *(x.data_ptr(), 0),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            *(out.data_ptr(), 0, 0, 0, 0, columns, columns, rows, columns, 0, eps),
        )
        if entry(packed):  # type: ignore[misc]
            raise MemoryError(_NO_MEMORY)
        return out, None, None

    asks_for_more = residual is not None or dtype != x.dtype or wants_huge_pages
    return run_plain if entry and are_plain and not asks_for_more else run


_empty_like = torch.empty_like


def _prepare_backward(arguments: RowBackwardArguments) -> Run:
    kind, dout, dsum, x, weight, bias, eps, wants_weight = arguments
    traits = traits_of(RowArguments(kind, x, dsum, weight, bias, eps, None))
    if dout.shape != x.shape or dout.dtype != x.dtype or dout.device != x.device:
        raise ValueError(
            f"dout is a {dout.dtype} tensor of shape {tuple(dout.shape)} on {dout.device}; it must "
            f"be as x, {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )
    shape = x.shape
    wanted = (weight is not None and wants_weight) + (bias is not None)
    kernel = _Kernel(traits, "backward", x, eps, wanted)
    empty = torch.empty_like if kernel.rows else torch.zeros_like

    def run(
        dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> RowGradients:
        dx = torch.empty(shape, dtype=x.dtype, device=x.device)
        dweight = empty(weight) if weight is not None and wants_weight else None
        gradients = RowGradients(dx, dweight, None if bias is None else empty(bias))
        given = kernel.as_rows((dout, x, dsum, weight))
        strides = [0 if each is None else each.stride(0) for each in given[:3]]
        kernel.launch((*given, *gradients), strides)
        return gradients

    return run
