"""Random FLAT, GLOBAL and SCRATCH instructions, in every form, and what they must do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from models import flat as model
from models import vector_memory
from models.atomics import Bytes, interesting
from programs import LANES, Array, Segment, run

from jitfmha.emulator import Definition, Emulator

_SLICE = 4096  # bytes of global memory for each instruction
_PRIVATE = 128  # bytes of scratch of each lane
_PLANES = 8  # registers around the data, v8 to v15; as many planes of LDS
_ALL = 2**64 - 1
_WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)"


def _operation(row: Definition) -> str:
    return row.mnemonic.split("_", 1)[1]


def between_lds(code: list[str], inputs: dict[str, Array | int], content: Array) -> list[str]:
    """With LDS filled before it, and its planes in v[120:127] after it."""
    fill = [f"ds_write_b32 v1, v{100 + i} offset:{256 * i}" for i in range(len(content))]
    read = [f"ds_read_b32 v{120 + i}, v1 offset:{256 * i}" for i in range(len(content))]
    inputs["v1"] = np.arange(LANES, dtype=np.uint32) * 4
    inputs["v[100:107]"] = content
    return [*fill, _WAIT, *code, *read, _WAIT]


@dataclass
class Case:
    """One instruction; `where` says which memory each lane goes to: g, l (LDS) or p (private)."""

    text: str
    operation: str
    where: str
    place: Array
    vaddr: Array | None
    saddr: int | None
    active: int
    registers: Array
    content: Array
    lds: Array
    private: Array
    file: str
    returns: bool
    m0: int
    instruction_offset: int

    @property
    def uses(self) -> set[str]:
        return set(self.where) | ({"l"} if "lds" in self.operation else set())

    def segment(self, base: int) -> Segment:
        code = ["s_mov_b64 exec, s[40:41]", self.text, _WAIT, "s_mov_b64 exec, -1"]
        inputs: dict[str, Array | int] = {
            "s[40:41]": self.active, f"{self.file}[8:15]": self.registers, "m0": self.m0,
        }  # fmt: skip
        outputs = [f"{self.file}[8:15]"]
        if self.vaddr is not None:
            moved = [w == "g" and self.saddr is None for w in self.where]
            bases = np.where(moved, base, 0).astype(np.uint64)
            inputs["v[2:3]"] = self.vaddr.astype(np.uint64) + bases
        if self.saddr is not None:
            is_global = "g" in self.where
            inputs["s[20:21]"] = self.saddr + (base if is_global else 0)
        if "l" in self.uses:
            code = between_lds(code, inputs, self.lds)
            outputs.append("v[120:127]")
        if "p" in self.uses:
            words = range(_PRIVATE // 4)
            fill = [f"scratch_store_dword off, v{140 + i}, off offset:{4 * i}" for i in words]
            read = [f"scratch_load_dword v{180 + i}, off, off offset:{4 * i}" for i in words]
            code = [*fill, _WAIT, *code, *read, _WAIT]
            inputs["v[140:171]"] = self.private
            outputs.append("v[180:211]")
        return Segment("\n".join(code), inputs, outputs)

    def expected(self) -> dict[str, Array]:
        memory, lds = Bytes(self.content.tobytes()), Bytes(self.lds.tobytes())
        private = [Bytes(np.ascontiguousarray(self.private[:, i]).tobytes()) for i in range(LANES)]
        registers = self.registers.copy()
        pitch = 16 if vector_memory.access_bytes(self.operation) > 8 else 4
        for lane in range(LANES):
            if not self.active >> lane & 1:
                continue
            target = {"g": memory, "l": lds, "p": private[lane]}[self.where[lane]]
            start = int(self.place[lane])
            operands = [int(x) for x in self.registers[2:, lane]]
            result = vector_memory.access(
                self.operation, target, lambda within, size, at=start: at + within, operands
            )
            if "lds" in self.operation:
                for k, value in enumerate(result):
                    at = self.m0 + self.instruction_offset + pitch * lane + 4 * k
                    lds.store(at, 4, value)
            elif self.returns:
                for k, value in enumerate(result):
                    registers[2 + k, lane] = value
        after = [np.frombuffer(bytes(p.content), np.uint32) for p in private]
        return {
            f"{self.file}[8:15]": registers,
            "v[120:127]": np.frombuffer(bytes(lds.content), np.uint32).reshape(_PLANES, LANES),
            "v[180:211]": np.stack(after, axis=1),
            "memory": np.frombuffer(bytes(memory.content), np.uint8),
        }


def check(emulator: Emulator, arch: str, cases: list[Case]) -> None:
    arena = np.concatenate([case.content for case in cases])
    segments = [c.segment(arena.ctypes.data + _SLICE * i) for i, c in enumerate(cases)]
    results = run(
        emulator, arch, segments, memory=[arena], lds_bytes=256 * _PLANES, scratch_bytes=_PRIVATE
    )
    for i, (case, result) in enumerate(zip(cases, results, strict=True)):
        expected = case.expected()
        what = f"{case.text} exec={case.active:x} {case.where}"
        for name, value in result.items():
            np.testing.assert_array_equal(value, expected[name], f"{name} after {what}")
        after = arena[_SLICE * i : _SLICE * (i + 1)]
        np.testing.assert_array_equal(after, expected["memory"], f"memory after {what}")


def words(operation: str, rng: np.random.Generator, count: int) -> Array:
    """Random dwords, for atomics with edge values among them."""
    random = rng.integers(0, 2**32, count, dtype=np.uint32)
    if not vector_memory.is_atomic(operation):
        return random
    name, kind, bits = vector_memory.atomic_of(operation)
    width = np.uint64 if bits == 64 else np.uint32
    values = np.array(interesting(kind, bits), np.uint64).astype(width)
    if name == "cmpswap":
        return rng.choice(values[:3], count).view(np.uint32)[:count]
    chosen = rng.choice(values, count).view(np.uint32)[:count]
    return np.where(rng.random(count) < 0.3, random, chosen).astype(np.uint32)


def draw(row: Definition, rng: np.random.Generator) -> Case:
    operation = _operation(row)
    size = vector_memory.access_bytes(operation)
    is_atomic = vector_memory.is_atomic(operation)
    if row.format == "FLAT":
        where = "".join(rng.choice(["g", "l", "p"], LANES)) if rng.integers(2) else "g" * LANES
    else:
        where = ("g" if row.format == "GLOBAL" else "p") * LANES
    instruction_offset = (
        16 * int(rng.integers(0, 4)) if row.format == "FLAT" else 8 * int(rng.integers(-8, 8))
    )
    if row.format == "GLOBAL" and "lds" not in operation and rng.integers(8) == 0:
        instruction_offset = int(rng.choice([-4096, 4088]))
    slots = rng.integers(0, 16, LANES) if is_atomic else rng.permutation(LANES)
    # Of LDS, from 0 on; of private memory, within what the lane has.
    in_private = 8 * rng.integers(0, (_PRIVATE - 16) // 8 + 1, LANES)
    kinds = np.array(list(where))
    place = np.where(kinds == "p", in_private, slots * size + 64)
    vaddr: Array | None = place - instruction_offset
    saddr: int | None = None
    vaddr_text, saddr_text = "v[2:3]", ", off" if row.format != "FLAT" else ""
    if row.format == "GLOBAL" and rng.integers(2):
        # The register's 32 bits are unsigned.
        saddr = -(2**12)
        vaddr, vaddr_text, saddr_text = vaddr + 2**12, "v2", ", s[20:21]"
    if row.format == "FLAT":
        assert vaddr is not None
        apertures = {"g": 0, "l": model.SHARED_APERTURE, "p": model.PRIVATE_APERTURE}
        vaddr = vaddr + np.array([apertures[w] for w in where])
    if row.format == "SCRATCH":
        form = str(rng.choice(["ST", "SS", "SV", "SVS"]))
        scalar = 0
        if form in ("ST", "SS"):
            place[:] = in_private[0]
        if form in ("SS", "SVS"):
            scalar = int(rng.integers(0, 2**31)) * 8
            if form == "SS":
                scalar = int(place[0] - instruction_offset) & 0xFFFFFFFF
            scalar &= 0xFFFFFFFF
            saddr, saddr_text = scalar, ", s20"
        if form == "ST":
            instruction_offset = int(place[0])
        vaddr_text = "v2" if "V" in form else "off"
        vaddr = (place - instruction_offset - scalar) & 0xFFFFFFFF if "V" in form else None
        for lane in range(LANES):
            v = None if vaddr is None else int(vaddr[lane])
            assert model.scratch(v, saddr, instruction_offset) == place[lane]
    returns = bool(row.registers[1]) and (not is_atomic or bool(rng.integers(2)))
    # LLVM's assembler refuses accumulation registers in some floating-point atomics.
    file = "v" if is_atomic else str(rng.choice(["v", "a"]))
    registers = [_name(file, count) for count in row.registers[:2]]
    operands = [registers[1]] * returns + [vaddr_text] + [registers[0]] * bool(row.registers[0])
    text = f"{row.mnemonic} {', '.join(operands)}{saddr_text}"
    text += f" offset:{instruction_offset}" * bool(instruction_offset) + " sc0" * (
        is_atomic and returns
    )
    # Where in LDS loads into it go: m0 and the instruction's offset.
    m0 = 256 * int(rng.integers(0, 3)) + 64
    return Case(
        text, operation, where, place, vaddr, saddr,
        int(rng.integers(0, 2**64, dtype=np.uint64)) if rng.integers(3) else _ALL,
        in_lanes(operation, rng, _PLANES),
        words(operation, rng, _SLICE // 4).view(np.uint8),
        words(operation, rng, _PLANES * LANES).reshape(_PLANES, LANES),
        in_lanes(operation, rng, _PRIVATE // 4),
        file, returns,
        m0, instruction_offset,
    )  # fmt: skip


def in_lanes(operation: str, rng: np.random.Generator, count: int) -> Array:
    """Planes of which two neighbours are 64-bit values."""
    return np.ascontiguousarray(words(operation, rng, count * LANES).reshape(LANES, count).T)


def _name(file: str, count: int) -> str:
    return f"{file}10" if count == 1 else f"{file}[10:{9 + count}]"


def rows(emulator: Emulator, arch: str, *formats: str) -> list[Definition]:
    return [d for d in emulator.definitions() if d.format in formats and arch in d.chips]
