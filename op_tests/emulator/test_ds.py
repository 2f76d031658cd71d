"""Every LDS instruction against its model, on random and on edge values."""

import re

import numpy as np
import pytest
from models import ds as model
from models.atomics import Bytes, Denormals, interesting
from programs import DEFAULT_MODE, LANES, Array, Segment, register_name, run

from jitfmha.emulator import Definition, Emulator, EmulatorError

_PLANES = 8
_REGION = 4 * LANES * _PLANES  # bytes of LDS that a segment fills, and reads again
_FLUSH_32, _FLUSH_16 = DEFAULT_MODE & ~0x30, DEFAULT_MODE & ~0xC0
_ALL = 2**64 - 1
_WITHOUT_ADDRESS = ("ds_append", "ds_consume", "ds_nop")
_WITHOUT_ADDRESS += ("ds_write_addtid_b32", "ds_read_addtid_b32")
_TWO_ADDRESSES = ("ds_read2", "ds_write2", "ds_wrxchg2")


def _access_bytes(name: str) -> int:
    """Bytes at one address."""
    if model.is_atomic(name):
        return 8 if model.atomic_of(name)[2] == 64 else 4
    found = re.search(r"_[bui](\d+)", name)
    return int(found[1]) // 8 if found else 4


def _rows(emulator: Emulator, arch: str) -> list[Definition]:
    rows = [d for d in emulator.definitions() if d.format == "DS" and arch in d.chips]
    return [d for d in rows if not d.mnemonic.startswith("ds_gws")]


