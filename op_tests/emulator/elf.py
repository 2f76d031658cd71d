"""As much of a 64-bit little-endian ELF file as tests look at and damage."""

from __future__ import annotations

import struct

HEADER_BYTES = 64
_SECTION = struct.Struct("<IIQQQQIIQQ")


def sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Name -> (offset, bytes) of each section in the file."""
    (headers,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    parsed = [_SECTION.unpack_from(elf, headers + i * size) for i in range(count)]
    strings = parsed[names][4]
    return {
        elf[strings + name : elf.index(b"\0", strings + name)].decode(): (offset, length)
        for name, _, _, _, offset, length, *_ in parsed
    }


def section_headers(elf: bytes) -> tuple[int, int]:
    """(offset, bytes) of the table of section headers."""
    (offset,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    return offset, size * count


def text_words(elf: bytes) -> tuple[int, ...]:
    """The dwords of the code."""
    offset, length = sections(elf)[".text"]
    return struct.unpack_from(f"<{length // 4}I", elf, offset)
