"""Structs that C++ and Python share, each stated once.

A :class:`SharedStruct` gives the C++ definition, which goes into a template as one placeholder with
a ``static_assert`` for its size and for every offset; a :class:`ctypes.Structure`; and a
:class:`struct.Struct`, which packs all values at once and is the quickest way to fill one. So where
the two languages disagree, the build fails.

    SIZES = SharedStruct("Sizes", {"rows": INT64, "strides": Array(INT64, 4), "scale": FLOAT})

    jit.render("example.cpp.in", {"sizes": SIZES.cpp()})
    SIZES.packer.pack(70, *(8960, 128, 128, 1), 0.1)
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias


class Dialect(NamedTuple):
    """How C++ text spells what differs between the host's compiler and a GPU's without headers.

    Attributes:
        scalars: the names of the scalar types; those of C++'s <cstdint> where one is missing.
        pointer: a pointer's type, with {} for what it points to.
        offsetof: the operator.
    """

    scalars: Mapping[str, str]
    pointer: str
    offsetof: str


HOST = Dialect(scalars={}, pointer="{}*", offsetof="offsetof")


class Scalar(NamedTuple):
    """A number: its C++ type, its letter in a :mod:`struct` format, and its ctypes type.

    Its alignment is its size.
    """

    cpp: str
    letter: str
    ctype: Any

    @property
    def size(self) -> int:
        return struct.calcsize(f"={self.letter}")


class Pointer(NamedTuple):
    """An address, as Python's ``int``, of what has the C++ type ``to``; null is 0."""

    to: str = "void"


INT32 = Scalar("std::int32_t", "i", ctypes.c_int32)
UINT32 = Scalar("std::uint32_t", "I", ctypes.c_uint32)
INT64 = Scalar("std::int64_t", "q", ctypes.c_int64)
UINT64 = Scalar("std::uint64_t", "Q", ctypes.c_uint64)
BOOL = Scalar("bool", "?", ctypes.c_bool)
FLOAT = Scalar("float", "f", ctypes.c_float)
POINTER = Pointer()
_POINTER_BYTES = 8


class Array(NamedTuple):
    """``length`` values of one type, one behind the other."""

    of: FieldType
    length: int


FieldType: TypeAlias = "Scalar | Pointer | Array | SharedStruct"


class SharedStruct:
    """One struct, known to both languages.

    Attributes:
        name: in C++.
        fields: name -> type, in order.
        slot_bytes: every field begins at a multiple of this, and the size is one; 0: each has the
            alignment that its type has in C++.
    """

    def __init__(self, name: str, fields: Mapping[str, FieldType], *, slot_bytes: int = 0) -> None:
        self.name = name
        self.fields = dict(fields)
        self.slot_bytes = slot_bytes
        self.offsets: dict[str, int] = {}
        end = 0
        for field, kind in self.fields.items():
            start = _rounded_up(end, max(_alignment(kind), slot_bytes))
            self.offsets[field] = start
            end = start + _size(kind)
        self.alignment = max([slot_bytes, *(_alignment(kind) for kind in self.fields.values())])
        self.size = _rounded_up(end, self.alignment)

    def __repr__(self) -> str:
        return f"SharedStruct({self.name!r}, {self.size} bytes)"

    @cached_property
    def leaves(self) -> dict[str, tuple[int, str]]:
        """Offset and letter of each plain value, as ``strides[1].head``, in ``packer``'s order."""
        return {name: (offset, letter) for name, letter, offset in _leaves(self, "", 0)}

    @cached_property
    def layout(self) -> str:
        """16 digits that differ where a leaf has another name, type or offset.

        What was compiled for one layout of a struct can be told from what is packed for another.
        """
        each = self.leaves.items()
        leaves = "".join(f"{name} {letter} {offset}\n" for name, (offset, letter) in each)
        return hashlib.sha256(f"{leaves}{self.size}".encode()).hexdigest()[:16]

    @cached_property
    def packer(self) -> struct.Struct:
        """Packs the values of all ``leaves``; what lies between fields is 0."""
        form, end = "=", 0
        for offset, letter in self.leaves.values():
            gap = offset - end
            form += f"{gap}x{letter}" if gap else letter
            end = offset + struct.calcsize(f"={letter}")
        return struct.Struct(form + (f"{self.size - end}x" if self.size > end else ""))

    @cached_property
    def ctype(self) -> type[ctypes.Structure]:
        """The struct for ctypes; all bytes of a new one are 0."""
        members: list[tuple[str, Any]] = []
        end = 0
        for field, kind in self.fields.items():
            if self.offsets[field] > end:
                members.append((f"_before_{field}", ctypes.c_uint8 * (self.offsets[field] - end)))
            members.append((field, _ctype(kind)))
            end = self.offsets[field] + _size(kind)
        if self.size > end:
            members.append(("_rest", ctypes.c_uint8 * (self.size - end)))
        made = type(self.name, (ctypes.Structure,), {"_pack_": 1, "_fields_": members})
        assert ctypes.sizeof(made) == self.size
        return made

    def cpp(self, dialect: Dialect = HOST) -> str:
        """The C++ definition and its checks. Structs inside of it have to be defined before."""
        slot = f"alignas({self.slot_bytes}) " if self.slot_bytes else ""
        members = "".join(
            f"  {slot}{_declaration(field, kind, dialect)};\n"
            for field, kind in self.fields.items()
        )
        checks = "".join(
            f"static_assert({dialect.offsetof}({self.name}, {field}) == {offset});\n"
            for field, offset in self.offsets.items()
        )
        return (
            f"struct {self.name} {{\n{members}}};\n{checks}"
            f"static_assert(sizeof({self.name}) == {self.size});"
        )


def cpp_of(structs: Iterable[SharedStruct], dialect: Dialect = HOST) -> str:
    """The definitions of structs, each before those that have it inside."""
    return "\n\n".join(each.cpp(dialect) for each in structs)


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _size(kind: FieldType) -> int:
    if isinstance(kind, Array):
        return _size(kind.of) * kind.length
    return _POINTER_BYTES if isinstance(kind, Pointer) else kind.size


def _alignment(kind: FieldType) -> int:
    if isinstance(kind, Array):
        return _alignment(kind.of)
    return kind.alignment if isinstance(kind, SharedStruct) else _size(kind)


def _leaves(kind: FieldType, name: str, offset: int) -> Iterator[tuple[str, str, int]]:
    """Name, letter and offset of each plain value."""
    if isinstance(kind, SharedStruct):
        for field, each in kind.fields.items():
            inner = f"{name}.{field}" if name else field
            yield from _leaves(each, inner, offset + kind.offsets[field])
    elif isinstance(kind, Array):
        for i in range(kind.length):
            yield from _leaves(kind.of, f"{name}[{i}]", offset + i * _size(kind.of))
    else:
        yield name, "Q" if isinstance(kind, Pointer) else kind.letter, offset


def _ctype(kind: FieldType) -> Any:
    if isinstance(kind, Array):
        return _ctype(kind.of) * kind.length
    return ctypes.c_void_p if isinstance(kind, Pointer) else kind.ctype


def _declaration(name: str, kind: FieldType, dialect: Dialect) -> str:
    if isinstance(kind, Array):
        return _declaration(f"{name}[{kind.length}]", kind.of, dialect)
    if isinstance(kind, Pointer):
        return f"{dialect.pointer.format(kind.to)} {name}"
    if isinstance(kind, SharedStruct):
        return f"{kind.name} {name}"
    return f"{dialect.scalars.get(kind.cpp, kind.cpp)} {name}"
