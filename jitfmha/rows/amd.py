"""Kernels of rows for AMD GPUs: how many threads have a row, and how they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..amd.chips import Arch, architecture
from ..amd.kernel_arguments import DEVICE
from ..kernels.compiled.device_spec import device_spec
from ..kernels.struct_launcher import StructLauncher
from ..planning.target import AmdTarget
from ..problem.dtypes import DTYPE_BYTES, FP8_NAMES
from ..problem.problem import Direction
from .problem import Kind, RowTraits
from .structs import CALLS, TEMPLATES

ELEMENTS = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16", "int8": "INT8"}
ELEMENTS |= dict.fromkeys(FP8_NAMES.values(), "FP8")
LARGEST = {"int8": 127, "fp8_e4m3fn": 448, "fp8_e4m3fnuz": 240}
LOAD_BYTES = 16
# Of a thread, before a row has more threads: enough on their way, and in rows of five times a power
# of two all that there are.
_WANTED_CHUNKS = 5
_WAVE, _MOST_THREADS, _LEAST_THREADS = 64, 1024, 256
# Workgroups of a row: as many lanes combine what they found.
_MOST_SHARES = 16
# Numbers of a thread that wait as floats, and registers of all that forward holds, of the 128 that
# each of most threads has, or of the 168 of some.
_HELD, _HELD_REGISTERS, _MORE_HELD_REGISTERS = 40, 112, 120
# The same in backward, of the 128 that each has.
_SUMMED_REGISTERS = 85
# What a share of a row finds out in backward.
_NUMBERS_OF_SHARE: dict[Kind, int] = {"softmax": 1, "rms_norm": 2, "layer_norm": 4}
# From how many columns on one unit is as quick as two: blocks have parts of gradients, which are
# traffic, too. Of floats it is so for all kinds.
_READ_BY_ONE: dict[tuple[Arch, Kind], int] = {
    ("gfx942", "rms_norm"): 4096,
    ("gfx942", "layer_norm"): 4096,
    ("gfx950", "rms_norm"): 12288,
}
_FLOATS_READ_BY_ONE: dict[Arch, int] = {"gfx942": 4096, "gfx950": 8192}
# Of a gradient, which a workgroup adds up: a line of the cache, or up to four, so that all of them
# run at once.
_COMBINED_COLUMNS, _MOST_COMBINED_COLUMNS, _COMBINING_WORKGROUPS = 32, 128, 256
MOST_STRIDE = 1 << 21
"""From which on the rows of a workgroup may be further apart than a buffer reaches."""


def _threads_of_unit(held_registers: int, *, gains_by_floats: bool) -> int:
    """How many have registers for what each holds, and for what it computes with.

    ``gains_by_floats``: of weights that are held as such, rather than by more threads.
    """
    most = 88 if gains_by_floats else 100
    return 1024 if held_registers <= most else 768 if held_registers <= 128 else 512


class RowKernel(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        width: numbers that a thread loads at once.
        ragged: whether rows are no multiple of it.
        row_lanes, threads: of a row and of a workgroup.
        held: loads of a row that a thread keeps.
        of_unit: forward, workgroups of a unit, each with a block of rows; 0: all begin at once.
        combined_columns: those that a workgroup behind backward adds up.
        units_of_block: backward, compute units for each block of rows.
        shares: workgroups of a row, each with as many chunks as it keeps.
    """

    traits: RowTraits
    direction: Direction
    arch: Arch
    width: int
    ragged: bool
    row_lanes: int
    threads: int
    held: int
    of_unit: int
    combined_columns: int
    units_of_block: int
    shares: int

    @classmethod
    def of(
        cls,
        traits: RowTraits,
        direction: Direction,
        arch: Arch,
        columns: int,
        width: int,
        *,
        is_alone: bool,
    ) -> RowKernel:
        """The kernel for rows that allow loads of so many numbers.

        Forward nothing hides how long a row takes that ``is_alone`` on its unit: it has more
        threads.
        """
        chunks = -(-columns // width)
        registers, of_weights = (
            -(-width * DTYPE_BYTES[dtype] // 4) for dtype in (traits.dtype, traits.weight_dtype)
        )
        # Of what forward holds for each load: this row and the next one, floats, and weights.
        of_load = 2 * registers * (1 + traits.has_residual) + width
        of_load += of_weights * (traits.has_weight + traits.has_bias)
        held_of_loads = min(_HELD // width, _HELD // 2)
        most_held = min(held_of_loads, _HELD_REGISTERS // of_load)
        most_threads = _MOST_THREADS
        wanted = 1 if is_alone else min(_WANTED_CHUNKS, most_held)
        if direction == "backward":
            # Two tensors of this row and the next one, the weight, and two sums of floats.
            of_load = 5 * registers + 2 * width
            if traits.kind == "softmax" and registers == width:
                # It has neither weight nor sums, and floats are there already.
                of_load = 4 * width
            wanted, most_held = 1, _SUMMED_REGISTERS // of_load
        ragged, shares, lanes = columns % width != 0, 1, 1
        fit = most_held
        if traits.is_quantised:
            # Several workgroups wait for each other once more. A row has one where registers have
            # room for it without the next one.
            fit = min(held_of_loads, _MORE_HELD_REGISTERS // of_load)
        if chunks > most_threads * fit:
            lanes, held = most_threads, most_held
            if direction == "backward":
                lanes = _LEAST_THREADS
                # Of more shares there are fewer blocks, whose gradients are parts to add up.
                while lanes * most_held * _MOST_SHARES < chunks:
                    lanes *= 2
                held = -(-chunks // (lanes * _MOST_SHARES))
            shares = -(-chunks // (lanes * held))
            held = -(-chunks // (lanes * shares))
            if direction == "backward":
                # What shares tell takes registers, too.
                most_threads = max(lanes, most_threads // 2)
        else:
            # Of few each has more registers; rows of a part of a wave gain nothing by it.
            least = min(wanted, 4)
            more = min(_WANTED_CHUNKS, _MORE_HELD_REGISTERS // of_load) if wanted > 1 else 1
            while lanes < most_threads:
                of_thread = least if lanes < _WAVE else more if lanes <= 256 else wanted
                if lanes * of_thread >= chunks:
                    break
                lanes *= 2
            held = -(-chunks // lanes)
            is_alone |= held > most_held
        threads = most_threads if direction == "backward" else max(lanes, _WAVE)
        of_unit = 0
        if shares == 1 and not is_alone:
            gains = traits.has_bias and lanes > _WAVE
            of_unit = -(-_threads_of_unit(held * of_load, gains_by_floats=gains) // threads)
        combined = _COMBINED_COLUMNS
        while combined < _MOST_COMBINED_COLUMNS and columns > combined * _COMBINING_WORKGROUPS:
            combined *= 2
        # By the cost model: two units are quicker where many lanes idle, but for floats, of which
        # there is less to compute for each byte.
        working = (0.9 if traits.kind == "layer_norm" else 0.7) - 0.2 * (held - 1)
        enough = _READ_BY_ONE.get((arch, traits.kind), inf)
        if traits.dtype == "fp32":
            working, enough = 0, _FLOATS_READ_BY_ONE[arch]
        keeps_up = columns >= max(enough, working * lanes * held * width)
        units = 2 if shares == 1 and keeps_up else shares
        of_row = width, ragged, lanes, threads, held, of_unit
        return cls(traits, direction, arch, *of_row, combined, units, shares)

    @property
    def name(self) -> str:
        of_row = f"{self.held}x{self.width}x{self.row_lanes}{'_ragged' if self.ragged else ''}"
        of_row += f"_{self.shares}shares" if self.shares > 1 else "" if self.of_unit else "_alone"
        return f"{TEMPLATES[self.direction]}_{self.traits.name}_{of_row}_{self.arch}"

    @property
    def combine_name(self) -> str:
        """That of the kernel behind it, which adds up gradients of weights; "" in forward."""
        return f"{self.name}_combine" if self.direction == "backward" else ""

    @property
    def rows(self) -> int:
        """Those of a workgroup."""
        return self.threads // self.row_lanes

    @property
    def words(self) -> int:
        """Numbers that the workgroups of a row tell each other."""
        numbers = _NUMBERS_OF_SHARE[self.traits.kind]
        if self.direction == "forward":
            numbers = 3 if self.traits.is_quantised else 2
        return self.shares * numbers


@cache
def kernel_spec(kernel: RowKernel) -> jit.BuildSpec:
    """The sources and the flags of a kernel."""
    traits, direction = kernel.traits, kernel.direction
    of_traits = "kind", "has_weight", "has_bias", "has_residual"
    of_kernel = "width", "ragged", "row_lanes", "threads", "held", "shares"
    constants = {
        **{name: getattr(traits, name) for name in of_traits},
        **{name: getattr(kernel, name) for name in of_kernel},
        "shared_structs": CALLS[direction].cpp(DEVICE),
        "element": ELEMENTS[traits.dtype],
        "weight_element": ELEMENTS[traits.weight_dtype],
        "out_element": ELEMENTS[traits.out_dtype],
    }
    traits_of_rows = jit.render("amd/rows_traits.h.in", constants)
    values: dict[str, object] = {"kernel": kernel.name, "traits": traits_of_rows}
    if direction == "forward":
        values["largest"] = f"{LARGEST.get(traits.out_dtype, 0)}.0f"
        values["waves"] = kernel.of_unit * kernel.threads // 256
    else:
        values["combine_kernel"] = kernel.combine_name
        values["combined_columns"] = kernel.combined_columns
    why = f"the first {direction} {traits.kind} of {traits.dtype} rows on {kernel.arch}"
    headers = "elements.h", "row_chunks.h", "row_places.h"
    template = f"{TEMPLATES[direction]}.hip"
    return device_spec(kernel.name, kernel.arch, template, values, headers, why)


def refuse_form_of_fp8(name: str, dtype: str, target: AmdTarget) -> None:
    """Raise ``NotImplementedError`` where the chip rounds to no such numbers."""
    own = architecture(target.arch).fp8_dtype
    if dtype in FP8_NAMES.values() and dtype != own:
        raise NotImplementedError(f"{name} is {dtype}; {target} rounds to {own} and int8")


def width_of_loads(
    traits: RowTraits,
    direction: Direction,
    columns: int,
    pointers: Sequence[int],
    strides: Sequence[int],
) -> int:
    """How many numbers all loads and stores can have: words of them at multiples of 4 bytes."""
    x, weights, out = (
        DTYPE_BYTES[each] for each in (traits.dtype, traits.weight_dtype, traits.out_dtype)
    )
    of_pointers = (x, x, weights, weights, out, x)  # and that of the scale
    if direction == "backward":
        of_pointers = (x, x, x, weights, x, weights)  # and what is written number by number
    begins = [
        *zip(pointers, of_pointers, strict=False),
        *((n * size, size) for n, size in ((columns, min(x, out)), *((n, x) for n in strides))),
    ]
    width = LOAD_BYTES // min(x, 2 * out)
    while width > 1 and (width > columns or any(at % min(width * size, 4) for at, size in begins)):
        width //= 2
    return width


def planned_rows(
    traits: RowTraits,
    direction: Direction,
    target: AmdTarget,
    size: tuple[int, int],
    width: int,
) -> tuple[RowKernel, int]:
    """The kernel for so many rows and columns, and the blocks that forward divides the rows into.

    Raises ``NotImplementedError`` where a launch has no room for their threads.
    """
    rows, columns = size
    is_alone = direction == "forward" and rows <= target.compute_units
    kernel = RowKernel.of(traits, direction, target.arch, columns, width, is_alone=is_alone)
    blocks = -(-rows // kernel.rows)
    if kernel.of_unit > 0:
        blocks = min(blocks, kernel.of_unit * target.compute_units)
    if blocks * kernel.shares * kernel.threads >= 1 << 32:
        raise NotImplementedError(
            f"x has {rows} rows of {columns} numbers; a launch has room for less than 2**32 threads"
        )
    return kernel, blocks


class LoadedRows(NamedTuple):
    """A kernel on a device, by its ``address``.

    Attributes:
        blocks: forward those of rows, of which a workgroup has all, or a share.
        units_of_block, rows: backward, as ``RowKernel`` has them.
        words: of 64 bits, zeros, with which the workgroups of all rows tell each other numbers.
        combining: workgroups that add up a gradient.
    """

    address: int
    blocks: int
    units_of_block: int
    rows: int
    shares: int
    words: int
    combining: int

    def zeros(self, device: torch.device) -> Tensor | None:
        return torch.zeros(self.words, dtype=torch.int64, device=device) if self.words else None


class AmdRows(StructLauncher):
    """The kernels of calls that differ in the addresses of their tensors alone."""

    def __init__(
        self, traits: RowTraits, direction: Direction, target: AmdTarget, size: tuple[int, int]
    ) -> None:
        """Raises ``NotImplementedError`` where the chip has no such form of fp8."""
        refuse_form_of_fp8("out_dtype", traits.out_dtype, target)
        super().__init__(target)
        self._of_calls = traits, direction, target, size
        self._kernels: dict[int, LoadedRows] = {}

    def loaded(self, pointers: Sequence[int], strides: Sequence[int]) -> LoadedRows:
        """The kernel for tensors that lie there."""
        traits, direction, _, (_, columns) = self._of_calls
        width = width_of_loads(traits, direction, columns, pointers, strides)
        if width not in self._kernels:
            self._kernels[width] = self._load(width)
        return self._kernels[width]

    def _load(self, width: int) -> LoadedRows:
        *_, (rows, columns) = self._of_calls
        kernel, blocks = planned_rows(*self._of_calls, width)
        spec = kernel_spec(kernel)
        names = spec.artifact_name, kernel.name, kernel.combine_name
        address = self.load(jit.read(spec), kernel.threads, *names)
        words = 1 + rows * kernel.words if kernel.shares > 1 else 0
        combining = -(-columns // kernel.combined_columns)
        units, shares = kernel.units_of_block, kernel.shares
        return LoadedRows(address, blocks, units, kernel.rows, shares, words, combining)
