"""Every buffer instruction against its model: raw, structured, swizzled and private buffers, loads
into LDS, atomics and data formats.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from flat_cases import between_lds, in_lanes, words
from models import mubuf as model
from models import vector_memory
from models.atomics import Bytes
from models.mubuf import Address, Resource
from programs import LANES, Array, Segment, run

from jitfmha.emulator import Definition, Emulator, EmulatorError

_SLICE = 8192  # bytes of memory for each instruction
_PLANES = 8  # registers around the data; as many planes of LDS
_DATA = 10  # the first data register, among v8 to v15
_POISON_BASE = 8
_ALL = 2**64 - 1
_KINDS = ("raw", "raw with cache swizzle", "structured")
_KINDS += ("structured swizzled", "private", "private swizzled")


def _operation(row: Definition) -> str:
    return row.mnemonic.removeprefix("buffer_")


@dataclass
class _Case:
    """One instruction with all that it sees."""

    text: str
    operation: str
    resource: Resource
    instruction_offset: int
    scalar_offset: int
    index: Array | None
    offset: Array | None
    active: int
    registers: Array
    content: Array
    file: str = "v"
    data: int = 0
    returns: bool = True
    to_lds: bool = False
    m0: int = 0
    lds: Array = field(default_factory=lambda: np.zeros((_PLANES, LANES), np.uint32))

    def address(self, lane: int) -> Address:
        index = None if self.index is None else int(self.index[lane])
        offset = None if self.offset is None else int(self.offset[lane])
        offsets = (self.instruction_offset, self.scalar_offset)
        return Address(self.resource, lane, *offsets, index, offset)

    def segment(self, base: int) -> Segment:
        resource = Resource(**{**self.resource.__dict__, "base": base})
        code = ["s_mov_b64 exec, s[40:41]", self.text, "s_waitcnt vmcnt(0)", "s_mov_b64 exec, -1"]
        inputs: dict[str, Array | int] = {
            "s[40:41]": self.active, "s[20:23]": resource.bits, "s24": self.scalar_offset,
            "m0": self.m0, f"{self.file}[8:15]": self.registers,
        }  # fmt: skip
        addresses = [a for a in (self.index, self.offset) if a is not None]
        for name, value in zip(("v2", "v3"), addresses, strict=False):
            inputs[name] = value.astype(np.uint32)
        outputs = [f"{self.file}[8:15]"]
        if self.to_lds:
            code = between_lds(code, inputs, self.lds)
            outputs.append("v[120:127]")
        return Segment("\n".join(code), inputs, outputs)

    def expected(self) -> tuple[Array, Array, Array]:
        """Registers, memory and LDS afterwards."""
        memory, registers = Bytes(self.content.tobytes()), self.registers.copy()
        lds = Bytes(self.lds.tobytes())
        pitch = 16 if vector_memory.access_bytes(self.operation) > 8 else 4
        for lane in range(LANES):
            if not self.active >> lane & 1:
                continue
            address = self.address(lane)
            operands = [int(x) for x in self.registers[_DATA - _POISON_BASE :, lane]]
            result = vector_memory.access(self.operation, memory, address.place, operands)
            if self.to_lds:
                at = self.m0 + self.instruction_offset + pitch * lane
                for k, value in enumerate(result):
                    lds.store(at + 4 * k, 4, value)
            elif self.returns:
                for k, value in enumerate(result):
                    registers[_DATA - _POISON_BASE + k, lane] = value
        planes = np.frombuffer(bytes(lds.content), np.uint32).reshape(_PLANES, LANES)
        return registers, np.frombuffer(bytes(memory.content), np.uint8), planes


def _check(emulator: Emulator, arch: str, cases: list[_Case]) -> None:
    arena = np.concatenate([case.content for case in cases])
    segments = [c.segment(arena.ctypes.data + _SLICE * i) for i, c in enumerate(cases)]
    results = run(emulator, arch, segments, memory=[arena], lds_bytes=4 * LANES * _PLANES)
    for i, (case, result) in enumerate(zip(cases, results, strict=True)):
        registers, memory, lds = case.expected()
        what = f"{case.text} exec={case.active:x} {case.resource} soffset={case.scalar_offset}"
        np.testing.assert_array_equal(result[f"{case.file}[8:15]"], registers, f"result of {what}")
        after = arena[_SLICE * i : _SLICE * (i + 1)]
        np.testing.assert_array_equal(after, memory, f"memory after {what}")
        if case.to_lds:
            np.testing.assert_array_equal(result["v[120:127]"], lds, f"LDS after {what}")


def _case(row: Definition, rng: np.random.Generator, kind: str, *, to_lds: bool = False) -> _Case:
    operation = _operation(row)
    size = vector_memory.access_bytes(operation)
    is_atomic = vector_memory.is_atomic(operation)
    content = words(operation, rng, _SLICE // 4).view(np.uint8)
    registers = in_lanes(operation, rng, _PLANES)
    # Lanes meet in atomics only: stores that meet have no order.
    slots = rng.integers(0, 16, LANES) if is_atomic else rng.permutation(LANES)
    instruction_offset, scalar_offset = 16 * int(rng.integers(0, 16)), 16 * int(rng.integers(0, 16))
    index: Array | None = None
    offset: Array | None = slots * size
    resource = Resource(0, records=int(rng.integers(0, 256)) * 4 + scalar_offset)
    if kind == "raw with cache swizzle":
        resource = Resource(0, stride=256, cache_swizzle=True, records=resource.records)
    elif kind.startswith("structured"):
        index, offset = slots, np.full(LANES, size * int(rng.integers(0, 2)))
        instruction_offset = 0
        stride = 32 if size > 4 else 8
        resource = Resource(
            0, stride, int(rng.integers(8, 64)), swizzle="swizzled" in kind, index_stride=1
        )
        if rng.integers(2):
            offset = None
    elif kind.startswith("private"):
        offset = 4 * rng.integers(0, 2, LANES)
        instruction_offset = 8
        resource = Resource(
            0, 64, 0, swizzle="swizzled" in kind, data_format=0, index_stride=3, add_thread_id=True
        )
        if "swizzled" not in kind:
            offset, instruction_offset = np.zeros(LANES, np.int64), 16
    elif rng.random() < 0.2 and not to_lds and not row.registers[0]:
        offset = None
    returns = bool(row.registers[1]) and (not is_atomic or bool(rng.integers(2)))
    count = max(row.registers[0], row.registers[1])
    file = str(rng.choice(["v", "a"]))
    data = f"{file}{_DATA}" if count == 1 else f"{file}[{_DATA}:{_DATA + count - 1}]"
    vgprs = (index is not None) + (offset is not None)
    text = row.mnemonic + ("" if to_lds else f" {data},")
    text += " " + ["off", "v2", "v[2:3]"][vgprs] + ", s[20:23], s24"
    text += " idxen" * (index is not None) + " offen" * (offset is not None)
    text += f" offset:{instruction_offset}" * bool(instruction_offset)
    text += " sc0" * (is_atomic and returns) + " lds" * to_lds
    return _Case(
        text, operation, resource, instruction_offset, scalar_offset, index, offset,
        int(rng.integers(0, 2**64, dtype=np.uint64)) if rng.integers(3) else _ALL,
        registers, content, file, returns=returns, to_lds=to_lds,
        m0=4 * int(rng.integers(0, 32)) if to_lds else 0,
        lds=rng.integers(0, 2**32, (_PLANES, LANES), dtype=np.uint32),
    )  # fmt: skip


def _kinds(row: Definition) -> list[str]:
    is_small = vector_memory.access_bytes(_operation(row)) <= 4
    return [kind for kind in _KINDS if "swizzled" not in kind or is_small]


def _rows(emulator: Emulator, arch: str) -> list[Definition]:
    rows = (d for d in emulator.definitions() if d.format == "MUBUF" and arch in d.chips)
    return [d for d in rows if "format" not in d.mnemonic and any(d.registers)]


def test_every_row(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    rows = _rows(emulator, arch)
    kinds = [(row, kind) for row in rows for kind in rng.permutation(_kinds(row))[:4]]
    _check(emulator, arch, [_case(row, rng, kind) for row, kind in kinds])


def test_loads_into_lds(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    names = ["ubyte", "sbyte", "ushort", "sshort", "dword"]
    names += ["dwordx3", "dwordx4"] if arch == "gfx950" else []
    rows = [d for d in _rows(emulator, arch) if d.mnemonic in {f"buffer_load_{n}" for n in names}]
    assert len(rows) == len(names)
    cases = [_case(row, rng, kind, to_lds=True) for row in rows for kind in _KINDS[:3] * 2]
    _check(emulator, arch, cases)


def test_loads_into_lds_arrive_when_waited_for(emulator, arch):
    memory = np.arange(1, 129, dtype=np.uint32)
    resource = Resource(memory.ctypes.data, records=512).bits
    code = """
        ds_write_b32 v1, v2
        ds_write_b32 v1, v2 offset:256
        s_waitcnt lgkmcnt(0)
        buffer_load_dword v1, s[20:23], 0 offen lds
        buffer_load_dword v1, s[20:23], 0 offen offset:256 lds
        s_nop 0
        ds_read_b32 v10, v1
        s_waitcnt vmcnt(1)
        ds_read_b32 v11, v1
        ds_read_b32 v12, v1 offset:256
        s_waitcnt vmcnt(0)
        ds_read_b32 v13, v1 offset:256
        s_waitcnt lgkmcnt(0)"""
    lanes = np.arange(LANES, dtype=np.uint32)
    inputs: dict[str, Array | int] = {"v1": 4 * lanes, "v2": lanes * 0, "s[20:23]": resource}
    inputs["m0"] = 0
    segment = Segment(code, inputs, ["v10", "v11", "v12", "v13"])
    result = run(emulator, arch, [segment], memory=[memory], lds_bytes=512)[0]
    np.testing.assert_array_equal(result["v10"], 0 * lanes)
    np.testing.assert_array_equal(result["v11"], memory[:64])
    np.testing.assert_array_equal(result["v12"], 0 * lanes)
    np.testing.assert_array_equal(result["v13"], memory[64:])


def test_cache_control(emulator, arch):
    run(emulator, arch, [Segment("buffer_wbl2 sc1\nbuffer_inv sc1")])


# ---- Data formats --------------------------------------------------------------------------------


def _format_content(rng: np.random.Generator) -> Array:
    """Random bytes without NaNs of 16 bits, whose payloads nobody documents."""
    halves = rng.integers(0, 2**16, _SLICE // 2, dtype=np.uint16)
    halves[(halves & 0x7C00) == 0x7C00] &= 0x83FF
    return halves.view(np.uint8)


def _format_text(mnemonic: str, data_format: int, number_format: int) -> str:
    components = len(mnemonic.rpartition("_")[2])
    registers = (components + 1) // 2 if "d16" in mnemonic else components
    text = f"{mnemonic} {'v10' if registers == 1 else f'v[10:{9 + registers}]'}"
    text += ", v2, s[20:23], s24"
    if mnemonic.startswith("t"):
        text += f" format:{data_format | number_format << 4}"
    return text + " offen offset:16"


@pytest.mark.parametrize("prefix", ["buffer", "tbuffer"])
def test_format_loads(emulator, arch, seed, prefix):
    rng = np.random.default_rng(seed)
    content = _format_content(rng)
    offsets = rng.permutation(LANES).astype(np.uint32) * 16
    segments, expected = [], []
    names = [f"{d16}{c}" for d16 in ("", "d16_") for c in ("x", "xy", "xyz", "xyzw")]
    for (data_format, bits), name in itertools.product(model.DATA_FORMATS.items(), names):
        for number_format in model.number_formats(data_format):
            halves = "d16" in name
            if halves and (bits[0] == 32 or number_format < 4):
                continue
            count = len(name.removeprefix("d16_"))
            x, y, z, w = (int(s) for s in rng.choice([0, 1, *range(4, 4 + len(bits))], 4))
            if prefix == "tbuffer":
                x, y, z, w = [*range(4, 4 + len(bits)), *[0] * (4 - len(bits))]
            resource = Resource(
                content.ctypes.data, records=700, select=(x, y, z, w),
                number_format=number_format, data_format=data_format,
            )  # fmt: skip
            registers = np.full((8, LANES), 0xABADCAFE, np.uint32)
            inputs: dict[str, Array | int] = {
                "s[20:23]": resource.bits, "s24": 32, "v2": offsets, "v[8:15]": registers,
            }  # fmt: skip
            text = _format_text(f"{prefix}_load_format_{name}", data_format, number_format)
            segments.append(Segment(text, inputs, ["v[8:15]"]))
            want = registers.copy()
            for lane in range(LANES):
                address = Address(resource, lane, 16, 32, None, int(offsets[lane]))
                at = address.place(0, sum(bits) // 8)
                raw = b"" if at is None else content[at : at + 16].tobytes()
                components = [0] * 4
                if raw:
                    components = model.from_format(data_format, number_format, raw)
                is_integer = number_format in (model.UINT, model.SINT)
                one = 1 if is_integer else 0x3F800000
                values = model.selected(components, (x, y, z, w), one, count)
                if halves:
                    to_half = (lambda v: v & 0xFFFF) if is_integer else _half_of
                    words = [to_half(v) for v in values] + [0]
                    values = [words[i] | words[i + 1] << 16 for i in range(0, count, 2)]
                for k, value in enumerate(values):
                    want[2 + k, lane] = value
            expected.append(want)
    results = run(emulator, arch, segments, memory=[content])
    for segment, want, result in zip(segments, expected, results, strict=True):
        np.testing.assert_array_equal(result["v[8:15]"], want, segment.code)


def _half_of(bits: int) -> int:
    return int(np.array([bits], np.uint32).view(np.float32).astype(np.float16).view(np.uint16)[0])


@pytest.mark.parametrize("prefix", ["buffer", "tbuffer"])
def test_format_stores_give_back_what_was_loaded(emulator, arch, seed, prefix):
    rng = np.random.default_rng(seed)
    content = _format_content(rng)[:1024]
    offsets = np.arange(LANES, dtype=np.uint32) * 16
    segments, stored = [], []
    for data_format, bits in model.DATA_FORMATS.items():
        for number_format, halves in itertools.product((4, 5, 7), ("", "d16_")):
            if number_format not in model.number_formats(data_format) or (halves and bits[0] == 32):
                continue
            target = np.zeros(1024, np.uint8)
            stored.append((data_format, target))
            fields = {"records": 1024, "number_format": number_format, "data_format": data_format}
            name = f"{halves}{'xyzw'[: len(bits)]}"
            lines = [
                _format_text(f"{prefix}_load_format_{name}", data_format, number_format),
                "s_waitcnt vmcnt(0)",
                _format_text(f"{prefix}_store_format_{name}", data_format, number_format)
                .replace("s[20:23]", "s[28:31]"),
            ]  # fmt: skip
            inputs: dict[str, Array | int] = {
                "s[20:23]": Resource(content.ctypes.data, **fields).bits,
                "s[28:31]": Resource(target.ctypes.data, **fields).bits,
                "s24": 0, "v2": offsets,
            }  # fmt: skip
            segments.append(Segment("\n".join(lines), inputs))
    run(emulator, arch, segments, memory=[content, *(target for _, target in stored)])
    for (data_format, target), segment in zip(stored, segments, strict=True):
        size = sum(model.DATA_FORMATS[data_format]) // 8
        want = np.zeros(1024 + 16, np.uint8)
        for lane in range(LANES - 1):
            at = 16 + 16 * lane
            want[at : at + size] = content[at : at + size]
        np.testing.assert_array_equal(target, want[:1024], segment.code)


def test_high_half_formats(emulator, arch):
    memory = np.arange(64, dtype=np.uint16)
    resource = Resource(
        memory.ctypes.data, records=128, number_format=model.UINT, data_format=2
    ).bits
    lanes = np.arange(LANES, dtype=np.uint32)
    code = """buffer_load_format_d16_hi_x v10, v2, s[20:23], 0 offen
        v_add_u32 v11, v10, v3
        buffer_store_format_d16_hi_x v11, v2, s[20:23], 0 offen"""
    inputs: dict[str, Array | int] = {
        "v2": 2 * lanes, "v3": 0 * lanes + 0x70000, "s[20:23]": resource,
    }  # fmt: skip
    result = run(emulator, arch, [Segment(code, inputs, ["v10"])], memory=[memory])[0]
    np.testing.assert_array_equal(result["v10"], lanes << 16)
    np.testing.assert_array_equal(memory, lanes + 7)


# ---- What faults ---------------------------------------------------------------------------------


_SWIZZLED = Resource(0, 16, 4, swizzle=True)
_LARGE = Resource(0, records=2**31)
_SMALL = Resource(0, records=64)
_ODD_FORMAT = Resource(0, records=64, data_format=8)


@pytest.mark.parametrize(
    ("resource", "code", "message"),
    [
        (_SMALL, "buffer_load_dword v5, v2, s[20:23], 0 idxen", "not documented"),
        (_SWIZZLED, "buffer_load_dword v5, v2, s[20:23], 0 offen", "not documented"),
        (_SWIZZLED, "buffer_load_dwordx2 v[6:7], v2, s[20:23], 0 idxen", "within one element"),
        (_SMALL, "buffer_atomic_add v5, v2, s[20:23], 0 offen offset:2", "not a multiple of 4"),
        (_SMALL, "buffer_load_dword v2, s[20:23], 0 offen lds", "m0 is 0x2"),
        (_ODD_FORMAT, "buffer_load_format_x v5, v2, s[20:23], 0 offen", "format 8"),
        (_LARGE, "buffer_load_dword v5, v2, s[20:23], s24 offen", "lane 0: load of 4 bytes at 0x"),
    ],
)
def test_faults(emulator, resource, code, message):
    memory = np.zeros(64, np.uint8)
    bits = Resource(**{**resource.__dict__, "base": memory.ctypes.data}).bits
    inputs: dict[str, Array | int] = {
        "s[20:23]": bits, "s24": 1 << 20, "v2": np.zeros(64, np.uint32), "m0": 2,
    }  # fmt: skip
    where = f"`{code.split()[0]}.*workgroup .*wave 0.*{message}"
    with pytest.raises(EmulatorError, match=where):
        run(emulator, "gfx950", [Segment(code, inputs)], memory=[memory], lds_bytes=512)
