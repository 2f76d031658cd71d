"""Kernels of products for AMD GPUs: their tiles, the operands they take, and their launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..amd.chips import Arch, architecture
from ..amd.kernel_arguments import DEVICE
from ..call.known_calls import Run
from ..jit.shared_struct import cpp_of
from ..kernels.compiled.device_spec import device_spec
from ..kernels.estimate import machine_of
from ..kernels.launch_estimate import Machine
from ..kernels.struct_launcher import StructLauncher
from ..planning.target import AmdTarget
from ..problem.dtypes import BF8_NAMES, DTYPE_NAMES, FP8_NAMES
from .problem import FP8, MatmulArguments, Product
from .structs import CALL, VECTOR

_ELEMENTS = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_ELEMENTS |= {torch.int8: "INT8", torch.int32: "INT32"}
_ELEMENTS |= dict.fromkeys(FP8_NAMES, "FP8") | dict.fromkeys(BF8_NAMES, "BF8")
_LOAD_BYTES = 16
# Fewer of a tile are not worth a workgroup.
_LEAST_STEPS = 8
# Of what begins and ends a launch, or a round of workgroups of few rows.
_ENDS_CYCLES, _FEW_ENDS_CYCLES = 7500, 2300
# Of a launch that adds up parts, and of one of these.
_COMBINE_CYCLES, _PART_CYCLES = 2500, 620
# What a product takes, by the bytes of its inputs; of 16 bits 1.
UNITS = {1: 0.5, 2: 1.0, 4: 8.0}
# Rows of a tile lie within the reach of a buffer.
_MOST_LINE_BYTES = 1 << 22  # times 256 rows: half of what an offset counts to


class Tile(NamedTuple):
    """What a workgroup computes at once: ``m`` by ``n`` results, in ``waves`` of each direction.

    Attributes:
        chunks: of 16 bytes, a step's share of a row.
        at_once: workgroups that a compute unit has room for.
        cycles: that these together take for a step of 16 bits, by the emulator's cost model.
        of_rows: for operands that both lie in rows; for others registers have no room.
        ahead: steps that registers have room for: of the few rows of gemm_few_rows.hip.in.
    """

    m: int
    n: int
    waves: tuple[int, int]
    chunks: int
    at_once: int
    cycles: int
    of_rows: bool = False
    ahead: int = 0

    @property
    def threads(self) -> int:
        return 64 * self.waves[0] * self.waves[1]

    @property
    def blocks_of_wave(self) -> int:
        """Of 32 by 32 results."""
        return self.m * self.n // (16 * self.threads)


# The largest, of which LDS has room for two steps, and smaller ones for fewer results.
TILES: dict[Arch, tuple[Tile, ...]] = {
    "gfx942": (
        Tile(256, 256, (4, 2), 4, 1, 2277),
        Tile(128, 128, (2, 2), 4, 2, 1589),
        Tile(64, 64, (2, 2), 8, 2, 1275),
        Tile(32, 64, (1, 2), 8, 2, 1117),
    ),
    "gfx950": (
        Tile(256, 256, (4, 2), 8, 1, 2168),
        Tile(128, 128, (2, 2), 4, 2, 1429),
        Tile(64, 64, (2, 2), 8, 4, 1400),
        Tile(32, 64, (1, 2), 8, 4, 900),
    ),
}


# Of fp8 and bf8, whose products take two chunks at once on gfx950.
_TILES_OF_FP8: dict[Arch, tuple[Tile, ...]] = {
    "gfx942": TILES["gfx942"],
    "gfx950": (
        Tile(256, 256, (4, 2), 8, 1, 2280),
        Tile(256, 128, (4, 2), 8, 1, 1610),
        Tile(128, 128, (2, 2), 8, 2, 1650),
        *TILES["gfx950"][2:],
    ),
}


# Of few rows, whose workgroups wait for memory; the last one has fewer of them for many columns.
FEW_ROWS = (
    Tile(8, 16, (1, 4), 32, 8, 680, of_rows=True, ahead=2),
    Tile(16, 16, (1, 4), 32, 8, 680, of_rows=True, ahead=2),
    Tile(16, 32, (1, 4), 16, 8, 680, of_rows=True, ahead=2),
)


def tiles_of(arch: Arch, dtype: torch.dtype, are_rows: bool, m: int) -> list[Tile]:
    """Those that kernels for a dtype have, where both operands lie in rows or not."""
    tiles = (_TILES_OF_FP8 if dtype in FP8 else TILES)[arch]
    few = [tile for tile in FEW_ROWS if m <= tile.m]
    return [tile for tile in (*few, *tiles) if are_rows or not tile.of_rows]


def read_bytes(size: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    """Of both operands of a product of ``size`` (batch, m, n, k)."""
    batch, m, n, k = size
    return batch * (m + n) * k * dtype.itemsize


class Operand(NamedTuple):
    """A matrix as a kernel takes it: ``(batch, rows, k)``.

    Attributes:
        are_rows: what is summed over lies side by side in memory.
        line: bytes from one row to the next, or else from one of what is summed over.
    """

    tensor: Tensor
    are_rows: bool
    line: int

    @property
    def batch_bytes(self) -> int:
        return self.tensor.stride(0) * self.tensor.itemsize

    @classmethod
    def of(cls, x: Tensor, batch: torch.Size) -> Operand:
        """As it lies, or a copy whose lines begin and end at multiples of 16 bytes."""
        rows, k = x.shape[-2:]
        x = x.expand(*batch, rows, k).reshape(batch.numel(), rows, k)
        are_rows = x.stride(2) == 1 or x.stride(1) != 1
        lines = x if are_rows else x.mT
        length, line = lines.shape[2], lines.stride(1) * x.itemsize
        begins = x.data_ptr(), line, x.stride(0) * x.itemsize, length * x.itemsize
        if (
            lines.stride(2) != 1
            or any(each % _LOAD_BYTES for each in begins)
            or not length * x.itemsize <= line < _MOST_LINE_BYTES
        ):
            of_load = _LOAD_BYTES // x.itemsize
            width = -(-length // of_load) * of_load
            padded = x.new_zeros(*lines.shape[:2], width)
            padded[..., :length] = lines
            lines, line = padded, width * x.itemsize
        return cls(lines if are_rows else lines.mT, are_rows, line)


class GemmKernel(NamedTuple):
    """What a kernel is compiled for."""

    arch: Arch
    tile: Tile
    dtype: torch.dtype
    out_dtype: torch.dtype
    a_rows: bool
    b_columns: bool
    has_bias: bool
    has_scale_a: bool
    has_scale_b: bool
    activation: str

    @property
    def name(self) -> str:
        """Its own, of letters and digits."""
        layout = ("c" if self.a_rows else "r") + ("r" if self.b_columns else "c")
        words = (
            *("gemm", DTYPE_NAMES[self.dtype], str(self.out_dtype).removeprefix("torch."), layout),
            f"{self.tile.m}x{self.tile.n}",
            *(("bias",) if self.has_bias else ()),
            *(("scale_a",) if self.has_scale_a else ()),
            *(("scale_b",) if self.has_scale_b else ()),
            *(self.activation, self.arch),
        )
        return "_".join(words)


@cache
def kernel_spec(kernel: GemmKernel) -> jit.BuildSpec:
    """The sources and the flags of a kernel."""
    tile = kernel.tile
    flags = ["has_bias", "has_scale_a", "has_scale_b"]
    flags += [] if tile.ahead else ["a_rows", "b_columns"]
    values: dict[str, object] = {
        **{name: getattr(kernel, name) for name in flags},
        "kernel": kernel.name,
        "shared_structs": cpp_of((VECTOR, CALL), DEVICE),
        "element": _ELEMENTS[kernel.dtype],
        "out_element": _ELEMENTS[kernel.out_dtype],
        "activation": kernel.activation,
        "waves_of_simd": tile.at_once * tile.threads // 256,
    }
    headers: tuple[str, ...] = ("elements.h", "gemm_results.h")
    if tile.ahead:
        blocks = tile.n // tile.m
        values |= {
            "rows": tile.m,
            "blocks": blocks,
            "waves": tile.waves[1],
            "loads": tile.chunks * tile.m // 64 // tile.waves[1],
            "ahead": tile.ahead,
            "lines_of_b": ", ".join(f"lines_of_b({i})" for i in range(blocks)),
        }
        headers += ("sixteen_products.h",)
    else:
        values |= {
            **dict(zip(("tile_m", "tile_n"), tile[:2], strict=True)),
            **dict(zip(("waves_m", "waves_n"), tile.waves, strict=True)),
            "chunks": tile.chunks,
        }
    why = f"the first product of {kernel.dtype} on {kernel.arch}"
    template = "gemm_few_rows.hip" if tile.ahead else "gemm.hip"
    return device_spec(kernel.name, kernel.arch, template, values, headers, why)


class _GemmLauncher(StructLauncher):
    """Loads kernels of a device and launches them."""

    def __init__(self, target: AmdTarget) -> None:
        super().__init__(target)
        self._loaded: dict[GemmKernel, int] = {}

    def launch(
        self, kernel: GemmKernel, work: Work, packed: bytes, tensors: Sequence[Tensor | None]
    ) -> None:
        if kernel not in self._loaded:
            spec = kernel_spec(kernel)
            combining = "" if kernel.tile.ahead else f"{kernel.name}_combine"
            names = spec.artifact_name, kernel.name, combining
            self._loaded[kernel] = self.load(jit.read(spec), kernel.tile.threads, *names)
        blocks = kernel.tile.blocks_of_wave if work.sharing else 0
        counts = work.workgroups, work.shared, blocks
        self.start(self._loaded[kernel], counts, packed, tensors)


def _vector(x: Tensor | None, shape: Sequence[int], count: int) -> Tensor | None:
    """What follows a product, ``(batch, count)`` in float32."""
    return None if x is None else x.float().expand(*shape).reshape(-1, count)


def _fields_of(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))


class Work(NamedTuple):
    """How workgroups divide tiles of ``steps`` each.

    Attributes:
        whole: tiles that a workgroup has alone, one after the other.
        shared: the others, whose steps the first ``sharing`` workgroups divide evenly.
    """

    steps: int
    workgroups: int
    whole: int
    shared: int
    sharing: int

    @classmethod
    def of(cls, tiles: int, steps: int, slots: int) -> Work:
        """Whole rounds of tiles, and the rest for all slots, as far as there are steps for them."""
        shared = tiles % slots
        sharing = min(slots, shared * steps // _LEAST_STEPS)
        if sharing <= shared:
            return cls(steps, min(tiles, slots), tiles, 0, 0)
        return cls(steps, slots if tiles > shared else sharing, tiles - shared, shared, sharing)

    def parts(self, tile: Tile) -> int:
        """Numbers that sharing workgroups leave, each of two tiles at most."""
        return (self.sharing + self.shared) * tile.m * tile.n if self.sharing else 0

    def cycles(self, tile: Tile, machine: Machine, dtype: torch.dtype, read: int) -> float:
        """Until the last workgroup has ended, and what was shared is added up.

        Args:
            tile, machine, dtype: what computes.
            read: bytes, while which come all others wait.
        """
        streamed = read / machine.bytes_per_second * machine.clock.peak
        rounds = -(-self.whole // (tile.at_once * machine.compute_units))
        cycles = max(self._computing(tile, machine, dtype), streamed)
        cycles += rounds * _FEW_ENDS_CYCLES if tile.ahead else _ENDS_CYCLES
        if not self.sharing:
            return cycles
        # Parts are written and read.
        moved = 2 * 4 * self.parts(tile) / machine.bytes_per_second * machine.clock.peak
        return cycles + moved + _COMBINE_CYCLES + _PART_CYCLES * self.sharing / self.shared

    def _computing(self, tile: Tile, machine: Machine, dtype: torch.dtype) -> float:
        # Steps have as many bytes of all dtypes, and of few rows they wait for memory alone.
        of_step = tile.cycles * (1 if tile.ahead else UNITS[dtype.itemsize] * 2 / dtype.itemsize)
        steps: float = -(-self.whole // (tile.at_once * machine.compute_units)) * self.steps
        if self.sharing:
            steps += self.shared * self.steps / self.sharing
        return steps * of_step

    @classmethod
    def choose(
        cls, target: AmdTarget, dtype: torch.dtype, are_rows: bool, size: tuple[int, int, int, int]
    ) -> tuple[Tile, Work]:
        """The tile with which it takes least, of ``size`` (batch, m, n, k)."""
        batch, m, n, k = size
        machine = machine_of(target)
        read = read_bytes(size, dtype)

        def cost(tile: Tile, work: Work) -> tuple[float, float]:
            computing = work._computing(tile, machine, dtype)
            return work.cycles(tile, machine, dtype, read), computing

        choices: list[tuple[Tile, Work]] = []
        for tile in tiles_of(target.arch, dtype, are_rows, m):
            tiles = batch * -(-m // tile.m) * -(-n // tile.n)
            steps = max(-(-k * dtype.itemsize // (tile.chunks * _LOAD_BYTES)), 1)
            slots = tiles if tile.ahead else tile.at_once * target.compute_units
            choices.append((tile, cls(steps, min(tiles, slots), tiles, 0, 0)))
            if not tile.ahead:
                choices.append((tile, cls.of(tiles, steps, slots)))
        return min(choices, key=lambda choice: cost(*choice))


class _Matrices(NamedTuple):
    """What is multiplied: ``(m, k)`` by ``(k, n)`` of each of ``batch``."""

    batch: torch.Size
    m: int
    n: int
    k: int

    @classmethod
    def of(cls, arguments: MatmulArguments, product: Product) -> _Matrices:
        """One matrix of all rows where b and what goes with its columns is the same for all."""
        _, b, bias, _, scale_b, *_ = arguments
        batch, m, n, k, _ = product
        is_one = all(x is None or x.shape[:-2].numel() == 1 for x in (bias, scale_b))
        if b.dim() == 2 and is_one:
            m, batch = m * batch.numel(), torch.Size()
        return cls(batch, m, n, k)

    def operands(self, a: Tensor, b: Tensor) -> tuple[Operand, Operand]:
        if not self.batch:
            a = a.reshape(self.m, self.k)
        return Operand.of(a, self.batch), Operand.of(b.mT, self.batch)


def _refuse(arguments: MatmulArguments, product: Product, target: AmdTarget) -> None:
    a = arguments.a
    served = architecture(target.arch).dtypes
    if DTYPE_NAMES.get(a.dtype) not in served:
        raise NotImplementedError(f"a has dtype {a.dtype}; {target} multiplies {', '.join(served)}")
    if product.n * product.out_dtype.itemsize >= _MOST_LINE_BYTES:
        raise NotImplementedError(
            f"b has {product.n} columns; rows of less than {_MOST_LINE_BYTES} bytes are served"
        )


class _Kind(NamedTuple):
    """What the kernels of a call have in common, whatever its tile and its layouts."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    has: tuple[bool, bool, bool]
    activation: str

    @classmethod
    def of(cls, arguments: MatmulArguments, product: Product) -> _Kind:
        bias, scale_a, scale_b = (each is not None for each in arguments.epilogue)
        activation = arguments.activation or "none"
        return cls(arguments.a.dtype, product.out_dtype, (bias, scale_a, scale_b), activation)

    def kernel(
        self, target: AmdTarget, matrices: _Matrices, operands: Sequence[Operand]
    ) -> tuple[GemmKernel, Work]:
        batch, m, n, k = matrices
        of_a, of_b = (each.are_rows for each in operands)
        size = batch.numel(), m, n, k
        tile, work = Work.choose(target, self.dtype, of_a and of_b, size)
        of_call = self.dtype, self.out_dtype, of_a, of_b
        return GemmKernel(target.arch, tile, *of_call, *self.has, self.activation), work