class _Case:
    """One row on random operands."""

    def __init__(self, row: Definition, rng: np.random.Generator, edges: bool) -> None:
        self.row = row
        name = row.mnemonic
        size = _access_bytes(name)
        self.mode = int(rng.choice([DEFAULT_MODE, _FLUSH_32, _FLUSH_16]))
        self.m0 = 4 * int(rng.integers(0, 64)) if "addtid" in name else 0
        self.active = int(rng.integers(0, 2**64, dtype=np.uint64))
        if edges or "_tr_" in name:
            self.active = _ALL
        self.content = rng.integers(0, 2**32, (_PLANES, LANES), dtype=np.uint32)
        self.data = rng.integers(0, 2**32, (8, LANES), dtype=np.uint32)
        if model.is_atomic(name):
            self._make_operands_interesting(rng, edges)
        if name.startswith(_TWO_ADDRESSES):
            # The second place is never another lane's first one: lanes take every fourth slot.
            first, second = rng.permutation(4 if "st64" not in name else 2)[:2]
            self.offset = int(first) | int(second) << 8
            self.text = f"offset0:{first} offset1:{second}"
        else:
            self.offset = int(rng.integers(0, 16)) * size
            if name in ("ds_swizzle_b32", "ds_bpermute_b32", "ds_permute_b32"):
                self.offset = int(rng.integers(0, 2**16))
            elif name == "ds_nop":
                self.offset = 0
            self.text = f"offset:{self.offset}" if self.offset else ""
        self.address = self._addresses(rng, size)
        self.file = str(rng.choice(["v", "a"]))

    def segment(self) -> Segment:
        """Fills the region, runs the instruction under `active`, and reads the region again."""
        data0, data1, result = self.row.registers
        operands = [register_name(self.file, 40, result)] if result else []
        operands += [] if self.row.mnemonic in _WITHOUT_ADDRESS else ["v1"]
        operands += [register_name(self.file, 10, data0)] if data0 else []
        operands += [register_name(self.file, 20, data1)] if data1 else []
        fill = [f"ds_write_b32 v2, v{100 + i} offset:{256 * i}" for i in range(_PLANES)]
        read = [f"ds_read_b32 v{120 + i}, v2 offset:{256 * i}" for i in range(_PLANES)]
        wait = "s_waitcnt lgkmcnt(0)"
        code = [
            *fill, wait, "s_mov_b64 exec, s[40:41]",
            f"{self.row.mnemonic} {', '.join(operands)} {self.text}",
            wait, "s_mov_b64 exec, -1", *read, wait,
        ]  # fmt: skip
        inputs: dict[str, Array | int] = {
            "v1": self.address, "v2": np.arange(LANES, dtype=np.uint32) * 4,
            "s[40:41]": self.active, "v[100:107]": self.content, "m0": self.m0, "mode": self.mode,
            # Registers around the result must keep what they have.
            self.around: np.full((6, LANES), 0xABADCAFE, np.uint32),
        }  # fmt: skip
        if data0:
            inputs[register_name(self.file, 10, data0)] = self.data[:data0]
        if data1:
            inputs[register_name(self.file, 20, data1)] = self.data[data0 : data0 + data1]
        return Segment("\n".join(code), inputs, ["v[120:127]", self.around])

    @property
    def around(self) -> str:
        """The result's registers and those beside them."""
        return register_name(self.file, 39, 6)

    def expected(self, lds_bytes: int) -> tuple[Array, Array]:
        """LDS and the result's registers afterwards."""
        data0, data1, _ = self.row.registers
        columns = self.data.T.tolist()
        lanes = [
            model.Lane(int(address), column[:data0], column[data0 : data0 + data1])
            for address, column in zip(self.address, columns, strict=True)
        ]
        memory = Bytes(self.content.tobytes() + bytes(lds_bytes - self.content.nbytes))
        wave = model.Wave(memory, lanes, self.offset, self.active, self.m0)
        wave.denormals32 = Denormals(bool(self.mode & 0x10), bool(self.mode & 0x20))
        wave.denormals16 = Denormals(bool(self.mode & 0x40), bool(self.mode & 0x80))
        registers = np.full((6, LANES), 0xABADCAFE, np.uint32)
        for i, values in enumerate(model.execute(self.row.mnemonic, wave)):
            for k, value in enumerate(values or ()):
                registers[1 + k, i] = value
        region = np.frombuffer(bytes(memory.content[: self.content.nbytes]), np.uint32)
        return region.reshape(_PLANES, LANES), registers

    def _make_operands_interesting(self, rng: np.random.Generator, edges: bool) -> None:
        operation, kind, bits = model.atomic_of(self.row.mnemonic)
        width = 64 if bits == 64 else 32
        values = np.array(interesting(kind, bits), np.uint64)
        few = rng.choice(values, 8192)
        if not edges:
            few = np.where(
                rng.random(8192) < 0.5, few, rng.integers(0, 2**width, 8192, dtype=np.uint64)
            )
        if operation in ("cmpst", "wrap"):
            few = rng.choice(values[:4], 8192)
        words = few.astype(np.uint32) if width == 32 else few.view(np.uint32)
        self.content = words[: _PLANES * LANES].reshape(_PLANES, LANES).copy()
        dwords = width // 32
        for k in range(8 // dwords):
            column = few[1024 + LANES * k : 1024 + LANES * (k + 1)]
            for part in range(dwords):
                self.data[k * dwords + part] = (column >> np.uint64(32 * part)).astype(np.uint32)

    def _addresses(self, rng: np.random.Generator, size: int) -> Array:
        name = self.row.mnemonic
        if name in ("ds_swizzle_b32", "ds_bpermute_b32", "ds_permute_b32"):
            return rng.integers(0, 2**32, LANES, dtype=np.uint32)
        if "_tr_" in name:
            unit = 8 if size == 8 else 4
            return (rng.integers(0, 1024 // unit, LANES) * unit).astype(np.uint32)
        slots = rng.permutation(LANES)
        if model.is_atomic(name) and not name.startswith(_TWO_ADDRESSES):
            slots = rng.integers(0, 8, LANES)  # atomics may meet; stores that meet have no order
        elif name.startswith(_TWO_ADDRESSES) and "st64" not in name:
            slots *= 4
        address = slots * size
        # Some lanes are far outside: they read 0 and write nothing.
        far = rng.random(LANES) < 0.1
        return np.where(far, 0x40000000 + address, address).astype(np.uint32)


def _check(emulator: Emulator, arch: str, cases: list[_Case], lds_bytes: int) -> None:
    results = run(emulator, arch, [case.segment() for case in cases], lds_bytes=lds_bytes)
    for case, result in zip(cases, results, strict=True):
        region, registers = case.expected(lds_bytes)
        what = f"{case.row.mnemonic} {case.text} exec={case.active:x} mode={case.mode:x}"
        np.testing.assert_array_equal(result[case.around], registers, f"result of {what}")
        np.testing.assert_array_equal(result["v[120:127]"], region, f"LDS after {what}")


@pytest.mark.parametrize("edges", [False, True], ids=["random", "edges"])
def test_every_row(emulator, arch, seed, edges):
    rng = np.random.default_rng(seed)
    cases = [_Case(row, rng, edges) for row in _rows(emulator, arch) for _ in range(2)]
    _check(emulator, arch, cases, 16384)


@pytest.mark.parametrize(
    "code",
    [
        "ds_gws_init v0 gds", "ds_gws_barrier v0 offset:4 gds", "ds_gws_sema_br v0 gds",
        "ds_gws_sema_p gds", "ds_gws_sema_v gds", "ds_gws_sema_release_all gds",
    ],
)  # fmt: skip
def test_global_wave_synchronization_is_an_error(emulator, arch, code):
    with pytest.raises(EmulatorError, match=f"{code.split()[0]}.*does not emulate"):
        run(emulator, arch, [Segment(code, {"v0": np.zeros(LANES, np.uint32)})])


def test_swizzle_modes(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    row = next(r for r in _rows(emulator, arch) if r.mnemonic == "ds_swizzle_b32")
    offsets = [0xE000, 0xE010, 0xE01F, 0xC020, 0xC420, 0xC021, 0xC421]
    offsets += [0x801B, 0x401F, 0x001F, 0x7FFF]
    offsets += [int(x) for x in rng.integers(0, 2**16, 40)]
    cases = []
    for offset in offsets:
        case = _Case(row, rng, bool(rng.integers(2)))
        case.offset, case.text = offset, f"offset:{offset}"
        cases.append(case)
    _check(emulator, arch, cases, _REGION)


def test_swizzle_examples_of_the_isa_document():
    fft = [1, 0x11, 9, 0x19, 5, 0x15, 0xD, 0x1D, 3, 0x13, 0xB, 0x1B, 7, 0x17, 0xF, 0x1F]
    assert [model.swizzle_lane(0xE000, i) + 1 for i in range(16)] == fft
    assert [model.swizzle_lane(0xE010, i) + 1 for i in range(4)] == [1, 9, 5, 0xD]
    assert [model.swizzle_lane(0xC020, i) + 1 for i in (0, 1, 31)] == [2, 3, 1]
    assert [model.swizzle_lane(0xC420, i) + 1 for i in (0, 1, 31)] == [0x20, 1, 0x1F]
    assert [model.swizzle_lane(0xC021, i) + 1 for i in (0, 1, 2, 31)] == [1, 4, 3, 2]
    assert [model.swizzle_lane(0xC421, i) + 1 for i in (0, 1, 2, 3)] == [0x1F, 2, 1, 4]


@pytest.mark.parametrize(
    ("code", "inputs", "message"),
    [
        ("ds_write2_b32 v1, v2, v3 offset0:1 offset1:1", {}, "two writes to one address"),
        ("ds_add_u32 v1, v2", {"v1": np.full(64, 2, np.uint32)}, "not a multiple of 4"),
        ("ds_append v1", {"m0": 16}, "m0 is 0x10"),
        ("ds_read_b64 v[2:3], v1", {"v1": np.full(64, 8188, np.uint32)}, "across the end"),
    ],
)
def test_what_is_not_documented_faults(emulator, code, inputs, message):
    where = rf"kernel program, at .*`{code.split()[0]}.*wave 0.*{message}"
    with pytest.raises(EmulatorError, match=where):
        run(emulator, "gfx942", [Segment(code, inputs)], lds_bytes=8192)


def test_transposing_loads_need_all_lanes(emulator):
    inputs: dict[str, Array | int] = {"v1": np.zeros(64, np.uint32), "exec": 1}
    with pytest.raises(EmulatorError, match="all lanes active"):
        run(emulator, "gfx950", [Segment("ds_read_b64_tr_b16 v[2:3], v1", inputs)], lds_bytes=1024)
