"""As much of a 64-bit little-endian ELF file as code objects and what assemblers write need.

Reading a file that is damaged raises `struct.error`, `LookupError` or `ValueError`, and takes time
in proportion to its size: tables that share bytes, which would let a small file take hours, are
refused.
Source: the System V ABI's chapter "Object Files"; for the notes LLVM's "User Guide for AMDGPU".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SECTION_NULL, _SECTION_NOTE, _SECTION_NOBITS, _SECTION_DYNSYM = 0, 7, 8, 11
_SEGMENT_LOAD, _SEGMENT_NOTE = 1, 4
_NOTE_BUILD_ID = 3
_HEADER_BYTES, _SECTION_BYTES, _SEGMENT_BYTES, _SYMBOL_BYTES = 64, 64, 56, 24


class Section(NamedTuple):
    """One section header: where the section lies in the file, and where in memory."""

    type: int
    address: int
    offset: int
    size: int
    link: int


class Segment(NamedTuple):
    """One program header: what a loader copies from the file to memory, or reads in the file."""

    type: int
    offset: int
    size: int
    memory_size: int


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
        sections, segments: in the file's order; all that they have in the file lies inside of it.
    """

    def __init__(self, image: bytes) -> None:
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError("it is not a 64-bit little-endian ELF file")
        self.image = image
        (self.machine,) = struct.unpack_from("<H", image, 18)
        segments_at, sections_at = struct.unpack_from("<QQ", image, 32)
        (self.flags,) = struct.unpack_from("<I", image, 48)
        sizes_and_counts = struct.unpack_from("<HHHH", image, 54)
        segment_bytes, segment_count, section_bytes, section_count = sizes_and_counts
        self.sections = [
            Section(*struct.unpack_from("<4xI8xQQQI20x", image, at))
            for at in self._headers(
                "section", sections_at, section_bytes, _SECTION_BYTES, section_count
            )
        ]
        for index, section in enumerate(self.sections):
            if section.type not in (_SECTION_NULL, _SECTION_NOBITS):
                self._check_inside(f"section {index}", section.offset, section.size)
        self.segments = [
            Segment(*struct.unpack_from("<I4xQ16xQQ8x", image, at))
            for at in self._headers(
                "program", segments_at, segment_bytes, _SEGMENT_BYTES, segment_count
            )
        ]
        for index, segment in enumerate(self.segments):
            self._check_inside(f"segment {index}", segment.offset, segment.size)
            if segment.type == _SEGMENT_LOAD and segment.size > segment.memory_size:
                raise ValueError(
                    f"segment {index} has {segment.size} bytes in the file, more than the "
                    f"{segment.memory_size} in memory"
                )

    def _headers(self, what: str, first: int, size: int, expected: int, count: int) -> range:
        if count and size != expected:
            raise ValueError(f"its {what} headers have {size} bytes each, not {expected}")
        self._check_inside(f"the table of its {what} headers", first, count * expected)
        return range(first, first + count * expected, expected)

    def _check_inside(self, what: str, offset: int, size: int) -> None:
        if offset + size > len(self.image) and size:
            raise ValueError(
                f"{what} ends at byte {offset + size}, and the file has {len(self.image)}"
            )

    def content(self, section: Section) -> bytes:
        return self.image[section.offset : section.offset + section.size]

    def dynamic_symbols(self) -> Iterator[Symbol]:
        names = _Names(self.image)
        for section in self._disjoint(_SECTION_DYNSYM):
            table = self.sections[section.link]
            for at in range(section.offset, section.offset + section.size, _SYMBOL_BYTES):
                name_at, index, address = struct.unpack_from("<I2xHQ", self.image, at)
                yield Symbol(names.at(table.offset + name_at), index, address)

    def notes(self, kind: int) -> Iterator[bytes]:
        """The contents of the notes of one kind."""
        for section in self._disjoint(_SECTION_NOTE):
            yield from _notes(self.content(section), kind)

    def _disjoint(self, kind: int) -> list[Section]:
        """The sections of one type, which share no bytes."""
        sections = [section for section in self.sections if section.type == kind]
        if sum(section.size for section in sections) > len(self.image):
            raise ValueError(f"its sections of type {kind} have more bytes than the file")
        return sections


def build_id(path: str) -> str | None:
    """What the linker wrote into a library to tell its content from any other's, in hex.

    None where it wrote nothing. Reads no more of the file than that takes.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
        if header[:6] != b"\x7fELF\x02\x01" or len(header) < _HEADER_BYTES:
            return None
        (segments_at,) = struct.unpack_from("<Q", header, 32)
        segment_bytes, count = struct.unpack_from("<HH", header, 54)
        file.seek(segments_at)
        table = file.read(segment_bytes * count)
        if segment_bytes != _SEGMENT_BYTES or len(table) < segment_bytes * count:
            return None
        for kind, offset, size in struct.iter_unpack("<I4xQ16xQ16x", table):
            if kind == _SEGMENT_NOTE:
                file.seek(offset)
                for found in _notes(file.read(size), _NOTE_BUILD_ID, b"GNU\0"):
                    return found.hex()
    return None


def _notes(notes: bytes, kind: int, owner: bytes = b"") -> Iterator[bytes]:
    at = 0
    while at + 12 <= len(notes):
        name, size, found = struct.unpack_from("<III", notes, at)
        start = at + 12 + -(-name // 4) * 4
        if found == kind and notes.startswith(owner, at + 12):
            yield notes[start : start + size]
        at = start + -(-size // 4) * 4


def printable(name: str) -> str:
    """A name that somebody else chose, for messages: no terminal takes it for commands."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


class _Names:
    """Names of a file; those that are read have no more bytes than the file, all together."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        self._left = len(image)

    def at(self, start: int) -> str:
        end = self._image.index(b"\0", start)
        self._left -= end - start
        if self._left < 0:
            raise ValueError("its names have more bytes than the file")
        return self._image[start:end].decode()
