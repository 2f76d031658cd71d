"""Matrix instructions from the words of the ISA documents, in float64.

An `Mfma` is read off a mnemonic. Its methods say where an element of A, B, C or D is (CDNA4 ISA,
7.1.4 "General input and output layout" and the tables of 7.1.5 and 7.5.1), turn registers into
matrices by that, and give the exact result with a bound on what rounding may do to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .small_floats import of_chip

Array = NDArray[Any]
LANES = 64

# Formats in the order of the codes of CBSZ and BLGP.
CHOSEN_FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")
_LARGE = {"f64": 64, "f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "i8": 8}
BITS = _LARGE | {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}


_TABLES: dict[str, dict[str, Array]] = {
    arch: {
        name: np.array([float(of_chip(name, arch).value(code)) for code in range(1 << BITS[name])])
        for name in names
    }
    for arch, names in (("gfx942", CHOSEN_FORMATS[:2]), ("gfx950", CHOSEN_FORMATS))
}


def _round_to_xf32(values: Array) -> Array:
    """To 10 bits of mantissa, to nearest even."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    with np.errstate(invalid="ignore"):
        return np.where(
            np.isfinite(values), np.ldexp(np.rint(fraction * 2**11), exponent - 11), values
        )


def values_of(codes: Array, kind: str, arch: str) -> Array:
    """What the bits of elements stand for, in float64."""
    if kind in _TABLES[arch]:
        return _TABLES[arch][kind][codes.astype(np.int64)]
    if kind == "f64":
        return codes.astype(np.uint64).view(np.float64)
    if kind == "i8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float64)
    if kind == "f16":
        return codes.astype(np.uint16).view(np.float16).astype(np.float64)
    shift = 16 if kind == "bf16" else 0
    with np.errstate(invalid="ignore"):  # signalling NaN
        singles = (codes.astype(np.uint32) << np.uint32(shift)).view(np.float32)
        floats = singles.astype(np.float64)
    return _round_to_xf32(floats) if kind == "xf32" else floats


def codes_of(values: Array, kind: str) -> Array:
    """The bits of a value in a format of 16 bits or more; bf16 by truncation."""
    if kind == "f64":
        return values.astype(np.float64).view(np.uint64)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint64)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return bits >> np.uint64(16) if kind == "bf16" else bits


def _extract(registers: Array, lane: Array, item: Array, bits: int) -> Array:
    """Elements of `bits` bits, packed from the lowest bit of the first register on."""
    wide = np.concatenate([registers, np.zeros_like(registers[:1])]).astype(np.uint64)
    register, shift = item * bits // 32, (item * bits % 32).astype(np.uint64)
    pair = wide[register, lane] | wide[register + 1, lane] << np.uint64(32)
    elements: Array = pair >> shift & np.uint64(2**bits - 1)
    return elements


