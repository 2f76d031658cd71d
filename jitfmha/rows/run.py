"""From the arguments of a call over rows to its kernel, once slowly and from then on quickly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..call.detection import target_of
from ..call.known_calls import Run, keeps_calls
from ..planning.target import AmdTarget, CpuTarget
from ..problem.checks import refuse_jit_trace
from ..problem.memory import HUGE_PAGES_FROM_BYTES, request_huge_pages
from ..problem.problem import Direction
from .amd import MOST_STRIDE, AmdRows, LoadedRows
from .cpu import cpu_entry
from .problem import (
    RowArguments,
    RowBackwardArguments,
    RowTraits,
    as_rows,
    traits_of,
)
from .structs import CALLS

# A block of rows has a part of the weights' gradients of its own, which costs traffic; so it has
# some rows. A block of fewer elements is not worth a thread.
_LEAST_BLOCK_ROWS, _LEAST_BLOCK_ELEMENTS, _MOST_BLOCKS = 8, 1 << 14, 64
# A compute unit has one at most, so that there are few parts to add up.
_LEAST_ROWS_OF_WORKGROUP = 4
_NO_MEMORY = "the CPU kernel of rows could not allocate its scratch memory"


class _Kernel:
    """What calls with tensors of these layouts have in common; ``wanted`` gradients of weights."""

    def __init__(
        self,
        traits: RowTraits,
        direction: Direction,
        tensors: Sequence[Tensor | None],
        eps: float,
        wanted: int = 0,
    ) -> None:
        refuse_jit_trace()
        x = tensors[0]
        assert x is not None
        self.rows, self._columns = x.shape[:-1].numel(), x.shape[-1]
        self.pack = CALLS[direction].packer.pack
        self._eps, self._wanted, self._device = eps, wanted, x.device
        self._target = target = target_of(x.device)
        self._wants_huge_pages = x.is_cpu and x.nbytes >= HUGE_PAGES_FROM_BYTES
        self._are_plain = all(each is None or each.is_contiguous() for each in tensors)
        self._most_stride = None if isinstance(target, CpuTarget) else MOST_STRIDE
        self.entry = self._amd = None
        if isinstance(target, AmdTarget):
            self._amd = AmdRows(traits, direction, target, (self.rows, self._columns))
        elif self.rows:
            self.entry = cpu_entry(traits, direction, target.isa)
        self._blocks = self._blocks_of_gradients() if direction == "backward" else 0
        self.is_quick = self.entry is not None and self._are_plain and not self._wants_huge_pages
        # Of a forward call whose rows follow each other: what stands behind its tensors.
        self.sizes = (self._columns, self._columns, self.rows, self._columns, 0, eps)

    def launch(
        self,
        rows: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
        results: Sequence[Tensor | None],
    ) -> None:
        """Run it: all tensors in the order of its struct."""
        columns, amd, blocks = self._columns, self._amd, self._blocks
        if self.rows == 0:
            return
        for each in results if self._wants_huge_pages else ():
            if each is not None and each.nbytes >= HUGE_PAGES_FROM_BYTES:
                request_huge_pages(each)
        if self._are_plain:
            strides = [columns] * len(rows)
        else:
            rows, weights = self._as_rows(rows), self._as_rows(weights)
            strides = [columns if x is None else x.stride(0) for x in rows]
        tensors = *rows, *weights, *results
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        words = partial = None
        if amd:
            kernel = amd.loaded(pointers, strides)
            words = kernel.zeros(self._device)
            blocks = self._blocks_of_gradients(kernel) if blocks else kernel.blocks
        if self._wanted:
            size = self._wanted, blocks, columns
            partial = torch.empty(size, dtype=torch.float32, device=self._device)
        pointers.append(0 if partial is None else partial.data_ptr())
        pointers.append(0 if words is None else words.data_ptr())
        packed = self.pack(*pointers, *strides, self.rows, columns, blocks, self._eps)
        if amd:
            counts = blocks * kernel.shares, kernel.combining, self._wanted
            # They have to live as long as the kernel runs.
            amd.start(kernel.address, counts, packed, (*tensors, partial, words))
        elif self.entry and self.entry(packed):
            raise MemoryError(_NO_MEMORY)

    def _as_rows(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if x is None else as_rows(x, self._most_stride) for x in tensors]

    def _blocks_of_gradients(self, kernel: LoadedRows | None = None) -> int:
        target, blocks = self._target, self.rows * self._columns // _LEAST_BLOCK_ELEMENTS
        if not self._wanted:
            return max(min(blocks, self.rows), 1)
        if not kernel or not isinstance(target, AmdTarget):
            return max(min(blocks, self.rows // _LEAST_BLOCK_ROWS, _MOST_BLOCKS), 1)
        most = target.compute_units // kernel.units_of_block
        blocks = max(min(blocks, self.rows // _LEAST_ROWS_OF_WORKGROUP, most), 1)
        turns = -(-self.rows // (blocks * kernel.rows))
        return -(-self.rows // (turns * kernel.rows))


# In half the time that torch.empty takes.
_new = partial(torch.empty_like, memory_format=torch.contiguous_format)


@keeps_calls("rows", 4)
def prepared_rows(arguments: RowArguments) -> Run:
    """What gives, of the result, the sum with a residual and the scales, those that a call has.

    Makes all checks, or finds that they were made. Raises what ``traits_of`` does, and
    ``jitfmha.BuildError`` where the kernel does not compile.
    """
    x, residual, weight, bias, _, eps, out_dtype = arguments
    traits = traits_of(arguments)
    batch, is_quantised = x.shape[:-1], traits.is_quantised
    kernel = _Kernel(traits, "forward", (x, residual, weight, bias), eps)

    def run(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        out = _new(x, dtype=out_dtype)
        total = None if residual is None else _new(x)
        scale = x.new_empty(batch, dtype=torch.float32) if is_quantised else None
        kernel.launch((x, residual), (weight, bias), (out, total, scale))
        if total is None:
            return (out,) if scale is None else (out, scale)
        return (out, total) if scale is None else (out, total, scale)

    pack, entry, sizes = kernel.pack, kernel.entry, kernel.sizes

    def run_plain(
        x: Tensor, _: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor]:
        # The same, with nothing left to ask.
        out = _empty_like(x)
        of_weight = 0 if weight is None else weight.data_ptr()
        of_bias = 0 if bias is None else bias.data_ptr()
        packed = pack(x.data_ptr(), 0, of_weight, of_bias, out.data_ptr(), 0, 0, 0, 0, *sizes)
        if entry(packed):  # type: ignore[misc]
            raise MemoryError(_NO_MEMORY)
        return (out,)

    is_more = residual is not None or out_dtype not in (None, x.dtype)
    return run_plain if kernel.is_quick and not is_more else run


_empty_like = torch.empty_like


@keeps_calls("rows_bwd", 5)
def prepared_gradients(arguments: RowBackwardArguments) -> Run:
    """The same: the gradients of x, the weight and the bias."""
    dout, dsum, x, weight, bias, kind, eps, _ = arguments
    traits = traits_of(RowArguments(x, dsum, weight, bias, kind, eps, None))
    if dout.shape != x.shape or dout.dtype != x.dtype or dout.device != x.device:
        raise ValueError(
            f"dout is a {dout.dtype} tensor of shape {tuple(dout.shape)} on {dout.device}; it must "
            f"be as x, {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )
    has_weight, has_bias = arguments.has
    kernel = _Kernel(traits, "backward", (dout, x, dsum, weight), eps, has_weight + has_bias)
    empty = torch.empty_like if kernel.rows else torch.zeros_like

    def run(
        dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        dx = _new(x)
        dweight = empty(weight) if has_weight else None  # type: ignore[arg-type]
        dbias = None if bias is None else empty(bias)
        kernel.launch((dout, x, dsum), (weight,), (dx, dweight, dbias))
        return (dx, *(each for each in (dweight, dbias) if each is not None))

    return run
