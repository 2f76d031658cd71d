"""Runs many short pieces of assembly in one launch, each on registers that the test chooses.

A `Segment` is one instruction (or a few lines), the content of registers before it and the names of
the registers to look at after it:

    results = run(emulator, "gfx942", [
        Segment("v_add_f32 v0, v1, v2", {"v1": a, "v2": b}, ["v0"]),
        Segment("v_mad_u64_u32 v[0:1], vcc, v2, s4, v[6:7]",
                {"v2": x, "s4": 7, "v[6:7]": wide, "exec": mask}, ["v[0:1]", "vcc"]),
    ])
    sum = results[0]["v0"].view(np.float32)

All segments together are one kernel of one wave for every 64 lanes of the inputs.

Names of registers: v5, v[2:3], a0, a[0:15], s4, s[4:7], and vcc, exec, m0, scc, mode. Segments must
leave v254, v255 and s80 to s95 alone. No register is promised to survive to the next segment.

Inputs:
    v, a: an array whose last axis is the lanes, a multiple of 64 and the same in all segments.
        One register: (lanes,) of 32-bit values, or of 8- or 16-bit ones, which are extended with
        zeros. A pair: (lanes,) of 64-bit values. Any range: (registers, lanes) of 32-bit values.
    s, vcc, exec, m0, scc, mode: an int for all waves, or an array (waves,).
Outputs, unsigned:
    v, a: (lanes,) u32 of one register, (lanes,) u64 of a pair, (registers, lanes) u32 of a range.
    s and so on: (waves,) u32 or u64, (registers, waves) u32 of a range.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from launches import Array, assembled, kernel_text, launch_code
from numpy.typing import NDArray

from jitfmha.emulator import DEVICES, Emulator

LANES = 64
# Round to nearest even, denormals kept, DX10_CLAMP, IEEE: what compiled kernels start with.
DEFAULT_MODE = 0x3F0

_PLANE = 4 * LANES


@dataclass(frozen=True)
class Segment:
    """Lines of assembly between the loading of `inputs` and the storing of `outputs`."""

    code: str
    inputs: Mapping[str, Array | int] = field(default_factory=dict)
    outputs: Sequence[str] = ()


@dataclass(frozen=True)
class _Registers:
    """A range of registers: file v, a, s, or the name of a special register."""

    file: str
    first: int
    count: int

    @property
    def in_lanes(self) -> bool:
        return self.file in "va"

    def names(self) -> list[str]:
        """One name a dword."""
        if self.file in "vas":
            return [f"{self.file}{i}" for i in range(self.first, self.first + self.count)]
        return [f"{self.file}_lo", f"{self.file}_hi"] if self.count == 2 else [self.file]


def parse(name: str) -> _Registers:
    """The registers that a name means."""
    if name in ("vcc", "exec"):
        return _Registers(name, 0, 2)
    if name in ("m0", "scc", "mode"):
        return _Registers(name, 0, 1)
    found = re.fullmatch(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])", name)
    assert found, f"{name!r} is not a register of a segment"
    first = int(found[2] or found[3])
    return _Registers(found[1], first, int(found[4] or first) - first + 1)


def register_name(file: str, first: int, count: int = 1) -> str:
    """The name of a range of registers, as `parse` reads it."""
    return f"{file}{first}" if count == 1 else f"{file}[{first}:{first + count - 1}]"


def _dwords(registers: _Registers, value: Array | int, waves: int) -> NDArray[np.uint32]:
    """The value as (registers, lanes or waves) of 32 bits."""
    if isinstance(value, int | np.integer):
        wide = int(value) & (2 ** (32 * registers.count) - 1)
        parts = [wide >> (32 * i) & 0xFFFFFFFF for i in range(registers.count)]
        width = waves * (LANES if registers.in_lanes else 1)
        return np.repeat(np.array(parts, np.uint32)[:, None], width, axis=1)
    array = np.ascontiguousarray(value)
    bits = array.view(f"u{array.itemsize}")
    if bits.itemsize == 8:
        bits = np.stack([bits & 0xFFFFFFFF, bits >> 32])
    return bits.astype(np.uint32).reshape(registers.count, -1)


def _joined(registers: _Registers, dwords: NDArray[np.uint32]) -> Array:
    if registers.count == 1:
        return dwords[0].copy()
    if registers.count == 2:
        return dwords[0].astype(np.uint64) | dwords[1].astype(np.uint64) << np.uint64(32)
    return dwords.copy()


def _advance(pointer: int, planes: int) -> list[str]:
    step = f"s_add_u32 s{pointer}, s{pointer}, {_PLANE * planes}"
    return [step, f"s_addc_u32 s{pointer + 1}, s{pointer + 1}, 0"] if planes else []


def _planes(operation: str, registers: Sequence[str], pointer: int) -> Iterator[str]:
    """Loads or stores of whole registers; the pointer moves past them."""
    for i, name in enumerate(registers):
        offset = f"s[{pointer}:{pointer + 1}] offset:{_PLANE * (i % 15)}"
        if operation == "load":
            yield f"global_load_dword {name}, v255, {offset}"
        else:
            yield f"global_store_dword v255, {name}, {offset}"
        if i % 15 == 14:
            yield from _advance(pointer, 15)
    yield from _advance(pointer, len(registers) % 15)


def _set_scalar(name: str, offset: int) -> Iterator[str]:
    """Loads one scalar dword from the block of scalars, with s95 on the way where it must."""
    direct = re.fullmatch(r"s\d+|vcc_..", name)
    yield f"s_load_dword {name if direct else 's95'}, s[84:85], 0x{offset:x}"
    yield "s_waitcnt lgkmcnt(0)"
    if name == "mode":
        yield "s_setreg_b32 hwreg(HW_REG_MODE), s95"
    elif name == "scc":
        yield "s_cmp_lg_u32 s95, 0"
    elif not direct:
        yield f"s_mov_b32 {name}, s95"


def _segment_lines(segment: Segment, first_scalar: int) -> Iterator[str]:
    inputs = [parse(name) for name in segment.inputs]
    outputs = [parse(name) for name in segment.outputs]
    yield from _planes("load", [n for r in inputs if r.in_lanes for n in r.names()], 80)
    scalars = [n for r in inputs if not r.in_lanes for n in r.names()]
    offsets = {name: 4 * (first_scalar + i) for i, name in enumerate(scalars)}
    # The order matters for these: loading the others needs all lanes, and changes SCC.
    last = [name for name in ("mode", "scc", "exec_lo", "exec_hi") if name in offsets]
    for name in [name for name in scalars if name not in last] + last:
        yield from _set_scalar(name, offsets[name])
    yield from ("s_waitcnt vmcnt(0) lgkmcnt(0)", "s_nop 15")
    yield segment.code
    yield from ("s_nop 15", "s_nop 15", "s_waitcnt vmcnt(0) lgkmcnt(0)")
    yield from ("s_cselect_b32 s86, 1, 0", "s_mov_b64 s[88:89], exec", "s_mov_b64 exec, -1")
    yield "s_getreg_b32 s87, hwreg(HW_REG_MODE)"
    yield f"s_setreg_imm32_b32 hwreg(HW_REG_MODE), 0x{DEFAULT_MODE:x}"
    yield from _planes("store", [n for r in outputs if r.in_lanes for n in r.names()], 82)
    saved = {"scc": "s86", "mode": "s87", "exec_lo": "s88", "exec_hi": "s89"}
    for name in [n for r in outputs if not r.in_lanes for n in r.names()]:
        yield f"v_mov_b32 v254, {saved.get(name, name)}"
        yield from _planes("store", ["v254"], 82)
    yield "s_waitcnt vmcnt(0)"


def _body(segments: Sequence[Segment]) -> str:
    """The program's lines."""
    parsed = [parse(name) for s in segments for name in s.inputs]
    scalars = sum(r.count for r in parsed if not r.in_lanes)
    scalar_bytes = -(-4 * scalars // _PLANE) * _PLANE
    in_bytes = scalar_bytes + _PLANE * sum(r.count for r in parsed if r.in_lanes)
    out_bytes = _PLANE * sum(parse(name).count for s in segments for name in s.outputs)
    lines = [
        "v_lshlrev_b32 v255, 2, v0",
        "s_load_dwordx4 s[80:83], s[0:1], 0x0",
        "s_waitcnt lgkmcnt(0)",
    ]
    for pointer, size in ((80, in_bytes), (82, out_bytes)):
        lines += [
            f"s_mul_i32 s86, s2, {size}",
            f"s_add_u32 s{pointer}, s{pointer}, s86",
            f"s_addc_u32 s{pointer + 1}, s{pointer + 1}, 0",
        ]
    # s[80:81] walks through the planes that are loaded, s[82:83] through those that are stored;
    # s[84:85] stays at the scalars, which come first.
    lines += ["s_mov_b64 s[84:85], s[80:81]", *_advance(80, scalar_bytes // _PLANE)]
    first_scalar = 0
    for segment in segments:
        lines += _segment_lines(segment, first_scalar)
        first_scalar += sum(r.count for r in map(parse, segment.inputs) if not r.in_lanes)
    return "\n".join(lines)


def run(
    emulator: Emulator,
    device: int | str,
    segments: Sequence[Segment],
    *,
    memory: Sequence[Array] = (),
    lds_bytes: int = 0,
    scratch_bytes: int = 0,
) -> list[dict[str, Array]]:
    """Runs the segments in order, and returns the outputs of each by name.

    Args:
        device: of the virtual node: an index, or a key of `jitfmha.emulator.DEVICES`.
        memory: more arrays that the program may touch; their addresses are inputs of segments.
        lds_bytes: of the workgroup, which is one wave.
        scratch_bytes: of each lane.

    Raises:
        DeviceCompileError: a segment does not assemble.
        EmulatorError: a segment faulted; the message has its text.
    """
    index = DEVICES[device] if isinstance(device, str) else device
    arch = "gfx950" if index == DEVICES["gfx950"] else "gfx942"
    waves = 1
    for segment in segments:
        for name, value in segment.inputs.items():
            if not isinstance(value, int | np.integer):
                waves = np.shape(value)[-1] // (LANES if parse(name).in_lanes else 1)
    in_lanes: list[NDArray[np.uint32]] = []
    scalars: list[NDArray[np.uint32]] = []
    for segment in segments:
        for name, value in segment.inputs.items():
            registers = parse(name)
            dwords = _dwords(registers, value, waves)
            expected = (registers.count, waves * (LANES if registers.in_lanes else 1))
            assert dwords.shape == expected, f"{segment.code}: {name} has shape {dwords.shape}"
            (in_lanes if registers.in_lanes else scalars).append(dwords)
    padding = -sum(len(dwords) for dwords in scalars) % LANES
    blocks = [dwords.T for dwords in scalars]
    blocks += [np.zeros((waves, padding), np.uint32)]
    for dwords in in_lanes:
        blocks += [dwords.reshape(-1, waves, LANES).transpose(1, 0, 2).reshape(waves, -1)]
    source = np.ascontiguousarray(np.concatenate(blocks, axis=1))
    planes = sum(parse(name).count for s in segments for name in s.outputs)
    stored = np.zeros((waves, max(planes, 1), LANES), np.uint32)

    text = kernel_text("program", _body(segments), lds_bytes=lds_bytes, scratch_bytes=scratch_bytes)
    code_object = assembled(arch, text)
    launch_code(
        emulator, index, code_object, "program", waves, LANES, source, stored, memory=memory
    )
    results = []
    plane = 0
    for segment in segments:
        result = {}
        # Registers of lanes are stored before scalar ones.
        for name in sorted(segment.outputs, key=lambda name: not parse(name).in_lanes):
            registers = parse(name)
            content = stored[:, plane : plane + registers.count]
            plane += registers.count
            by_register = content.swapaxes(0, 1)
            if registers.in_lanes:
                result[name] = _joined(registers, by_register.reshape(registers.count, -1))
            else:
                result[name] = _joined(registers, by_register[:, :, 0])
        results.append(result)
    return results
