"""LDS instructions, from the ISA documents' words, one lane after the other."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .atomics import Bytes, Denormals, atomic

LANES = 64
_SIGNED = re.compile(r"ds_read_([iu])(8|16)(_d16)?(_hi)?$")
_ATOMIC = re.compile(
    r"ds_(?:(add|sub|rsub|inc|dec|min|max|and|or|xor|mskor|cmpst|wrap|wrxchg)(?:_rtn)?_([uibf])(32|64)"
    r"|pk_add(?:_rtn)?_(b?f)16)$"
)


@dataclass
class Lane:
    """One lane's operands, as lists of dwords."""

    address: int = 0
    data0: Sequence[int] = ()
    data1: Sequence[int] = ()


@dataclass
class Wave:
    """What an instruction sees.

    Attributes:
        offset: the 16 bits of both offset fields.
        active: lanes.
        denormals: by MODE, of 32-bit floats and of the others.
    """

    lds: Bytes
    lanes: list[Lane]
    offset: int
    active: int
    m0: int = 0
    denormals32: Denormals = field(default_factory=Denormals)
    denormals16: Denormals = field(default_factory=Denormals)

    def is_active(self, lane: int) -> bool:
        return bool(self.active >> lane & 1)


def _join(dwords: Sequence[int]) -> int:
    return sum(dword << 32 * i for i, dword in enumerate(dwords))


def _split(value: int, count: int) -> list[int]:
    return [value >> 32 * i & 0xFFFFFFFF for i in range(count)]


