"""Kernels of rows for AMD GPUs: how many threads have a row, and how they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from torch import Tensor

from .. import jit
from ..amd.chips import Arch, architecture
from ..amd.kernel_arguments import DEVICE
from ..kernels.compiled.device_spec import device_spec
from ..kernels.struct_launcher import StructLauncher
from ..planning.target import AmdTarget
from ..problem.dtypes import DTYPE_BYTES, FP8_NAMES
from ..problem.problem import Direction
from .problem import RowTraits
from .structs import CALLS

ELEMENTS = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16", "int8": "INT8"}
ELEMENTS |= dict.fromkeys(FP8_NAMES.values(), "FP8")
_TEMPLATES: dict[Direction, str] = {"forward": "rows_fwd", "backward": "rows_bwd"}
LARGEST = {"int8": 127, "fp8_e4m3fn": 448, "fp8_e4m3fnuz": 240}
LOAD_BYTES = 16
# Of a thread, before a row has more threads: enough on their way, and enough rows in a workgroup.
_WANTED_CHUNKS = 4
_WAVE, _MOST_THREADS, _LEAST_THREADS = 64, 1024, 256
# Registers for the numbers of a thread, of the 128 that each of so many threads has.
_HELD_REGISTERS = 72
# The same in backward, of the 256 that each of half as many threads has.
_SUMMED_REGISTERS = 170
# Workgroups with a block of rows each; more have not the registers.
_STREAMS_OF_UNIT = 3
# Of a gradient, which a workgroup adds up: a line of the cache.
_COMBINED_COLUMNS = 32
MOST_STRIDE = 1 << 21
"""From which on the rows of a workgroup may be further apart than a buffer reaches."""


class RowKernel(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        width: numbers that a thread loads at once.
        ragged: whether rows are no multiple of it.
        row_lanes, threads: of a row and of a workgroup.
        held: loads of a row that a thread keeps.
        streams: whether forward a workgroup has a block of rows, one after the other.
    """

    traits: RowTraits
    direction: Direction
    arch: Arch
    width: int
    ragged: bool
    row_lanes: int
    threads: int
    held: int
    streams: bool

    @classmethod
    def of(
        cls, traits: RowTraits, direction: Direction, arch: Arch, columns: int, width: int
    ) -> RowKernel:
        """The kernel for rows that allow loads of so many numbers."""
        chunks = -(-columns // width)
        registers = -(-width * DTYPE_BYTES[traits.dtype] // 4)
        most_threads, wanted, more = _MOST_THREADS, _WANTED_CHUNKS, 1
        most_held = _HELD_REGISTERS // registers
        # Results of 8 bits are too few to hide loads behind them.
        streams = traits.is_quantised and chunks <= _WANTED_CHUNKS * _LEAST_THREADS
        if direction == "backward":
            # Two tensors of this row and the next one, the weight, and two sums of floats.
            wanted, more, most_held = 1, 0, _SUMMED_REGISTERS // (5 * registers + 2 * width)
            if chunks > most_threads:
                most_threads //= 2
        lanes = 1
        # Forward may keep one more, so that some lanes have not nothing to do at the end of a row.
        while lanes < most_threads and lanes * (wanted + more) < chunks + more:
            lanes *= 2
        held = min(-(-chunks // lanes), most_held)
        threads = most_threads
        if direction == "forward":
            threads = lanes if lanes > _WAVE and not streams else _LEAST_THREADS
        ragged = columns % width != 0
        return cls(traits, direction, arch, width, ragged, lanes, threads, held, streams)

    @property
    def name(self) -> str:
        of_row = f"{self.held}x{self.width}x{self.row_lanes}{'_ragged' if self.ragged else ''}"
        return f"{_TEMPLATES[self.direction]}_{self.traits.name}_{of_row}_{self.arch}"

    @property
    def combine_name(self) -> str:
        """That of the kernel behind it, which adds up gradients of weights; "" in forward."""
        return f"{self.name}_combine" if self.direction == "backward" else ""

    @property
    def rows(self) -> int:
        """Those of a workgroup."""
        return self.threads // self.row_lanes


@cache
def kernel_spec(kernel: RowKernel) -> jit.BuildSpec:
    """The sources and the flags of a kernel."""
    traits = kernel.traits
    switches = ("has_weight", "has_bias", "has_residual")
    values = {
        **{name: str(getattr(traits, name)).lower() for name in switches},
        "kind": traits.kind,
        "kernel": kernel.name,
        "shared_structs": CALLS[kernel.direction].cpp(DEVICE),
        "element": ELEMENTS[traits.dtype],
        "weight_element": ELEMENTS[traits.weight_dtype],
        "ragged": str(kernel.ragged).lower(),
        "largest": f"{LARGEST.get(traits.out_dtype, 0)}.0f",
        **{name: getattr(kernel, name) for name in ("width", "row_lanes", "threads", "held")},
    }
    if kernel.direction == "forward":
        values |= {
            "out_element": ELEMENTS[traits.out_dtype],
            "streams": str(kernel.streams).lower(),
        }
    else:
        values |= {"combine_kernel": kernel.combine_name, "combined_columns": _COMBINED_COLUMNS}
    why = f"the first {kernel.direction} {traits.kind} of {traits.dtype} rows on {kernel.arch}"
    headers = "elements.h", "row_chunks.h"
    template = f"{_TEMPLATES[kernel.direction]}.hip"
    return device_spec(kernel.name, kernel.arch, template, values, headers, why)


class AmdRows(StructLauncher):
    """The kernels of calls that differ in the addresses of their tensors alone."""

    def __init__(
        self,
        traits: RowTraits,
        direction: Direction,
        target: AmdTarget,
        rows: int,
        columns: int,
    ) -> None:
        """Raises ``NotImplementedError`` where the chip has no such form of fp8."""
        own = architecture(target.arch).fp8_dtype
        if traits.out_dtype in FP8_NAMES.values() and traits.out_dtype != own:
            raise NotImplementedError(
                f"out_dtype is {traits.out_dtype}; {target} rounds to {own} and int8"
            )
        super().__init__(target)
        self._traits, self._direction = traits, direction
        self._rows, self._columns = rows, columns
        self.blocks = min(rows, _STREAMS_OF_UNIT * target.compute_units)
        self._kernels: dict[int, tuple[int, int]] = {}

    def launch(
        self,
        packed: bytes,
        pointers: Sequence[int],
        strides: Sequence[int],
        tensors: Sequence[Tensor | None],
        blocks: int = 0,
        combined: int = 0,
    ) -> None:
        """Start the kernel on the current stream, as :meth:`start` does.

        ``blocks`` of rows have a workgroup each, in backward, and so many gradients are
        ``combined`` of their parts.

        Raises ``jitfmha.HipError`` where the HIP runtime refuses it.
        """
        width = self._width(pointers, strides)
        if width not in self._kernels:
            self._kernels[width] = self._loaded(width)
        kernel, workgroups = self._kernels[width]
        counts = blocks or workgroups, -(-self._columns // _COMBINED_COLUMNS), combined
        self.start(kernel, counts, packed, tensors)

    def _width(self, pointers: Sequence[int], strides: Sequence[int]) -> int:
        """How many numbers all loads and stores can have: words of them at multiples of 4 bytes."""
        traits = self._traits
        x, weights, out = (
            DTYPE_BYTES[each] for each in (traits.dtype, traits.weight_dtype, traits.out_dtype)
        )
        of_pointers = (x, x, weights, weights, out, x)  # and that of the scale
        if self._direction == "backward":
            of_pointers = (x, x, x, weights, x, weights)  # and what is written number by number
        begins = [
            *zip(pointers, of_pointers, strict=False),
            *(
                (n * size, size)
                for n, size in ((self._columns, min(x, out)), *((n, x) for n in strides))
            ),
        ]
        width = LOAD_BYTES // min(x, 2 * out)
        while width > 1 and (
            width > self._columns or any(at % min(width * size, 4) for at, size in begins)
        ):
            width //= 2
        return width

    def _loaded(self, width: int) -> tuple[int, int]:
        """The address of a kernel, and the workgroups that it is launched with."""
        arch = self._target.arch
        kernel = RowKernel.of(self._traits, self._direction, arch, self._columns, width)
        workgroups = self.blocks if kernel.streams else -(-self._rows // kernel.rows)
        if workgroups * kernel.threads >= 1 << 32:
            raise NotImplementedError(
                f"x has {self._rows} rows of {self._columns} numbers; a launch has room for less "
                "than 2**32 threads"
            )
        spec = kernel_spec(kernel)
        names = spec.artifact_name, kernel.name, kernel.combine_name
        return self.load(jit.read(spec), kernel.threads, *names), workgroups
