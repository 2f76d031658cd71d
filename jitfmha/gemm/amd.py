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
from ..jit.shared_struct import INT64, Pointer, SharedStruct, cpp_of
from ..kernels.compiled.device_spec import device_spec
from ..kernels.estimate import machine_of
from ..kernels.struct_launcher import StructLauncher
from ..planning.target import AmdTarget
from ..problem.checks import refuse_jit_trace
from ..problem.dtypes import BF8_NAMES, DTYPE_NAMES, FP8_NAMES
from .problem import MatmulArguments, Product

_ELEMENTS = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_ELEMENTS |= {torch.int8: "INT8", torch.int32: "INT32"}
_ELEMENTS |= dict.fromkeys(FP8_NAMES, "FP8") | dict.fromkeys(BF8_NAMES, "BF8")
_LOAD_BYTES = 16
# Strides in elements; float32.
_VECTOR = SharedStruct("Vector", {"at": Pointer("const void"), "batch": INT64, "stride": INT64})
# Strides of a and b are in bytes: between matrices, and between lines of them.
_CALL = SharedStruct(
    "GemmCall",
    {
        **dict.fromkeys(("a", "b"), Pointer("const void")),
        "out": Pointer("void"),
        **dict.fromkeys(("bias", "scale_a", "scale_b"), _VECTOR),
        **dict.fromkeys(("a_batch", "b_batch", "a_stride", "b_stride"), INT64),
        **dict.fromkeys(("m", "n", "k", "tiles_m", "tiles_n"), INT64),
        # Steps of k; tiles that a workgroup has alone; steps of those that some share.
        **dict.fromkeys(("steps", "workgroups", "whole", "shared_steps", "sharing"), INT64),
        "has_two_tiles": INT64,  # whether these leave parts of more than one
        "parts": Pointer("void"),  # of shared tiles
    },
)
# Fewer of a tile are not worth a workgroup.
_LEAST_STEPS = 8
# Of what begins and ends a tile, of each of its results, and of a round of few rows.
_TURN_CYCLES, _RESULT_CYCLES, _FEW_ENDS_CYCLES = 4000, 0.14, 2300
# What kernels count, shares times steps, is below it.
_MOST_COUNT = 1 << 32
# Of a launch that adds up parts, and of one of these.
_COMBINE_CYCLES, _PART_CYCLES = 2500, 200
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
        ahead: steps that registers have room for: of the few rows of gemm_few_rows.hip.in, where
            both operands lie in rows.
    """

    m: int
    n: int
    waves: tuple[int, int]
    chunks: int
    at_once: int
    cycles: int
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
        Tile(256, 256, (4, 2), 4, 1, 2296),
        Tile(128, 128, (2, 2), 4, 2, 1630),
        Tile(64, 64, (2, 2), 8, 2, 1366),
        Tile(32, 64, (1, 2), 8, 2, 1455),
    ),
    "gfx950": (
        Tile(256, 256, (4, 2), 8, 1, 2180),
        Tile(128, 128, (2, 2), 8, 2, 1790),
        Tile(64, 64, (2, 2), 8, 4, 1460),
        Tile(32, 64, (1, 2), 8, 4, 1350),
    ),
}


# Of few rows, whose workgroups wait for memory; the last one has fewer of them for many columns.
FEW_ROWS = (
    Tile(8, 16, (1, 4), 32, 8, 680, ahead=2),
    Tile(16, 16, (1, 4), 32, 8, 680, ahead=2),
    Tile(16, 32, (1, 4), 16, 8, 680, ahead=2),
)


def tiles_of(arch: Arch, are_rows: bool, m: int) -> list[Tile]:
    """Those that kernels have, where both operands lie in rows or not."""
    few = [tile for tile in FEW_ROWS if m <= tile.m and are_rows]
    return [*few, *TILES[arch]]


Size = tuple[int, int, int, int]  # batch, m, n, k


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
        follows = [x for x in ("bias", "scale_a", "scale_b") if getattr(self, f"has_{x}")]
        words = DTYPE_NAMES[self.dtype], str(self.out_dtype).removeprefix("torch."), layout
        tile = f"{self.tile.m}x{self.tile.n}"
        return "_".join(("gemm", *words, tile, *follows, self.activation, self.arch))

    @property
    def template(self) -> str:
        return "gemm_few_rows.hip" if self.tile.ahead else "gemm.hip"

    @property
    def combine_name(self) -> str:
        """That of the kernel behind it, which adds up parts; "" where there are none."""
        return "" if self.tile.ahead else f"{self.name}_combine"


@cache
def kernel_spec(kernel: GemmKernel) -> jit.BuildSpec:
    """The sources and the flags of a kernel."""
    tile = kernel.tile
    sizes = tile.m, tile.n, tile.waves[1], tile.chunks
    names = ["has_bias", "has_scale_a", "has_scale_b", "activation"]
    values: dict[str, object] = {"ahead": tile.ahead} if tile.ahead else {"waves_m": tile.waves[0]}
    names += [] if tile.ahead else ["a_rows", "b_columns"]
    values |= {
        **{name: getattr(kernel, name) for name in names},
        **dict(zip(("tile_m", "tile_n", "waves_n", "chunks"), sizes, strict=True)),
        "kernel": kernel.name,
        "shared_structs": cpp_of((_VECTOR, _CALL), DEVICE),
        "element": _ELEMENTS[kernel.dtype],
        "out_element": _ELEMENTS[kernel.out_dtype],
        "waves_of_simd": tile.at_once * tile.threads // 256,
    }
    headers = "elements.h", "gemm_results.h", *(("sixteen_products.h",) if tile.ahead else ())
    why = f"the first product of {kernel.dtype} on {kernel.arch}"
    return device_spec(kernel.name, kernel.arch, kernel.template, values, headers, why)


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
            names = spec.artifact_name, kernel.name, kernel.combine_name
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
    shared: int = 0
    sharing: int = 0

    @classmethod
    def ways(cls, tiles: int, steps: int, slots: int) -> list[Work]:
        """All tiles whole; or behind whole rounds the rest for all slots, or each for as many.

        As far as there are steps for them, and as numbers of steps fit what kernels count with.
        """
        ways, shared = [cls(steps, min(tiles, slots), tiles)], tiles % slots
        for sharing in (slots, shared * (slots // max(shared, 1))):
            known = min(sharing, shared * (steps // _LEAST_STEPS))
            if shared < known < _MOST_COUNT // (shared * steps):
                workgroups = slots if tiles > shared else known
                ways.append(cls(steps, workgroups, tiles - shared, shared, known))
        return ways

    @property
    def has_two_tiles(self) -> bool:
        """Whether sharing workgroups have parts of two tiles, and leave more than one."""
        return self.sharing > 0 and self.sharing % self.shared > 0

    @property
    def parts(self) -> int:
        """Of tiles, that sharing workgroups leave at most."""
        return self.sharing + self.has_two_tiles * self.shared

    def seconds(self, tile: Tile, target: AmdTarget, dtype: torch.dtype, size: Size) -> float:
        """Until all workgroups have ended, and what was shared is added up."""
        machine, (batch, m, n, k) = machine_of(target), size
        peak, of_byte, results = machine.clock.peak, 1 / machine.bytes_per_second, tile.m * tile.n
        rounds = -(-self.whole // (tile.at_once * target.compute_units))
        # Steps have as many bytes of all dtypes, and of few rows they wait for memory alone.
        of_step = tile.cycles * (1 if tile.ahead else UNITS[dtype.itemsize] * 2 / dtype.itemsize)
        steps = rounds * self.steps + self.shared * self.steps / max(self.sharing, 1)
        turns = rounds + (self.sharing > 0) + self.has_two_tiles
        of_turn = _TURN_CYCLES + _RESULT_CYCLES * results * tile.at_once
        read = batch * (m + n) * k * dtype.itemsize
        cycles = max(steps * of_step, read * of_byte * peak)
        cycles += turns * (_FEW_ENDS_CYCLES if tile.ahead else of_turn)
        seconds = machine.seconds_of(cycles, batch * m * n * k * UNITS[dtype.itemsize])
        # Nothing hides how the last results are written, and how parts are added up.
        moved = self.workgroups * results * 2 + self.parts * results * 4
        if self.sharing:
            seconds += (_COMBINE_CYCLES + _PART_CYCLES * self.sharing / self.shared) / peak
        return seconds + moved * of_byte

    @classmethod
    def choose(
        cls, target: AmdTarget, dtype: torch.dtype, are_rows: bool, size: Size
    ) -> tuple[Tile, Work]:
        """The tile with which it takes least, of ``size`` (batch, m, n, k)."""
        batch, m, n, k = size
        choices: list[tuple[Tile, Work]] = []
        for tile in tiles_of(target.arch, are_rows, m):
            tiles = batch * -(-m // tile.m) * -(-n // tile.n)
            steps = max(-(-k * dtype.itemsize // (tile.chunks * _LOAD_BYTES)), 1)
            slots = max(tiles, 1) if tile.ahead else tile.at_once * target.compute_units
            choices += [(tile, work) for work in cls.ways(tiles, steps, slots)]
        return min(choices, key=lambda choice: choice[1].seconds(choice[0], target, dtype, size))


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

    @property
    def size(self) -> Size:
        return self.batch.numel(), self.m, self.n, self.k

    def operands(self, a: Tensor, b: Tensor) -> tuple[Operand, Operand]:
        if not self.batch:
            a = a.reshape(self.m, self.k)
        return Operand.of(a, self.batch), Operand.of(b.mT, self.batch)


def planned_product(
    arguments: MatmulArguments, product: Product, target: AmdTarget
) -> tuple[GemmKernel, Work]:
    """The kernel of a call with results, and how its workgroups divide them.

    Raises ``NotImplementedError`` as :func:`amd_product` does.
    """
    a, out_dtype = arguments.a, product.out_dtype
    served = architecture(target.arch).dtypes
    if DTYPE_NAMES.get(a.dtype) not in served:
        raise NotImplementedError(f"a has dtype {a.dtype}; {target} multiplies {', '.join(served)}")
    if product.n * out_dtype.itemsize >= _MOST_LINE_BYTES:
        raise NotImplementedError(
            f"b has {product.n} columns; rows of less than {_MOST_LINE_BYTES} bytes are served"
        )
    matrices = _Matrices.of(arguments, product)
    # What would be copied is not.
    layouts = (
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for x in arguments[:2]
    )
    of_a, of_b = (each.are_rows for each in matrices.operands(*layouts))
    tile, work = Work.choose(target, a.dtype, of_a and of_b, matrices.size)
    bias, scale_a, scale_b = (each is not None for each in arguments.epilogue())
    has = bias, scale_a, scale_b, arguments.activation or "none"
    return GemmKernel(target.arch, tile, a.dtype, out_dtype, of_a, of_b, *has), work


def amd_product(arguments: MatmulArguments, product: Product, target: AmdTarget) -> Run:
    """What launches the kernel of calls with tensors of these layouts on the current stream.

    Raises ``NotImplementedError`` where the chip has no such numbers; what is returned raises
    ``jitfmha.HipError`` where the HIP runtime refuses the launch.
    """
    refuse_jit_trace()
    (kernel, work), shape = planned_product(arguments, product, target), product.shape
    tile, out_dtype = kernel.tile, kernel.out_dtype
    if not torch.Size(shape).numel():
        return lambda a, *_: a.new_empty(shape, dtype=out_dtype)
    batch, m, n, k = matrices = _Matrices.of(arguments, product)
    of_rows, of_columns = (*product.batch, product.m, 1), (*batch, 1, n)
    launchers = target.calls["gemm_launchers"]
    launcher = launchers.prepared.get(target.device_index)
    if launcher is None:
        launcher = _GemmLauncher(target)
        launchers.keep(target.device_index, launcher)

    def run(a: Tensor, b: Tensor, *epilogue: Tensor | None) -> Tensor:
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
        operands = matrices.operands(a, b)
        vectors = list(map(_vector, epilogue, (of_columns, of_rows, of_columns), (n, m, n)))
        parts = torch.empty(work.parts, tile.m, tile.n, device=a.device)
        packed = _CALL.packer.pack(
            *(each.tensor.data_ptr() for each in operands),
            out.data_ptr(),
            *(value for each in vectors for value in _fields_of(each)),
            *(each.batch_bytes for each in operands),
            *(each.line for each in operands),
            *(m, n, k, -(-m // tile.m), -(-n // tile.n)),
            *(work.steps, work.workgroups, work.whole, work.shared * work.steps, work.sharing),
            work.has_two_tiles,
            parts.data_ptr(),
        )
        tensors = (*(each.tensor for each in operands), *vectors, out, parts)
        launcher.launch(kernel, work, packed, tensors)
        return out

    return run