def pack(codes: Array, bits: int) -> Array:
    """(items, lanes) of codes to (registers, lanes)."""
    items, lanes = codes.shape
    registers = np.zeros((items * bits // 32, lanes), np.uint64)
    for item in range(items):
        for bit in range(0, bits, 2):  # every size is even
            position = item * bits + bit
            part = codes[item].astype(np.uint64) >> np.uint64(bit) & np.uint64(3)
            registers[position // 32] |= part << np.uint64(position % 32)
    return registers.astype(np.uint32)


@dataclass(frozen=True)
class Mfma:
    """One instruction.

    Attributes:
        size: rows and columns of a block.
        depth: products of a result.
        a, b: types of the elements.
        result: f32, f64 or i32.
    """

    mnemonic: str
    arch: str
    size: int
    depth: int
    blocks: int
    a: str
    b: str
    result: str
    sparse: bool
    scaled: bool
    chosen_formats: bool

    @staticmethod
    def parse(mnemonic: str, arch: str, formats: tuple[int, int] = (0, 0)) -> Mfma:
        """`formats`: CBSZ and BLGP of the f8f6f4 instructions."""
        found = re.fullmatch(
            r"v_(smfmac|mfma|mfma_scale)_([fi]\d+)_(\d+)x\3x(\d+)(?:_(\d+)b)?_(\w+)", mnemonic
        )
        assert found, mnemonic
        kind, result, size, depth, blocks, types = found.groups()
        chosen = types == "f8f6f4"
        names = [CHOSEN_FORMATS[code] for code in formats] if chosen else types.split("_")
        return Mfma(
            mnemonic,
            arch,
            int(size),
            int(depth),
            int(blocks or 1),
            names[0],
            names[-1],
            result,
            kind == "smfmac",
            kind == "mfma_scale",
            chosen,
        )

    # ---- Registers ----

    @property
    def groups(self) -> int:
        """Groups of lanes that hold different depths."""
        return LANES // (self.size * self.blocks)

    @property
    def a_items(self) -> int:
        return self.depth // self.groups // (2 if self.sparse else 1)

    @property
    def b_items(self) -> int:
        return self.depth // self.groups

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of A, of B, of C and D."""
        results = self.blocks * self.size**2 // LANES * (2 if self.result == "f64" else 1)
        return self.a_items * BITS[self.a] // 32, self.b_items * BITS[self.b] // 32, results

    # ---- Layout ----

    def input_place(
        self, block: Array, i: Array, k: Array, *, items: int, halves: bool
    ) -> tuple[Array, Array]:
        """(lane, item) of A[block, i, k], or of B[block, k, i]."""
        if halves:
            # Each half of the registers holds one half of the depths.
            half_depth, half_items = items * self.groups // 2, items // 2
            half, k = k // half_depth, k % half_depth
            item = half * half_items + k % half_items
            return i + self.size * (block + self.blocks * (k // half_items)), item
        return i + self.size * (block + self.blocks * (k // items)), k % items

    def output_place(self, block: Array, i: Array, j: Array) -> tuple[Array, Array]:
        """(lane, item) of C or D[block, i, j]."""
        height = 1 if self.result == "f64" else 4
        blocks_in_item = -(-LANES // (self.size**2 // height))
        rows_in_item = LANES // blocks_in_item // self.size
        row_groups = self.size // (height * rows_in_item)
        item = i % height + height * (
            i // (height * rows_in_item) + row_groups * (block // blocks_in_item)
        )
        lane = j + self.size * (
            i // height % rows_in_item + rows_in_item * (block % blocks_in_item)
        )
        return lane, item

    def _in_halves(self, kind: str, *, is_b: bool) -> bool:
        if self.chosen_formats:
            return BITS[kind] == 8
        return self.sparse and is_b and self.registers[1] == 8

    def a_matrix(self, registers: Array, lane_of: Callable[[Array], Array] | None = None) -> Array:
        """(blocks, size, depth) codes; sparse: the stored half of them."""
        stored = self.a_items * self.groups
        block, i, k = np.indices((self.blocks, self.size, stored))
        halves = self._in_halves(self.a, is_b=False)
        lane, item = self.input_place(block, i, k, items=self.a_items, halves=halves)
        return _extract(registers, lane_of(lane) if lane_of else lane, item, BITS[self.a])

    def b_matrix(self, registers: Array, lane_of: Callable[[Array], Array] | None = None) -> Array:
        """(blocks, depth, size) codes."""
        block, k, j = np.indices((self.blocks, self.depth, self.size))
        halves = self._in_halves(self.b, is_b=True)
        lane, item = self.input_place(block, j, k, items=self.b_items, halves=halves)
        return _extract(registers, lane_of(lane) if lane_of else lane, item, BITS[self.b])

    def c_matrix(self, registers: Array) -> Array:
        """(blocks, size, size) of the result's type."""
        lane, item = self.output_place(*np.indices((self.blocks, self.size, self.size)))
        codes = _extract(registers, lane, item, 64 if self.result == "f64" else 32)
        if self.result == "f64":
            return codes.view(np.float64)
        return codes.astype(np.uint32).view(np.int32 if self.result == "i32" else np.float32)

    def sparse_depths(self, indices: Array, index_set: int) -> Array:
        """(size, stored): the depth of each stored element of A.

        Args:
            indices: the register, (lanes,).
            index_set: which of the sets in it.
        """
        i, stored = np.indices((self.size, self.a_items * self.groups))
        lane, item = i + self.size * (stored // self.a_items), stored % self.a_items
        shift = 2 * self.a_items * index_set + 2 * item
        index = indices.astype(np.int64)[lane] >> shift & 3
        depths: Array = stored // 2 * 4 + index
        return depths


@dataclass(frozen=True)
class Expected:
    """A result and the error that rounding may leave in it."""

    value: Array
    bound: Array


# Half a unit in the last place of 1, and the smallest denormal. Sums of integers are exact.
_ROUNDING = {"f32": (2.0**-24, 2.0**-149), "f64": (2.0**-53, 2.0**-1074), "i32": (0.0, 0.0)}


def _expected(value: Array, magnitude: Array, roundings: int, result: str) -> Expected:
    relative, absolute = _ROUNDING[result]
    return Expected(value, magnitude * (relative * roundings) + absolute * roundings)


def product(a: Array, b: Array, c: Array, result: str) -> Expected:
    """C + A B of (blocks, size, depth) and (blocks, depth, size), in any order."""
    with np.errstate(invalid="ignore", over="ignore"):
        value = c + a @ b
        magnitude = np.abs(c) + np.abs(a) @ np.abs(b)
    return _expected(value, magnitude, a.shape[-1] + 2, result)


def sparse_product(a: Array, depths: Array, b: Array, c: Array, result: str) -> Expected:
    """C + A B, of the stored elements of A at their depths: only those take part."""
    with np.errstate(invalid="ignore", over="ignore"):
        terms = a[0][:, :, None] * b[0][depths]  # size, stored, size
        value = c + terms.sum(axis=1)
        magnitude = np.abs(c) + np.abs(terms).sum(axis=1)
    return _expected(value, magnitude, depths.shape[1] + 2, result)


def scales_of(register: Array, byte: int, size: int) -> Array:
    """(size, groups): 2^(code - 127) of each row and each block of 32 depths; 0xff is NaN."""
    codes = (register.astype(np.int64) >> (8 * byte) & 0xFF).reshape(-1, size).T
    return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes - 127))


def blgp_lane(blgp: int, lane: Array) -> Array:
    """Table 29: the lane that B's values are read from."""
    if blgp == 3:
        return (lane + 16) % 64
    lanes, first = ((64, 0), (32, 0), (32, 32), (), (16, 0), (16, 16), (16, 32), (16, 48))[blgp]
    return lane % lanes + first


def cbsz_lane(cbsz: int, abid: int, lane: Array) -> Array:
    """7.1.6.1: the lane that A's values are read from."""
    lanes = LANES >> cbsz
    return lane % lanes + lanes * abid


_OF_BOTH_CHIPS = """mfma_f64 16x16x4 4x4x4_4b: f64
mfma_f32 32x32x1_2b 16x16x1_4b 4x4x1_16b 32x32x2 16x16x4: f32
mfma_f32 32x32x4_2b 16x16x4_4b 4x4x4_16b 32x32x8 16x16x16: f16 bf16
mfma_i32 32x32x4_2b 16x16x4_4b 4x4x4_16b 32x32x16 16x16x32: i8
mfma_f32 16x16x32 32x32x16: fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8
smfmac_f32 16x16x32 32x32x16: f16 bf16
smfmac_i32 16x16x64 32x32x32: i8
smfmac_f32 16x16x64 32x32x32: fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8
"""
_OF_GFX942 = "mfma_f32 16x16x8 32x32x4: xf32"
_OF_GFX950 = """mfma_f32 16x16x32 32x32x16: f16 bf16
mfma_i32 16x16x64 32x32x32: i8
smfmac_f32 16x16x64 32x32x32: f16 bf16
smfmac_i32 16x16x128 32x32x64: i8
smfmac_f32 16x16x128 32x32x64: fp8_fp8 fp8_bf8 bf8_fp8 bf8_bf8
mfma_f32 16x16x128 32x32x64: f8f6f4
mfma_scale_f32 16x16x128 32x32x64: f8f6f4
"""


def all_mnemonics(arch: str) -> set[str]:
    """Every matrix instruction of the chip, by the ISA documents' tables."""
    names = set()
    tables = _OF_BOTH_CHIPS + (_OF_GFX942 if arch == "gfx942" else _OF_GFX950)
    for line in tables.splitlines():
        products, types = (part.split() for part in line.split(":"))
        names |= {f"v_{products[0]}_{shape}_{kind}" for shape in products[1:] for kind in types}
    return names
