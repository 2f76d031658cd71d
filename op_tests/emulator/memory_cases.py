"""Random instructions on memory, in every form, and what they must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from models import flat as model
from models import vector_memory
from models.atomics import Bytes, interesting
from programs import LANES, Array, Segment, register_name, run

from jitfmha.emulator import Definition, Emulator

SLICE = 8192  # bytes of global memory for each instruction
_PRIVATE = 128  # bytes of scratch of each lane
_PLANES = 8  # registers around the data, v8 to v15; as many planes of LDS
_ALL = 2**64 - 1
_WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)"


def _operation(row: Definition) -> str:
    return row.mnemonic.split("_", 1)[1]


@dataclass
class MemoryCase:
    """One instruction with the memory that it sees, whatever gives its addresses.

    Attributes:
        registers, lds, private: planes of the data, v[8:15] or a[8:15], of LDS, of scratch.
        content: of global memory.
        file: v or a, of the data.
        returns: the instruction writes registers.
    """

    text: str
    operation: str
    active: int
    registers: Array
    content: Array
    lds: Array
    private: Array
    file: str
    returns: bool
    to_lds: bool
    m0: int
    instruction_offset: int

    @property
    def uses(self) -> str:
        """Which memory besides the global one, of l (LDS) and p (private)."""
        return "l" * self.to_lds

    @property
    def details(self) -> str:
        """Of the addresses, for a message."""
        raise NotImplementedError

    def addresses(self, base: int) -> dict[str, Array | int]:
        """The registers that the address is made of, where global memory begins at `base`."""
        raise NotImplementedError

    def place(self, lane: int) -> tuple[str, vector_memory.Places]:
        """Which memory a lane goes to: g, l or p; and where there."""
        raise NotImplementedError

    def segment(self, base: int) -> Segment:
        code = ["s_mov_b64 exec, s[40:41]", self.text, _WAIT, "s_mov_b64 exec, -1"]
        data = f"{self.file}[8:15]"
        inputs = {"s[40:41]": self.active, data: self.registers, "m0": self.m0}
        inputs |= self.addresses(base)
        outputs = [data]
        if "l" in self.uses:
            planes = range(_PLANES)
            fill = [f"ds_write_b32 v1, v{100 + i} offset:{256 * i}" for i in planes]
            read = [f"ds_read_b32 v{120 + i}, v1 offset:{256 * i}" for i in planes]
            code = [*fill, _WAIT, *code, *read, _WAIT]
            inputs |= {"v1": np.arange(LANES, dtype=np.uint32) * 4, "v[100:107]": self.lds}
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
        """Registers, LDS, private and global memory afterwards."""
        memory, lds = Bytes(self.content.tobytes()), Bytes(self.lds.tobytes())
        scratch = np.ascontiguousarray(self.private.T)
        private = [Bytes(own.tobytes()) for own in scratch]
        registers = self.registers.copy()
        pitch = 16 if vector_memory.access_bytes(self.operation) > 8 else 4
        for lane in range(LANES):
            if not self.active >> lane & 1:
                continue
            where, places = self.place(lane)
            target = memory if where == "g" else lds if where == "l" else private[lane]
            operands = [int(x) for x in self.registers[2:, lane]]
            result = vector_memory.access(self.operation, target, places, operands)
            for k, value in enumerate(result):
                if self.to_lds:
                    lds.store(self.m0 + self.instruction_offset + pitch * lane + 4 * k, 4, value)
                elif self.returns:
                    registers[2 + k, lane] = value
        after = [np.frombuffer(bytes(p.content), np.uint32) for p in private]
        return {
            f"{self.file}[8:15]": registers,
            "v[120:127]": np.frombuffer(bytes(lds.content), np.uint32).reshape(_PLANES, LANES),
            "v[180:211]": np.stack(after, axis=1),
            "memory": np.frombuffer(bytes(memory.content), np.uint8),
        }


def check(emulator: Emulator, arch: str, cases: Sequence[MemoryCase]) -> None:
    """Runs all cases in one program."""
    arena = np.concatenate([case.content for case in cases])
    segments = [c.segment(arena.ctypes.data + SLICE * i) for i, c in enumerate(cases)]
    results = run(
        emulator, arch, segments, memory=[arena], lds_bytes=256 * _PLANES, scratch_bytes=_PRIVATE
    )
    for i, (case, result) in enumerate(zip(cases, results, strict=True)):
        expected = case.expected()
        what = f"{case.text} exec={case.active:x} {case.details}"
        result["memory"] = arena[SLICE * i : SLICE * (i + 1)]
        for name, value in result.items():
            np.testing.assert_array_equal(value, expected[name], f"{name} after {what}")


def draw_memory(operation: str, rng: np.random.Generator) -> dict[str, Any]:
    """The fields of a case that are the same for all formats."""
    return {
        "operation": operation,
        "active": int(rng.integers(0, 2**64, dtype=np.uint64)) if rng.integers(3) else _ALL,
        "registers": _in_lanes(operation, rng, _PLANES),
        "content": _words(operation, rng, SLICE // 4).view(np.uint8),
        "lds": _words(operation, rng, _PLANES * LANES).reshape(_PLANES, LANES),
        "private": _in_lanes(operation, rng, _PRIVATE // 4),
        # Where in LDS loads into it go: here, and at the instruction's offset.
        "m0": 64 + 4 * int(rng.integers(0, 128)),
    }


def _words(operation: str, rng: np.random.Generator, count: int) -> Array:
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


def _in_lanes(operation: str, rng: np.random.Generator, count: int) -> Array:
    """Planes of which two neighbours are 64-bit values."""
    return np.ascontiguousarray(_words(operation, rng, count * LANES).reshape(LANES, count).T)


@dataclass
class _Flat(MemoryCase):
    """FLAT, GLOBAL or SCRATCH; `where` says which memory each lane goes to."""

    where: str
    at: Array
    vaddr: Array | None
    saddr: int | None

    @property
    def uses(self) -> str:
        return self.where + super().uses

    @property
    def details(self) -> str:
        return f"{self.where} saddr={self.saddr}"

    def addresses(self, base: int) -> dict[str, Array | int]:
        registers: dict[str, Array | int] = {}
        if self.vaddr is not None:
            moved = [w == "g" and self.saddr is None for w in self.where]
            bases = np.where(moved, base, 0).astype(np.uint64)
            registers["v[2:3]"] = self.vaddr.astype(np.uint64) + bases
        if self.saddr is not None:
            registers["s[20:21]"] = self.saddr + (base if "g" in self.where else 0)
        return registers

    def place(self, lane: int) -> tuple[str, vector_memory.Places]:
        start = int(self.at[lane])
        return self.where[lane], lambda within, size: start + within


def draw(row: Definition, rng: np.random.Generator) -> MemoryCase:
    """A FLAT, GLOBAL or SCRATCH instruction in one of its forms."""
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
    registers = [register_name(file, 10, count) for count in row.registers[:2]]
    operands = [registers[1]] * returns + [vaddr_text] + [registers[0]] * bool(row.registers[0])
    text = f"{row.mnemonic} {', '.join(operands)}{saddr_text}"
    text += f" offset:{instruction_offset}" * bool(instruction_offset)
    return _Flat(
        **draw_memory(operation, rng),
        text=text + " sc0" * (is_atomic and returns),
        file=file,
        returns=returns,
        to_lds="lds" in operation,
        instruction_offset=instruction_offset,
        where=where,
        at=place,
        vaddr=vaddr,
        saddr=saddr,
    )


def rows(emulator: Emulator, arch: str, *formats: str) -> list[Definition]:
    return [d for d in emulator.definitions() if d.format in formats and arch in d.chips]