def swizzle_lane(offset: int, lane: int) -> int:
    """The lane that ds_swizzle_b32 reads."""
    half, i = lane & 0x20, lane & 0x1F
    if offset >= 0xE000:
        mask = offset & 0x1F
        j = int(f"{i:05b}"[::-1], 2) >> bin(mask).count("1")
        return j | (i & mask) | half
    if offset >= 0xC000:
        mask, rotate = offset & 0x1F, offset >> 5 & 0x1F
        if offset >> 10 & 1:
            rotate = -rotate
        return ((i & mask) | ((i + rotate) & ~mask & 0x1F)) | half
    if offset >> 15:
        return (lane // 4) * 4 + (offset >> (2 * (lane % 4)) & 3)
    xor_mask, or_mask, and_mask = offset >> 10 & 0x1F, offset >> 5 & 0x1F, offset & 0x1F
    return (((i & and_mask) | or_mask) ^ xor_mask) | half


def _lane_exchange(name: str, wave: Wave) -> list[list[int] | None]:
    if name == "ds_permute_b32":
        arrived = [0] * LANES
        for i in range(LANES):
            if wave.is_active(i):
                to = (wave.lanes[i].address + wave.offset) // 4 % 64
                arrived[to] = wave.lanes[i].data0[0]
        return [[arrived[i]] if wave.is_active(i) else None for i in range(LANES)]
    results: list[list[int] | None] = []
    for i, lane in enumerate(wave.lanes):
        if name == "ds_swizzle_b32":
            j = swizzle_lane(wave.offset, i)
            value = wave.lanes[j].address  # the register where others have the address
        else:
            j = (lane.address + wave.offset) // 4 % 64
            value = wave.lanes[j].data0[0]
        results.append([value if wave.is_active(j) else 0] if wave.is_active(i) else None)
    return results


def _transposed(name: str, wave: Wave) -> list[list[int] | None]:
    """16 lanes hold a matrix with rows of 16 elements; lane i gets column i."""
    found = re.fullmatch(r"ds_read_b(\d+)_tr_b(\d+)", name)
    assert found
    width, bits = int(found[1]), int(found[2])
    loaded = [wave.lds.load(lane.address + wave.offset, width // 8) for lane in wave.lanes]
    results: list[list[int] | None] = []
    for i in range(LANES):
        group = loaded[i // 16 * 16 : i // 16 * 16 + 16]
        matrix = _join_bits(group, width)
        column = i % 16
        rows = width // bits
        value = 0
        for row in range(rows):
            element = matrix >> (row * 16 + column) * bits & ((1 << bits) - 1)
            value |= element << row * bits
        results.append(_split(value, width // 32))
    return results


def _join_bits(values: Sequence[int], width: int) -> int:
    return sum(value << width * i for i, value in enumerate(values))


def execute(name: str, wave: Wave) -> list[list[int] | None]:
    """Each lane's result, as dwords: None where its registers keep their content, [] without any.

    Changes `wave.lds`. Lanes go in ascending order.
    """
    if name in ("ds_swizzle_b32", "ds_permute_b32", "ds_bpermute_b32"):
        return _lane_exchange(name, wave)
    if "_tr_" in name:
        return _transposed(name, wave)
    if name in ("ds_append", "ds_consume"):
        count = bin(wave.active).count("1")
        old = wave.lds.load(wave.offset, 4)
        wave.lds.store(wave.offset, 4, old + count if name == "ds_append" else old - count)
        return [[old] if wave.is_active(i) else None for i in range(LANES)]
    return [_one_lane(name, wave, i) if wave.is_active(i) else None for i in range(LANES)]


def _one_lane(name: str, wave: Wave, index: int) -> list[int]:
    lane, lds = wave.lanes[index], wave.lds
    at = (lane.address + wave.offset) & 0xFFFFFFFF

    def load(offset: int, size: int) -> int:
        return lds.load(offset, size) if lds.holds(offset, size) else 0

    def store(offset: int, size: int, value: int) -> None:
        if lds.holds(offset, size):
            lds.store(offset, size, value)

    if name == "ds_nop":
        return []
    if "addtid" in name:
        at = (wave.m0 & 0xFFFF) + wave.offset + 4 * index
        if "read" in name:
            return [load(at, 4)]
        store(at, 4, lane.data0[0])
        return []
    found = re.fullmatch(r"ds_(read2|write2|wrxchg2)(st64)?(?:_rtn)?_b(\d+)", name)
    if found:
        size = int(found[3]) // 8
        unit = size * (64 if found[2] else 1)
        places = [(lane.address + unit * (wave.offset >> s & 0xFF)) & 0xFFFFFFFF for s in (0, 8)]
        old = [load(place, size) for place in places]
        if found[1] != "read2":
            for place, data in zip(places, (lane.data0, lane.data1), strict=True):
                store(place, size, _join(data))
        return [] if found[1] == "write2" else _split(_join_bits(old, 8 * size), size // 2)
    if found := _SIGNED.match(name):
        sign, size, d16, high = found[1], int(found[2]) // 8, found[3], found[4]
        value = load(at, size)
        if sign == "i" and value >> (8 * size - 1):
            value -= 1 << 8 * size
        if d16:
            value &= 0xFFFF
        return [(value << 16 if high else value) & 0xFFFFFFFF]
    if found := re.fullmatch(r"ds_read_b(\d+)", name):
        return _split(load(at, int(found[1]) // 8), int(found[1]) // 32)
    if found := re.fullmatch(r"ds_write_b(\d+)(_d16_hi)?", name):
        store(at, int(found[1]) // 8, _join(lane.data0) >> (16 if found[2] else 0))
        return []
    if name == "ds_condxchg32_rtn_b64":
        at &= 0xFFF8
        old = [load(at, 4), load(at + 4, 4)]
        for k in range(2):
            if lane.data0[k] >> 31:
                store(at + 4 * k, 4, lane.data0[k] & 0x7FFFFFFF)
        return old
    operation, kind, bits = atomic_of(name)
    size = 4 if kind.startswith("pk") else bits // 8
    before = load(at, size)
    denormals = wave.denormals32 if bits == 32 else wave.denormals16
    operands = [_join(lane.data0), _join(lane.data1)]
    store(at, size, atomic(operation, kind, bits, before, operands, denormals))
    return _split(before, size // 4) if "_rtn" in name else []


def atomic_of(name: str) -> tuple[str, str, int]:
    """Operation, kind and bits of an atomic, as `models.atomics.atomic` takes them."""
    found = _ATOMIC.match(name)
    assert found, f"{name} has no model"
    if found[4]:
        return "add", f"pk_{found[4]}", 16
    return "swap" if found[1] == "wrxchg" else found[1], found[2], int(found[3])


def is_atomic(name: str) -> bool:
    return _ATOMIC.match(name) is not None
