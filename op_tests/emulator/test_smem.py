"""SMEM: scalar loads in all forms of their offset, and buffers' bounds."""

from __future__ import annotations

import numpy as np
import pytest
from programs import Segment, run

from jitfmha.emulator import Emulator, EmulatorError

_SIZES = (1, 2, 4, 8, 16)


def _data(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, 256, dtype=np.uint32)


def _name(kind: str, dwords: int) -> str:
    return f"s_{kind}_dword" + ("" if dwords == 1 else f"x{dwords}")


def _destination(dwords: int) -> str:
    return "s16" if dwords == 1 else f"s[16:{15 + dwords}]"


def _dwords(value: np.ndarray, count: int) -> list[int]:
    """The first wave's registers, whatever type the harness gave them."""
    if count == 2:
        return [int(value[0]) & 0xFFFFFFFF, int(value[0]) >> 32]
    return [int(value[0])] if count == 1 else [int(x[0]) for x in value]


def test_loads(emulator: Emulator, arch: str, seed: int) -> None:
    data = _data(seed)
    cases = []
    for dwords in _SIZES:
        code = f"{_name('load', dwords)} {_destination(dwords)}, s[4:5], "
        cases += [(code + text, dwords, first) for text, first in (
            ("0x0", 64), ("0x40", 80), ("-0x20", 56), ("s6", 70), ("s6 offset:0x10", 74)
        )]  # fmt: skip
    middle = data.ctypes.data + 4 * 64
    segments = [
        Segment(code, {"s[4:5]": middle, "s6": 24}, [_destination(dwords)])
        for code, dwords, _ in cases
    ]
    results = run(emulator, arch, segments, memory=[data])
    for (code, dwords, first), result in zip(cases, results, strict=True):
        actual = _dwords(result[_destination(dwords)], dwords)
        assert actual == data[first : first + dwords].tolist(), code


def test_offset_register_in_the_offset_field(emulator: Emulator, arch: str, seed: int) -> None:
    """imm = 0, soffset_en = 0: the register is named in the low bits of the offset field."""
    data = _data(seed)
    code = ".long 0xc0000402, 0x00000006"  # s_load_dword s16, s[4:5], s6
    (result,) = run(
        emulator,
        arch,
        [Segment(code, {"s[4:5]": data.ctypes.data, "s6": 40}, ["s16"])],
        memory=[data],
    )
    assert int(result["s16"][0]) == data[10]


def test_low_bits_of_the_address_do_not_count(emulator: Emulator, arch: str, seed: int) -> None:
    data = _data(seed)
    code = "s_load_dwordx2 s[16:17], s[4:5], 0x5"
    (result,) = run(
        emulator, arch, [Segment(code, {"s[4:5]": data.ctypes.data}, ["s[16:17]"])], memory=[data]
    )
    assert _dwords(result["s[16:17]"], 2) == data[1:3].tolist()


@pytest.mark.parametrize(("stride", "records"), [(0, 100), (12, 8)])
def test_buffer_loads(emulator: Emulator, arch: str, seed: int, stride: int, records: int) -> None:
    data = _data(seed)
    resource = data.ctypes.data | stride << 48 | records << 64
    size = stride * records if stride else records
    cases = [
        (f"{_name('buffer_load', dwords)} {_destination(dwords)}, s[8:11], 0x{x:x}", dwords, x)
        for dwords in _SIZES
        for x in (0, 36, 84, 96, 100, 4000)
    ]
    segments = [
        Segment(code, {"s[8:11]": resource}, [_destination(dwords)]) for code, dwords, _ in cases
    ]
    results = run(emulator, arch, segments, memory=[data])
    for (code, dwords, offset), result in zip(cases, results, strict=True):
        addresses = range(offset, offset + 4 * dwords, 4)
        expected = [int(data[a // 4]) if a + 4 <= size else 0 for a in addresses]
        assert _dwords(result[_destination(dwords)], dwords) == expected, code


def test_time_passes(emulator: Emulator, arch: str) -> None:
    code = "s_memtime s[4:5]\ns_nop 0\ns_memtime s[6:7]\ns_memrealtime s[8:9]\n"
    code += "s_waitcnt lgkmcnt(0)\ns_dcache_inv"
    (result,) = run(emulator, arch, [Segment(code, {}, ["s[4:5]", "s[6:7]"])])
    assert int(result["s[4:5]"][0]) < int(result["s[6:7]"][0])


@pytest.mark.parametrize(
    "code", ["s_store_dword s16, s[4:5], 0x0", "s_atomic_add s16, s[4:5], 0x0"]
)
def test_scalar_stores_do_not_exist(emulator: Emulator, arch: str, code: str) -> None:
    data = np.zeros(4, np.uint32)
    with pytest.raises(EmulatorError, match="unknown instruction"):
        run(emulator, arch, [Segment(code, {"s[4:5]": data.ctypes.data})], memory=[data])
