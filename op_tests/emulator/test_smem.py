"""SMEM: scalar loads, stores and atomics in all forms of their offset, and buffers' bounds."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from models.atomics import Denormals, atomic, interesting
from programs import Segment, register_name, run

from jitfmha.emulator import Emulator, EmulatorError

_SIZES = (1, 2, 4, 8, 16)


def _data(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, 256, dtype=np.uint32)


def _name(kind: str, dwords: int) -> str:
    return f"s_{kind}_dword" + ("" if dwords == 1 else f"x{dwords}")


def _registers(dwords: int) -> str:
    return register_name("s", 16, dwords)


def _dwords(value: np.ndarray, count: int) -> list[int]:
    """The first wave's registers, whatever type the harness gave them."""
    if count == 2:
        return [int(value[0]) & 0xFFFFFFFF, int(value[0]) >> 32]
    return [int(value[0])] if count == 1 else [int(x[0]) for x in value]


def _loaded(
    emulator: Emulator, arch: str, data: np.ndarray, inputs: dict[str, int], *cases: tuple[str, int]
) -> Iterator[tuple[str, int, list[int]]]:
    """(code, dwords) with what is then in the registers from s16 on."""
    segments = [Segment(code, inputs, [_registers(dwords)]) for code, dwords in cases]
    results = run(emulator, arch, segments, memory=[data])
    for (code, dwords), result in zip(cases, results, strict=True):
        yield code, dwords, _dwords(result[_registers(dwords)], dwords)


def test_loads(emulator, arch, seed):
    data = _data(seed)
    # Offset, and the dword that it leads to from the middle of the data.
    offsets = {"0x0": 64, "0x40": 80, "-0x20": 56, "s6": 70, "s6 offset:0x10": 74}
    # The low bits of the address do not count.
    offsets["0x5"] = 65
    first = {
        f"{_name('load', dwords)} {_registers(dwords)}, s[4:5], {offset}": (dwords, place)
        for dwords in _SIZES
        for offset, place in offsets.items()
    }
    # imm = 0, soffset_en = 0: the register is named in the low bits of the offset field.
    first[".long 0xc0000402, 0x00000006"] = (1, 70)  # s_load_dword s16, s[4:5], s6
    cases = [(code, dwords) for code, (dwords, _) in first.items()]
    inputs = {"s[4:5]": data.ctypes.data + 4 * 64, "s6": 24}
    for code, dwords, actual in _loaded(emulator, arch, data, inputs, *cases):
        place = first[code][1]
        assert actual == data[place : place + dwords].tolist(), code