def planned_product(
    arguments: MatmulArguments, product: Product, target: AmdTarget
) -> tuple[GemmKernel, Work]:
    """The kernel of a call with results, and how its workgroups divide them.

    Raises ``NotImplementedError`` as :func:`amd_product` does.
    """
    _refuse(arguments, product, target)
    matrices = _Matrices.of(arguments, product)
    # What would be copied is not.
    a, b = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for x in arguments[:2]
    )
    operands = matrices.operands(a, b)
    return _Kind.of(arguments, product).kernel(target, matrices, operands)


def amd_product(arguments: MatmulArguments, product: Product, target: AmdTarget) -> Run:
    """What launches the kernel of calls with tensors of these layouts on the current stream.

    Raises ``NotImplementedError`` where the chip has no such numbers; what is returned raises
    ``jitfmha.HipError`` where the HIP runtime refuses the launch.
    """
    _refuse(arguments, product, target)
    shape, out_dtype = product.shape, product.out_dtype
    if not torch.Size(shape).numel():
        return lambda a, *_: a.new_empty(shape, dtype=out_dtype)
    kind, matrices = _Kind.of(arguments, product), _Matrices.of(arguments, product)
    batch, m, n, k = matrices
    of_rows, of_columns = (*product.batch, product.m, 1), (*batch, 1, n)
    launchers = target.calls["gemm_launchers"]
    launcher = launchers.prepared.get(target.device_index)
    if launcher is None:
        launcher = _GemmLauncher(target)
        launchers.keep(target.device_index, launcher)
    chosen: tuple[GemmKernel, Work] | None = None

    def run(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
    ) -> Tensor:
        nonlocal chosen
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
        operands = matrices.operands(a, b)
        vectors = (
            _vector(bias, of_columns, n),
            _vector(scale_a, of_rows, m),
            _vector(scale_b, of_columns, n),
        )
        if chosen is None:
            chosen = kind.kernel(target, matrices, operands)
        kernel, work = chosen
        tile = kernel.tile
        parts = torch.empty(work.parts(tile), dtype=torch.float32, device=a.device)
        packed = CALL.packer.pack(
            *(each.tensor.data_ptr() for each in operands),
            out.data_ptr(),
            *(value for each in vectors for value in _fields_of(each)),
            *(each.batch_bytes for each in operands),
            *(each.line for each in operands),
            *(m, n, k, -(-m // tile.m), -(-n // tile.n)),
            *(work.steps, work.workgroups, work.whole, work.sharing),
            *divmod(work.shared * work.steps, max(work.sharing, 1)),
            parts.data_ptr(),
        )
        tensors = (*(each.tensor for each in operands), *vectors, out, parts)
        launcher.launch(kernel, work, packed, tensors)
        return out

    return run
