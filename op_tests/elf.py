"""As much of a 64-bit little-endian ELF file as tests look at and damage."""

import struct

HEADER_BYTES, _SECTION_BYTES = 64, 64


def sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Name -> (offset, bytes) of each section in the file."""
    (names_section,) = struct.unpack_from("<H", elf, 62)
    table, size = section_headers(elf)
    headers = list(struct.iter_unpack("<I20xQQ24x", elf[table : table + size]))
    names = elf[headers[names_section][1] :]
    return {
        names[at : names.index(b"\0", at)].decode(): (offset, length)
        for at, offset, length in headers
    }


def section_headers(elf: bytes) -> tuple[int, int]:
    """(offset, bytes) of the table of section headers."""
    (offset,) = struct.unpack_from("<Q", elf, 40)
    (count,) = struct.unpack_from("<H", elf, 60)
    return offset, _SECTION_BYTES * count


def text_words(elf: bytes) -> tuple[int, ...]:
    """The dwords of the code."""
    offset, length = sections(elf)[".text"]
    return struct.unpack_from(f"<{length // 4}I", elf, offset)
