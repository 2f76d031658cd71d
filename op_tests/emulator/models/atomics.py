"""What atomic operations make of memory, from the ISA documents' words, one value at a time.

Values are the bits of 32- or 64-bit operands as Python integers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class FloatFormat:
    """An IEEE-like binary format."""

    exponent_bits: int
    fraction_bits: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def quiet(self) -> int:
        return 1 << (self.fraction_bits - 1)

    def magnitude(self, bits: int) -> int:
        return bits & ((1 << (self.bits - 1)) - 1)

    def is_negative(self, bits: int) -> bool:
        return bool(bits >> (self.bits - 1))

    def is_nan(self, bits: int) -> bool:
        return self.magnitude(bits) > self.infinity

    def is_infinite(self, bits: int) -> bool:
        return self.magnitude(bits) == self.infinity

    def is_signaling(self, bits: int) -> bool:
        return self.is_nan(bits) and not bits & self.quiet

    def flush(self, bits: int) -> int:
        """A denormal becomes a zero of its sign."""
        is_denormal = self.magnitude(bits) < 1 << self.fraction_bits
        return bits & (1 << (self.bits - 1)) if is_denormal else bits

    def exact(self, bits: int) -> Fraction:
        """The value of a finite number."""
        exponent = self.magnitude(bits) >> self.fraction_bits
        fraction = bits & ((1 << self.fraction_bits) - 1)
        bias = (1 << (self.exponent_bits - 1)) - 1
        if exponent:
            fraction |= 1 << self.fraction_bits
        power = max(exponent, 1) - bias - self.fraction_bits
        value = Fraction(fraction) * Fraction(2) ** power
        return -value if self.is_negative(bits) else value

    def nearest(self, value: Fraction) -> int:
        """The bits of the nearest number, ties to even; of zero, the positive one."""
        sign = 1 << (self.bits - 1) if value < 0 else 0
        size = abs(value)
        if size == 0:
            return 0
        bias = (1 << (self.exponent_bits - 1)) - 1
        exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
        while Fraction(2) ** (exponent + 1) <= size:
            exponent += 1
        while Fraction(2) ** exponent > size:
            exponent -= 1
        exponent = max(exponent, 1 - bias)
        steps = round(size / Fraction(2) ** (exponent - self.fraction_bits))
        # Adding carries from the fraction to the exponent, and a denormal has none.
        magnitude = ((exponent + bias - 1) << self.fraction_bits) + steps
        return sign | min(magnitude, self.infinity)


F16 = FloatFormat(5, 10)
BF16 = FloatFormat(8, 7)
F32 = FloatFormat(8, 23)
F64 = FloatFormat(11, 52)


@dataclass(frozen=True)
class Denormals:
    """Which denormals are kept: of sources, of results."""

    sources: bool = True
    results: bool = True


def _add(kind: FloatFormat, memory: int, data: int, denormals: Denormals) -> int:
    for value in (memory, data):
        if kind.is_nan(value):
            return value | kind.quiet
    if not denormals.sources:
        memory, data = kind.flush(memory), kind.flush(data)
    if kind.is_infinite(memory) and kind.is_infinite(data) and memory != data:
        return kind.infinity | kind.quiet
    for value in (memory, data):
        if kind.is_infinite(value):
            return value
    total = kind.exact(memory) + kind.exact(data)
    if total == 0:
        # -0 only as the sum of two of them.
        return memory & data & (1 << (kind.bits - 1))
    result = kind.nearest(total)
    return result if denormals.results else kind.flush(result)


def _select(kind: FloatFormat, memory: int, data: int, larger: bool, denormals: Denormals) -> int:
    for value in (memory, data):
        if kind.is_signaling(value):
            return value | kind.quiet
    if kind.is_nan(memory) or kind.is_nan(data):
        return data if kind.is_nan(memory) else memory

    def order(bits: int) -> int:
        kept = bits if denormals.sources else kind.flush(bits)
        return -kind.magnitude(kept) - 1 if kind.is_negative(kept) else kind.magnitude(kept)

    if order(memory) == order(data):
        return memory
    return memory if (order(memory) > order(data)) == larger else data


def _compare_float(
    kind: FloatFormat, memory: int, compared: int, stored: int, denormals: Denormals
) -> int:
    if kind.is_nan(memory) or kind.is_nan(compared):
        return memory
    flush = (lambda bits: bits) if denormals.sources else kind.flush
    a, b = flush(memory), flush(compared)
    is_equal = a == b or (kind.magnitude(a) == 0 and kind.magnitude(b) == 0)
    return flush(stored) if is_equal else memory


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_FLOATS = {("f", 32): F32, ("f", 64): F64, ("pk_f", 16): F16, ("pk_bf", 16): BF16}

_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": lambda m, d: m + d,
    "sub": lambda m, d: m - d,
    "rsub": lambda m, d: d - m,
    "inc": lambda m, d: 0 if m >= d else m + 1,
    "dec": lambda m, d: d if m == 0 or m > d else m - 1,
    "min": min,
    "max": max,
    "and": lambda m, d: m & d,
    "or": lambda m, d: m | d,
    "xor": lambda m, d: m ^ d,
    "swap": lambda m, d: d,
}


def atomic(
    operation: str, kind: str, bits: int, memory: int, data: Sequence[int], denormals: Denormals
) -> int:
    """The new content of memory.

    Args:
        operation: add, sub, rsub, inc, dec, min, max, and, or, xor, swap, mskor, wrap;
            cmpst (data: compared, stored) and cmpswap (stored, compared).
        kind: u, i, b, f, or pk_f and pk_bf of packed 16-bit floats.
        bits: of an element.
    """
    mask = (1 << bits) - 1
    if kind.startswith("pk"):
        halves = [
            _add(_FLOATS[kind, 16], memory >> s & 0xFFFF, data[0] >> s & 0xFFFF, denormals)
            for s in (0, 16)
        ]
        return halves[0] | halves[1] << 16
    if kind == "f":
        number = _FLOATS[kind, bits]
        if operation == "add":
            # The adder of doubles knows no flushing.
            return _add(number, memory, data[0], Denormals() if bits == 64 else denormals)
        if operation == "cmpst":
            return _compare_float(number, memory, data[0], data[1], denormals)
        return _select(number, memory, data[0], operation == "max", denormals)
    if operation == "mskor":
        return (memory & ~data[0]) | data[1]
    if operation == "wrap":
        return (memory - data[0] if memory >= data[0] else memory + data[1]) & mask
    if operation in ("cmpst", "cmpswap"):
        compared, stored = data if operation == "cmpst" else reversed(data)
        return stored if memory == compared else memory
    if kind == "i":
        return _INTEGER[operation](_signed(memory, bits), _signed(data[0], bits)) & mask
    return _INTEGER[operation](memory, data[0]) & mask


# ---- Memory --------------------------------------------------------------------------------------


class Bytes:
    """Byte-addressed memory, little-endian."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)

    def holds(self, offset: int, size: int) -> bool:
        return offset >= 0 and offset + size <= len(self.content)

    def load(self, offset: int, size: int) -> int:
        return int.from_bytes(self.content[offset : offset + size], "little")

    def store(self, offset: int, size: int, value: int) -> None:
        masked = value & ((1 << 8 * size) - 1)
        self.content[offset : offset + size] = masked.to_bytes(size, "little")


def interesting(kind: str, bits: int) -> list[int]:
    """Edge values of an operand, as 32 or 64 bits."""
    if kind.startswith("pk"):
        number = _FLOATS[kind, 16]
        ones = _edges(number)
        return [a | b << 16 for a, b in zip(ones, ones[3:] + ones[:3], strict=True)]
    if kind == "f":
        return _edges(_FLOATS[kind, bits])
    return [0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 0x55555555]


def _edges(number: FloatFormat) -> list[int]:
    sign, least_normal = 1 << (number.bits - 1), 1 << number.fraction_bits
    one = number.nearest(Fraction(1))
    magnitudes = [
        *(
            0,
            1,
            least_normal - 1,
            least_normal,
            least_normal + 1,
            one,
            one + 1,
            number.infinity - 1,
        ),
        *(number.infinity, number.infinity | number.quiet | 5, number.infinity | 1),
    ]
    return [m | s for m in magnitudes for s in (0, sign)]


def float_bits(value: float) -> int:
    """Of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
