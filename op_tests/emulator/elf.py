"""As much of a 64-bit little-endian ELF file as tests look at and damage."""

from __future__ import annotations

import struct

from jitfmha.jit.elf import Elf

HEADER_BYTES = 64


def sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Name -> (offset, bytes) of each section in the file."""
    return {
        name: (section.offset, section.size)
        for name, section in Elf(elf).sections_by_name().items()
    }


def section_headers(elf: bytes) -> tuple[int, int]:
    """(offset, bytes) of the table of section headers."""
    return Elf(elf).section_table


def text_words(elf: bytes) -> tuple[int, ...]:
    """The dwords of the code."""
    offset, length = sections(elf)[".text"]
    return struct.unpack_from(f"<{length // 4}I", elf, offset)