@pytest.mark.parametrize(("stride", "records"), [(0, 100), (12, 8)])
def test_buffer_loads(emulator, arch, seed, stride, records):
    data = _data(seed)
    resource = data.ctypes.data | stride << 48 | records << 64
    size = stride * records if stride else records
    for offset in (0, 36, 84, 96, 100, 4000):
        cases = [
            (f"{_name('buffer_load', dwords)} {_registers(dwords)}, s[8:11], 0x{offset:x}", dwords)
            for dwords in _SIZES
        ]
        for code, dwords, actual in _loaded(emulator, arch, data, {"s[8:11]": resource}, *cases):
            places = range(offset, offset + 4 * dwords, 4)
            assert actual == [int(data[a // 4]) if a + 4 <= size else 0 for a in places], code


def test_time_passes(emulator, arch):
    code = "s_memtime s[4:5]\ns_nop 0\ns_memtime s[6:7]\ns_memrealtime s[8:9]\n"
    code += "s_waitcnt lgkmcnt(0)\ns_dcache_inv"
    (result,) = run(emulator, arch, [Segment(code, {}, ["s[4:5]", "s[6:7]"])])
    assert int(result["s[4:5]"][0]) < int(result["s[6:7]"][0])


def test_stores(emulator, arch):
    """1, 2, ... each into 64 dwords of its own; what lies beyond a buffer is not stored."""
    stores = []  # code, dwords, first byte, stride and records of the buffer
    for dwords in (1, 2, 4):
        data = _registers(dwords)
        for offset, first in {"0x14": 20, "s6": 9, "s6 offset:0x10": 25}.items():
            code = f"{_name('store', dwords)} {data}, s[4:5], {offset}"
            stores.append((code, dwords, first, 0, 256))
        for first, buffer in itertools.product((0, 12, 16, 20, 24, 4000), ((0, 22), (12, 2))):
            code = f"{_name('buffer_store', dwords)} {data}, s[8:11], 0x{first:x}"
            stores.append((code, dwords, first, *buffer))
    memory = np.zeros((len(stores), 64), np.uint32)
    expected, segments = memory.copy(), []
    for (code, dwords, first, stride, records), own, after in zip(
        stores, memory, expected, strict=True
    ):
        base, values = own.ctypes.data, np.arange(1, dwords + 1)
        inputs = {"s[4:5]": base, "s[8:11]": base | stride << 48 | records << 64, "s6": 9}
        inputs[_registers(dwords)] = sum(int(x) << 32 * i for i, x in enumerate(values))
        segments.append(Segment(code, inputs))
        places = first // 4 + values - 1  # the low bits do not count
        within = 4 * places + 4 <= records * (stride or 1)
        after[places[within]] = values[within]
    run(emulator, arch, segments, memory=[memory])
    for (code, *_), own, after in zip(stores, memory, expected, strict=True):
        np.testing.assert_array_equal(own, after, err_msg=code)


_ATOMICS = {
    "swap": ("swap", "u"), "cmpswap": ("cmpswap", "u"), "add": ("add", "u"), "sub": ("sub", "u"),
    "smin": ("min", "i"), "umin": ("min", "u"), "smax": ("max", "i"), "umax": ("max", "u"),
    "and": ("and", "b"), "or": ("or", "b"), "xor": ("xor", "b"), "inc": ("inc", "u"),
    "dec": ("dec", "u"),
}  # fmt: skip


@pytest.mark.parametrize("segment", ["atomic", "buffer_atomic"])
def test_atomics(emulator, arch, seed, segment):
    rng = random.Random(seed)
    memory = np.zeros(256, np.uint64)
    cases = []
    for name, (operation, kind) in _ATOMICS.items():
        for bits in (32, 64):
            values = [*interesting(kind, bits), rng.getrandbits(bits), rng.getrandbits(bits)]
            for returns in (False, True):
                content, *data = (rng.choice(values) for _ in range(3))
                data = data[: 2 if name == "cmpswap" else 1]
                if name == "cmpswap" and rng.randrange(2):
                    data[1] = content
                cases.append((name, operation, kind, bits, returns, content, data))
    segments = []
    for i, (name, _, _, bits, returns, content, data) in enumerate(cases):
        memory[i] = content | 0xABCD << 32 if bits == 32 else content
        dwords = len(data) * bits // 32
        packed = sum(x << bits * k for k, x in enumerate(data))
        base = "s[8:11]" if segment == "buffer_atomic" else "s[8:9]"
        code = f"s_{segment}_{name}{'_x2' if bits == 64 else ''} {_registers(dwords)}, {base}, "
        code += f"0x{8 * i:x}{' glc' if returns else ''}"
        resource = memory.ctypes.data | (memory.nbytes << 64 if segment == "buffer_atomic" else 0)
        result = _registers(bits // 32)
        segments.append(Segment(code, {base: resource, _registers(dwords): packed}, [result]))
    results = run(emulator, arch, segments, memory=[memory])
    for i, (case, result) in enumerate(zip(cases, results, strict=True)):
        name, operation, kind, bits, returns, content, data = case
        expected = atomic(operation, kind, bits, content, data, Denormals())
        if bits == 32:
            assert int(memory[i]) >> 32 == 0xABCD, name
        assert int(memory[i]) & ((1 << bits) - 1) == expected, (name, content, data)
        (register,) = result.values()
        low = (1 << bits) - 1
        assert int(register[0]) & low == (content if returns else data[0]), (name, returns)


def test_atomics_beyond_a_buffer(emulator, arch):
    memory = np.full(8, 7, np.uint32)
    resource = memory.ctypes.data | 16 << 64
    code = "s_buffer_atomic_add s16, s[8:11], 0x10 glc"
    inputs = {"s[8:11]": resource, "s16": 5}
    (result,) = run(emulator, arch, [Segment(code, inputs, ["s16"])], memory=[memory])
    assert int(result["s16"][0]) == 0
    np.testing.assert_array_equal(memory, 7)


def test_atomics_need_aligned_addresses(emulator, arch):
    memory = np.zeros(4, np.uint64)
    code = "s_atomic_add_x2 s[16:17], s[4:5], 0x4"
    inputs = {"s[4:5]": memory.ctypes.data, "s[16:17]": 1}
    with pytest.raises(EmulatorError, match="multiple of 8 bytes"):
        run(emulator, arch, [Segment(code, inputs)], memory=[memory])


def test_hints_change_nothing(emulator, arch):
    memory = np.arange(8, dtype=np.uint32)
    code = "s_atc_probe 1, s[4:5], 0x0\ns_atc_probe_buffer 2, s[8:11], 0x4\n"
    code += "s_dcache_discard s[4:5], 0x0\ns_dcache_discard_x2 s[4:5], s6\n"
    code += "s_dcache_wb\ns_dcache_wb_vol\ns_dcache_inv_vol\ns_load_dword s16, s[4:5], 0x8"
    inputs = {"s[4:5]": memory.ctypes.data, "s6": 4, "s[8:11]": memory.ctypes.data | 32 << 64}
    (result,) = run(emulator, arch, [Segment(code, inputs, ["s16"])], memory=[memory])
    assert int(result["s16"][0]) == 2
    np.testing.assert_array_equal(memory, np.arange(8))


@pytest.mark.parametrize(
    "code", ["s_scratch_load_dword s16, s[4:5], 0x0", "s_scratch_store_dwordx2 s[16:17], s[4:5], 0"]
)
def test_what_is_not_emulated_is_an_error(emulator, arch, code):
    with pytest.raises(EmulatorError, match=f"{code.split()[0]}.*does not emulate"):
        run(emulator, arch, [Segment(code, {"s[4:5]": 0})])


def test_every_row_is_tested(emulator):
    text = Path(__file__).read_text(encoding="utf-8")
    atomics = {
        f"s_{kind}_{name}{x}"
        for kind in ("atomic", "buffer_atomic")
        for name in _ATOMICS
        for x in ("", "_x2")
    }
    kinds = [f"{of}{way}" for of in ("", "buffer_", "scratch_") for way in ("load", "store")]
    sized = {_name(kind, dwords) for kind in kinds for dwords in _SIZES}
    rows = {row.mnemonic for row in emulator.definitions() if row.format == "SMEM"}
    assert not {name for name in rows - atomics - sized if name not in text}
