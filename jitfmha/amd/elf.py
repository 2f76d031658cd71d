"""As much of a 64-bit little-endian ELF file as code objects and what assemblers write need.

Reading a file that is damaged raises `struct.error`, `LookupError` or `ValueError`.
Source: the System V ABI's chapter "Object Files"; for the notes LLVM's "User Guide for AMDGPU".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SECTION_NOTE, _SECTION_DYNSYM = 7, 11


class Section(NamedTuple):
    """One section header: where the section lies in the file, and where in memory."""

    name_at: int
    type: int
    address: int
    offset: int
    size: int
    link: int


class Symbol(NamedTuple):
    """One dynamic symbol: its section's index and its address."""

    name: str
    section: int
    address: int


class Elf:
    """The headers of one file, and what they lead to.

    Attributes:
        image: the file's content.
        machine: what the file is for; 224 is AMD GPU.
        flags: whose meaning depends on the machine.
        section_table: offset and size of the section headers, in bytes.
        sections: in the file's order.
    """

    def __init__(self, image: bytes) -> None:
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError("it is not a 64-bit little-endian ELF file")
        self.image = image
        (self.machine,) = struct.unpack_from("<H", image, 18)
        (table,) = struct.unpack_from("<Q", image, 40)
        (self.flags,) = struct.unpack_from("<I", image, 48)
        header_bytes, count, self._names = struct.unpack_from("<HHH", image, 58)
        self.section_table: tuple[int, int] = (table, header_bytes * count)
        self.sections = [
            Section(*struct.unpack_from("<II8xQQQI20x", image, table + header_bytes * i))
            for i in range(count)
        ]

    def sections_by_name(self) -> dict[str, Section]:
        """The sections by name; of two with one name the later."""
        names = self.sections[self._names]
        return {self._text(names, section.name_at): section for section in self.sections}

    def content(self, section: Section) -> bytes:
        """The bytes of a section."""
        return self.image[section.offset : section.offset + section.size]

    def dynamic_symbols(self) -> Iterator[Symbol]:
        """The symbols that a loader sees."""
        for section in self.sections:
            if section.type != _SECTION_DYNSYM:
                continue
            names = self.sections[section.link]
            for at in range(section.offset, section.offset + section.size, 24):
                name_at, index, address = struct.unpack_from("<I2xHQ", self.image, at)
                yield Symbol(self._text(names, name_at), index, address)

    def notes(self, kind: int) -> Iterator[bytes]:
        """The contents of the notes of one kind."""
        for section in self.sections:
            if section.type != _SECTION_NOTE:
                continue
            at = section.offset
            while at + 12 <= section.offset + section.size:
                name, size, found = struct.unpack_from("<III", self.image, at)
                start = at + 12 + -(-name // 4) * 4
                if found == kind:
                    yield self.image[start : start + size]
                at = start + -(-size // 4) * 4

    def _text(self, names: Section, at: int) -> str:
        start = names.offset + at
        return self.image[start : self.image.index(b"\0", start)].decode()
