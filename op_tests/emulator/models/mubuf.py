"""Buffer addresses, range checks and data formats, from the ISA documents' words."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Resource:
    """The four dwords of a buffer resource."""

    base: int
    stride: int = 0
    records: int = 0
    cache_swizzle: bool = False
    swizzle: bool = False
    select: tuple[int, int, int, int] = (4, 5, 6, 7)
    number_format: int = 7
    data_format: int = 4
    index_stride: int = 0
    add_thread_id: bool = False

    @property
    def bits(self) -> int:
        word3 = sum(value << 3 * i for i, value in enumerate(self.select))
        word3 |= self.number_format << 12 | self.data_format << 15
        word3 |= self.index_stride << 21 | self.add_thread_id << 23
        flags = self.cache_swizzle << 62 | self.swizzle << 63
        return self.base | (self.stride & 0x3FFF) << 48 | flags | self.records << 64 | word3 << 96


@dataclass(frozen=True)
class Address:
    """What an instruction brings, for one lane."""

    resource: Resource
    lane: int
    instruction_offset: int
    scalar_offset: int
    index: int | None
    offset: int | None

    def place(self, within: int, size: int) -> int | None:
        """Where `size` bytes of the access are, from the base; None where out of range."""
        resource = self.resource
        offset = (self.offset or 0) + self.instruction_offset + within
        index = (self.index or 0) + (self.lane if resource.add_thread_id else 0)
        if resource.add_thread_id:
            pass  # private memory is not checked
        elif self.index is not None:
            if index >= resource.records:
                return None
        elif offset + size > resource.records - self.scalar_offset:
            return None
        stride = resource.stride
        if resource.add_thread_id:
            stride |= resource.data_format << 14
        if not resource.swizzle:
            return self.scalar_offset + index * stride + offset
        indices, element = 8 << resource.index_stride, 4
        in_buffer = (index // indices * stride + offset // element * element) * indices
        in_buffer += index % indices * element + offset % element
        return self.scalar_offset + in_buffer


# DFMT -> bits of the components, of the formats that are emulated.
DATA_FORMATS: dict[int, tuple[int, ...]] = {
    1: (8,), 2: (16,), 3: (8, 8), 4: (32,), 5: (16, 16), 10: (8, 8, 8, 8),
    11: (32, 32), 12: (16,) * 4, 13: (32,) * 3, 14: (32,) * 4,
}  # fmt: skip
UNORM, SNORM, USCALED, SSCALED, UINT, SINT, FLOAT = 0, 1, 2, 3, 4, 5, 7


def number_formats(data_format: int) -> list[int]:
    bits = DATA_FORMATS[data_format][0]
    if bits == 32:
        return [UINT, SINT, FLOAT]
    converted = [UNORM, SNORM, USCALED, SSCALED, UINT, SINT]
    return converted if bits == 8 else [*converted, FLOAT]


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def from_format(data_format: int, number_format: int, content: bytes) -> list[int]:
    """The components in memory as the 32-bit values that a load gives."""
    values = []
    position = 0
    for bits in DATA_FORMATS[data_format]:
        raw = int.from_bytes(content[position // 8 : position // 8 + bits // 8], "little")
        position += bits
        signed = raw - (1 << bits) if raw >> (bits - 1) else raw
        if number_format == UNORM:
            values.append(_float_bits(raw / ((1 << bits) - 1)))
        elif number_format == SNORM:
            values.append(_float_bits(max(signed / ((1 << (bits - 1)) - 1), -1.0)))
        elif number_format == USCALED:
            values.append(_float_bits(float(raw)))
        elif number_format == SSCALED:
            values.append(_float_bits(float(signed)))
        elif number_format == SINT:
            values.append(signed & 0xFFFFFFFF)
        elif number_format == FLOAT and bits == 16:
            values.append(_float_bits(struct.unpack("<e", raw.to_bytes(2, "little"))[0]))
        else:
            values.append(raw)
    return values


def selected(components: Sequence[int], select: Sequence[int], one: int, count: int) -> list[int]:
    """The components that a load returns, as the resource selects them."""
    return [0 if s == 0 else one if s == 1 else components[s - 4] for s in select[:count]]
