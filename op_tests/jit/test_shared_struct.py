"""One statement of a struct: the bytes that Python packs are those that C++ reads."""

import ctypes
import re
import struct
from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.jit.shared_struct import (
    BOOL,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    UINT32,
    Array,
    Dialect,
    FieldType,
    Pointer,
    SharedStruct,
)

STRIDES = SharedStruct("Strides", {"batch": INT64, "head": INT32})
CALL = SharedStruct(
    "Call",
    {
        "has_lse": BOOL,
        "scale": FLOAT,
        "out": POINTER,
        "lengths": Array(INT32, 3),
        "strides": Array(STRIDES, 2),
        "last": UINT32,
    },
)
SLOTS = SharedStruct("Slots", {"out": POINTER, "scale": FLOAT, "rows": UINT32}, slot_bytes=16)
SOURCE = """
#include <cstddef>
#include <cstdint>
{strides}
{call}
{slots}
extern "C" __attribute__((visibility("default"))) double sum_call(const Call* call) {{
  double sum = call->has_lse + call->scale + reinterpret_cast<std::intptr_t>(call->out);
  for (int length : call->lengths) sum = sum * 10 + length;
  for (const Strides& each : call->strides) sum = (sum * 10 + each.batch) * 10 + each.head;
  return sum * 10 + call->last;
}}
extern "C" __attribute__((visibility("default"))) double sum_slots(const Slots* slots) {{
  return (reinterpret_cast<std::intptr_t>(slots->out) * 10 + slots->scale) * 10 + slots->rows;
}}
"""
VALUES = (True, 0.5, 7, *(1, 2, 3), *(4, 5), *(6, 7), 8)


def built(cache: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> ctypes.CDLL:
    monkeypatch.setenv("JITFMHA_CACHE_DIR", str(cache))
    definitions = {"strides": STRIDES.cpp(), "call": CALL.cpp(), "slots": SLOTS.cpp()}
    source = SOURCE.format(**(definitions | changes))
    library = jit.load(jit.BuildSpec("shared_struct", {"sums.cpp": source}, ("-std=c++17",)))
    library.sum_call.restype = library.sum_slots.restype = ctypes.c_double
    return library


def test_cpp_reads_what_python_packs(tmp_path, monkeypatch):
    library = built(tmp_path, monkeypatch)
    names = tuple(CALL.leaves)
    assert names[:4] == ("has_lse", "scale", "out", "lengths[0]")
    assert names[6:] == (
        *("strides[0].batch", "strides[0].head", "strides[1].batch", "strides[1].head", "last"),
    )
    packed = CALL.packer.pack(*VALUES)
    assert len(packed) == CALL.size == ctypes.sizeof(CALL.ctype)
    assert library.sum_call(packed) == 8.5e8 + 12345678
    assert library.sum_slots(SLOTS.packer.pack(1, 2, 3)) == 123


def test_ctypes_and_the_packer_agree():
    filled = CALL.ctype(has_lse=True, scale=0.5, out=7, lengths=(1, 2, 3), last=8)
    for i, (batch, head) in enumerate(((4, 5), (6, 7))):
        filled.strides[i].batch, filled.strides[i].head = batch, head
    assert bytes(filled) == CALL.packer.pack(*VALUES)
    assert bytes(SLOTS.ctype(out=1, scale=2, rows=3)) == SLOTS.packer.pack(1, 2, 3)


def test_slots():
    assert SLOTS.offsets == {"out": 0, "scale": 16, "rows": 32}
    assert SLOTS.size == 48
    assert SLOTS.packer.pack(1, 2, 3) == struct.pack("<Q8xf12xI12x", 1, 2, 3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("std::uint32_t last;", "std::uint32_t last, surplus[2];"),
        ("std::int32_t lengths[3];", "std::int32_t lengths[5];"),
        ("float scale;", "double scale;"),
        ("bool has_lse;\n  float scale;", "float scale;\n  bool has_lse;"),
    ],
)
def test_another_layout_does_not_compile(tmp_path, monkeypatch, old, new):
    call = CALL.cpp()
    assert old in call
    with pytest.raises(jit.BuildError, match="static"):
        built(tmp_path, monkeypatch, call=call.replace(old, new))


def test_every_offset_is_checked():
    checked = re.findall(r"static_assert\(offsetof\(Call, (\w+)\)", CALL.cpp())
    assert checked == list(CALL.fields)
    assert f"static_assert(sizeof(Call) == {CALL.size});" in CALL.cpp()


@pytest.mark.parametrize(
    "other",
    [
        {"out": POINTER, "scale": FLOAT, "rows": UINT32, "more": UINT32},
        {"out": POINTER, "scale": FLOAT},
        {"out": POINTER, "scale": FLOAT, "columns": UINT32},
        {"out": POINTER, "scale": FLOAT, "rows": INT32},
        {"out": POINTER, "rows": UINT32, "scale": FLOAT},
        {"scale": FLOAT, "rows": UINT32, "out": POINTER},
    ],
)
def test_another_layout_has_another_name(other):
    """Also inside of another struct, and with other offsets of the same fields."""
    fields: dict[str, FieldType] = {"out": POINTER, "scale": FLOAT, "rows": UINT32}
    layout = SharedStruct("Slots", fields).layout
    assert re.fullmatch("[0-9a-f]{16}", layout)
    assert layout == SharedStruct("Slots", fields).layout
    assert len({layout, SLOTS.layout, SharedStruct("Slots", other).layout}) == 3
    outer = [SharedStruct("Outer", {"in": SharedStruct("Slots", x)}) for x in (fields, other)]
    assert outer[0].layout != outer[1].layout


def test_another_dialect():
    device = Dialect({"std::uint32_t": "unsigned"}, "Global<{}>", "__builtin_offsetof")
    arguments = SharedStruct("Arguments", {"q": Pointer("const char"), "rows": UINT32})
    assert arguments.cpp(device).splitlines() == [
        "struct Arguments {",
        "  Global<const char> q;",
        "  unsigned rows;",
        "};",
        "static_assert(__builtin_offsetof(Arguments, q) == 0);",
        "static_assert(__builtin_offsetof(Arguments, rows) == 8);",
        "static_assert(sizeof(Arguments) == 16);",
    ]
