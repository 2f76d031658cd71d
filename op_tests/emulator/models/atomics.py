"""What atomic operations make of memory, from the ISA documents' words, one value at a time.

Values are the bits of 32- or 64-bit operands as Python integers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .number_formats import BF16, F16, F32, F64, NEAREST, Format
from .vector_alu import signed


@dataclass(frozen=True)
class Denormals:
    """Which denormals are kept: of sources, of results."""

    sources: bool = True
    results: bool = True


def _add(kind: Format, memory: int, data: int, denormals: Denormals) -> int:
    for value in (memory, data):
        if kind.is_nan(value):
            return kind.quiet(value)
    if not denormals.sources:
        memory, data = kind.flush(memory), kind.flush(data)
    result = kind.add(memory, data, NEAREST)
    return result if denormals.results else kind.flush(result)


def _select(kind: Format, memory: int, data: int, larger: bool, denormals: Denormals) -> int:
    for value in (memory, data):
        if kind.is_signaling(value):
            return kind.quiet(value)
    if kind.is_nan(memory) or kind.is_nan(data):
        return data if kind.is_nan(memory) else memory
    a, b = (x if denormals.sources else kind.flush(x) for x in (memory, data))
    return memory if a == b or kind.less(b, a) == larger else data


def _compare_float(
    kind: Format, memory: int, compared: int, stored: int, denormals: Denormals
) -> int:
    if kind.is_nan(memory) or kind.is_nan(compared):
        return memory
    flush = (lambda bits: bits) if denormals.sources else kind.flush
    a, b = flush(memory), flush(compared)
    return flush(stored) if a == b or (kind.is_zero(a) and kind.is_zero(b)) else memory


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
        return _INTEGER[operation](signed(memory, bits), signed(data[0], bits)) & mask
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


def _edges(number: Format) -> list[int]:
    least_normal, one = 1 << number.mantissa, number.round(Fraction(1), NEAREST)
    magnitudes = [0, 1, least_normal - 1, least_normal, least_normal + 1, one, one + 1]
    magnitudes += [number.infinity - 1, number.infinity, number.quiet_nan | 5, number.infinity | 1]
    return [m | s for m in magnitudes for s in (0, number.sign)]
