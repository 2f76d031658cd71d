"""Every buffer instruction against its model: raw, structured, swizzled and private buffers, loads
into LDS, atomics and data formats.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from memory_cases import SLICE, MemoryCase, check, draw_memory
from models import mubuf as model
from models import vector_memory
from models.mubuf import Address, Resource
from programs import LANES, Array, Segment, register_name, run

from jitfmha.emulator import Definition, Emulator, EmulatorError

_KINDS = ("raw", "raw with cache swizzle", "structured")
_KINDS += ("structured swizzled", "private", "private swizzled")


def _operation(row: Definition) -> str:
    return row.mnemonic.removeprefix("buffer_")


@dataclass
class _Buffer(MemoryCase):
    resource: Resource
    scalar_offset: int
    index: Array | None
    offset: Array | None

    @property
    def details(self) -> str:
        return f"{self.resource} soffset={self.scalar_offset}"

    def addresses(self, base: int) -> dict[str, Array | int]:
        resource = replace(self.resource, base=base)
        vgprs = [each.astype(np.uint32) for each in (self.index, self.offset) if each is not None]
        scalars = {"s[20:23]": resource.bits, "s24": self.scalar_offset}
        return scalars | dict(zip(("v2", "v3"), vgprs, strict=False))

    def place(self, lane: int) -> tuple[str, vector_memory.Places]:
        index, offset = (None if x is None else int(x[lane]) for x in (self.index, self.offset))
        offsets = (self.instruction_offset, self.scalar_offset)
        return "g", Address(self.resource, lane, *offsets, index, offset).place


def _case(
    row: Definition, rng: np.random.Generator, kind: str, *, to_lds: bool = False
) -> MemoryCase:
    operation = _operation(row)
    size = vector_memory.access_bytes(operation)
    is_atomic = vector_memory.is_atomic(operation)
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
    file = str(rng.choice(["v", "a"]))
    data = register_name(file, 10, max(row.registers[:2]))
    vgprs = (index is not None) + (offset is not None)
    text = row.mnemonic + ("" if to_lds else f" {data},")
    text += " " + ["off", "v2", "v[2:3]"][vgprs] + ", s[20:23], s24"
    text += " idxen" * (index is not None) + " offen" * (offset is not None)
    text += f" offset:{instruction_offset}" * bool(instruction_offset)
    return _Buffer(
        **draw_memory(operation, rng),
        text=text + " sc0" * (is_atomic and returns) + " lds" * to_lds,
        file=file,
        returns=returns,
        to_lds=to_lds,
        instruction_offset=instruction_offset,
        resource=resource,
        scalar_offset=scalar_offset,
        index=index,
        offset=offset,
    )


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
    check(emulator, arch, [_case(row, rng, kind) for row, kind in kinds])


def test_loads_into_lds(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    names = ["ubyte", "sbyte", "ushort", "sshort", "dword"]
    names += ["dwordx3", "dwordx4"] if arch == "gfx950" else []
    rows = [d for d in _rows(emulator, arch) if d.mnemonic in {f"buffer_load_{n}" for n in names}]
    assert len(rows) == len(names)
    cases = [_case(row, rng, kind, to_lds=True) for row in rows for kind in _KINDS[:3] * 2]
    check(emulator, arch, cases)


def test_cache_control(emulator, arch):
    run(emulator, arch, [Segment("buffer_wbl2 sc1\nbuffer_inv sc1")])


# ---- Data formats --------------------------------------------------------------------------------


def _format_content(rng: np.random.Generator) -> Array:
    """Random bytes without NaNs of 16 bits, whose payloads nobody documents."""
    halves = rng.integers(0, 2**16, SLICE // 2, dtype=np.uint16)
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
    bits = replace(resource, base=memory.ctypes.data).bits
    inputs: dict[str, Array | int] = {
        "s[20:23]": bits, "s24": 1 << 20, "v2": np.zeros(64, np.uint32), "m0": 2,
    }  # fmt: skip
    where = f"`{code.split()[0]}.*workgroup .*wave 0.*{message}"
    with pytest.raises(EmulatorError, match=where):
        run(emulator, "gfx950", [Segment(code, inputs)], memory=[memory], lds_bytes=512)
