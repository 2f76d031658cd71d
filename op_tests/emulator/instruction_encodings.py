"""Random encodings of a row of the instruction tables, from the ISA documents' microcode formats.

Written without a look at decode.cpp. Only canonical encodings come out, those that an assembler
emits: bits that an instruction does not use are what LLVM sets, tuples are aligned as its assembler
demands, and a literal has no shorter form.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jitfmha.emulator import Definition

_FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
_HALVES = frozenset({"u16", "i16", "f16", "bf16"})
_DWORDS = {"b64": 2, "i64": 2, "f64": 2, "f32x2": 2, "lane_mask": 2}
_DWORDS |= {"b128": 4, "b192": 6, "b512": 16, "b1024": 32}
# Fields 240 to 248, in each type that they can have.
_INLINE_FLOATS = {
    *(0x3F000000, 0xBF000000, 0x3F800000, 0xBF800000, 0x40000000, 0xC0000000),
    *(0x40800000, 0xC0800000, 0x3E22F983),
    *(0x3800, 0xB800, 0x3C00, 0xBC00, 0x4000, 0xC000, 0x4400, 0xC400, 0x3118),
    *(0x3F00, 0xBF00, 0x3F80, 0xBF80, 0x4080, 0xC080, 0x3E22),
    *(0x3FE00000, 0xBFE00000, 0x3FF00000, 0xBFF00000, 0x40100000, 0xC0100000, 0x3FC45F30),
}
_LITERAL = 255


def dwords_of(kind: str) -> int:
    return _DWORDS.get(kind, 1)


@dataclass(frozen=True)
class Encoding:
    """Dwords, and what is special about them.

    Attributes:
        form: e32, e64, sdwa, dpp, or empty.
        modifiers: those that are set; LLVM knows some on few instructions only.
    """

    row: Definition
    form: str
    words: tuple[int, ...]
    modifiers: frozenset[str] = frozenset()


class _Fields:
    """Values at bit positions; two values must not share bits."""

    def __init__(self, *values: tuple[int, int, int]) -> None:
        self.bits = self.used = 0
        self.modifiers: set[str] = set()
        for each in values:
            self.put(*each)

    def put(self, low: int, width: int, value: int) -> None:
        mask = ((1 << width) - 1) << low
        assert not self.used & mask, f"bit {low} is used twice"
        assert 0 <= value < 1 << width
        self.used |= mask
        self.bits |= value << low

    def words(self, count: int) -> tuple[int, ...]:
        return tuple(self.bits >> 32 * i & 0xFFFFFFFF for i in range(count))


class Encoder:
    """Draws encodings of rows for one chip."""

    def __init__(self, chip: str, rng: random.Random) -> None:
        self._chip = chip
        self._rng = rng

    def forms(self, row: Definition) -> Sequence[str]:
        if row.format in ("VOP1", "VOP2", "VOPC"):
            return ("e32", "e64", "sdwa", "dpp")
        return ("",)

    def encode(self, row: Definition, form: str, *, plain: bool) -> Encoding:
        """A random encoding; `plain` is without modifiers that not every instruction has."""
        encoders: dict[str, Callable[[Definition, bool], tuple[_Fields, int]]] = {
            "SOP1": self._sop1, "SOP2": self._sop2, "SOPC": self._sopc, "SOPK": self._sopk,
            "SOPP": self._sopp, "SMEM": self._smem, "VOP3": self._vop3, "VOP3P": self._vop3p,
            "MFMA": self._mfma, "MFMA_SCALE": self._mfma_scale, "DS": self._ds,
            "MUBUF": self._mubuf, "MTBUF": self._mtbuf,
            "FLAT": self._flat, "GLOBAL": self._flat, "SCRATCH": self._flat,
        }  # fmt: skip
        if form == "e64":
            fields, count = self._vop3(row, plain)
        elif form:
            encode = {"e32": self._e32, "sdwa": self._sdwa, "dpp": self._dpp}[form]
            fields, count = encode(row, plain)
        else:
            fields, count = encoders[row.format](row, plain)
        return Encoding(row, form, fields.words(count), frozenset(fields.modifiers))

    # ---- Operands ----

    def _chance(self, percent: int) -> bool:
        return self._rng.randrange(100) < percent

    def _bits(self, count: int) -> int:
        return self._rng.getrandbits(count)

    def _vgpr(self, dwords: int = 1) -> int:
        step = 2 if dwords > 1 else 1
        return self._rng.randrange(0, 257 - dwords, step)

    def _sgpr(self, dwords: int = 1, *, special: bool = True) -> int:
        if special and self._chance(25):
            named = {
                1: [102, 103, 104, 105, 106, 107, 108, 123, 124, 126, 127],
                2: [102, 104, 106, 110, 126],
            }
            return self._rng.choice(named.get(dwords, [108]))
        step = min(dwords, 4)
        return self._rng.randrange(0, 103 - dwords, step)

    def _literal(self, kind: str) -> int:
        while True:
            value = self._bits(16 if kind in _HALVES else 32)
            extended = value - (1 << 16) if kind in _HALVES and value >> 15 else value
            extended = extended - (1 << 32) if extended >> 31 == 1 else extended
            if not -16 <= extended <= 64 and value not in _INLINE_FLOATS:
                return value

    def _constant(self) -> int:
        """The field of an inline constant."""
        return self._rng.choice((self._rng.randint(128, 208), self._rng.randint(240, 248)))

    def _scalar_source(self, kind: str) -> int:
        if self._chance(60):
            return self._sgpr(dwords_of(kind))
        if self._chance(20) and dwords_of(kind) == 1:
            return self._rng.choice([235, 236, 237, 238, 251, 252, 253])
        return self._constant()

    # ---- Scalar formats ----

    def _scalar(self, row: Definition, fields: _Fields, positions: Sequence[int]) -> int:
        """Sources at bit positions; returns the dwords."""
        count = 1
        sources = [kind for kind, role in row.sources if role == "source"]
        if row.mnemonic == "s_set_gpr_idx_on":  # the second field is four bits, not an operand
            fields.put(0, 8, self._sgpr())
            fields.put(8, 8, self._bits(4))
            return count
        for position, kind in zip(positions, sources, strict=False):
            without_literal = any(x in row.mnemonic for x in ("lane", "gpr_idx", "movrel"))
            if count == 1 and self._chance(15) and row.unit == "salu" and not without_literal:
                fields.put(position, 8, _LITERAL)
                fields.put(32, 32, self._literal(kind))
                count = 2
            elif row.unit == "branch" or "movrel" in row.mnemonic:
                fields.put(position, 8, self._sgpr(dwords_of(kind), special=False))
            else:
                fields.put(position, 8, self._scalar_source(kind))
        for kind, role in row.sources:
            if role == "literal":
                fields.put(32, 32, self._literal(kind))
                count = 2
        return count

    def _scalar_destination(self, row: Definition) -> int:
        kind = next((k for k, role in row.sources if role == "old"), None)
        kind = row.result[0] if row.result[1] == "destination" else kind
        return 0 if kind is None else self._sgpr(dwords_of(kind))

    def _sop1(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields((23, 9, 0x17D), (8, 8, row.opcode), (16, 7, self._scalar_destination(row)))
        return fields, self._scalar(row, fields, (0,))

    def _sop2(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields((30, 2, 2), (23, 7, row.opcode), (16, 7, self._scalar_destination(row)))
        return fields, self._scalar(row, fields, (0, 8))

    def _sopc(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields((23, 9, 0x17E), (16, 7, row.opcode))
        return fields, self._scalar(row, fields, (0, 8))

    def _sopk(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields(
            (28, 4, 0xB),
            (23, 5, row.opcode),
            (16, 7, self._scalar_destination(row)),
            (0, 16, self._bits(16)),
        )
        return fields, self._scalar(row, fields, ())

    def _sopp(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        without_number = ("s_barrier", "s_wakeup", "s_icache_inv", "s_ttracedata")
        without_number += ("s_set_gpr_idx_off", "s_endpgm_saved", "s_endpgm_ordered_ps_done")
        few_bits = {"s_setprio": 2, "s_sleep": 7, "s_nop": 4, "s_trap": 8, "s_set_gpr_idx_mode": 4}
        fields = _Fields((23, 9, 0x17F), (16, 7, row.opcode))
        number = self._bits(few_bits.get(row.mnemonic, 16))
        fields.put(0, 16, 0 if row.mnemonic in without_number else number)
        return fields, 1

    def _smem(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields((26, 6, 0x30), (18, 8, row.opcode))
        registers = max(row.registers[:2])
        if registers:
            fields.put(6, 7, self._sgpr(registers, special=False))
        elif "probe" in row.mnemonic:
            fields.put(6, 7, self._bits(7))
        if 0x20 <= row.opcode <= 0x25:
            return fields, 2
        buffer = "buffer" in row.mnemonic
        fields.put(0, 6, self._sgpr(4 if buffer else 2, special=not buffer) // 2)
        if registers:
            fields.put(16, 1, self._bits(1))
        form = self._rng.choice(["immediate", "sgpr", "both"])
        if form != "sgpr":
            fields.put(17, 1, 1)
            # Buffers know no negative offset.
            fields.put(32, 21, self._bits(20 if buffer else 21))
        else:
            fields.put(32, 7, self._sgpr())
        if form == "both":
            fields.put(14, 1, 1)
            fields.put(57, 7, self._sgpr())
        return fields, 2

    # ---- Vector ALU ----

    def _vector_opcode(self, row: Definition, fields: _Fields) -> None:
        if row.format == "VOP1":
            fields.put(25, 7, 0x3F)
            fields.put(9, 8, row.opcode)
        elif row.format == "VOP2":
            fields.put(31, 1, 0)
            fields.put(25, 6, row.opcode)
        else:
            fields.put(25, 7, 0x3E)
            fields.put(17, 8, row.opcode)

    def _sources(self, row: Definition) -> list[str]:
        return [kind for kind, role in row.sources if role == "source"]

    def _reads_vcc(self, row: Definition) -> bool:
        return any(role in ("lane_bit", "vcc") for _, role in row.sources)

    def _vector_destination(self, row: Definition) -> int:
        kind, role = row.result
        if role == "scalar_destination":
            return self._sgpr(dwords_of(kind), special=False)
        return self._vgpr(dwords_of(kind)) if role in ("destination", "with_carry") else 0

    def _e32(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields, count = _Fields(), 1
        self._vector_opcode(row, fields)
        sources = self._sources(row)
        has_literal = any(role == "literal" for _, role in row.sources)
        if has_literal:
            fields.put(32, 32, self._literal("f32" if "f32" in row.mnemonic else "f16"))
            count = 2
        if sources:
            kind = sources[0]
            vgprs_only = any(x in row.mnemonic for x in ("accvgpr", "swap", "readfirstlane"))
            if self._chance(40) or vgprs_only:
                fields.put(0, 9, 256 + self._vgpr(dwords_of(kind)))
            elif self._chance(40) and not self._reads_vcc(row) and not has_literal:
                fields.put(0, 9, self._sgpr(dwords_of(kind)))
            elif self._chance(30) and not self._reads_vcc(row) and not has_literal:
                fields.put(0, 9, _LITERAL)
                fields.put(32, 32, self._literal(kind))
                count = 2
            else:
                fields.put(0, 9, self._constant())
        if len(sources) > 1:
            fields.put(9, 8, self._vgpr(dwords_of(sources[1])))
        if row.format != "VOPC":
            fields.put(17, 8, self._vector_destination(row))
        return fields, count

    def _modify(self, fields: _Fields, kind: str, negate: int, absolute: int | None) -> None:
        if kind not in _FLOATS:
            return
        if self._chance(40):
            fields.put(negate, 1, 1)
            fields.modifiers.add("neg")
        if absolute is not None and self._chance(40):
            fields.put(absolute, 1, 1)
            fields.modifiers.add("abs")

    def _sdwa(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields()
        self._vector_opcode(row, fields)
        fields.put(0, 9, 249)
        sources = self._sources(row)
        may_be_scalar = not self._reads_vcc(row)
        for index, kind in enumerate(sources[:2]):
            at = (32, 9)[index]
            if may_be_scalar and self._chance(25) and dwords_of(kind) == 1:
                fields.put(at, 8, self._sgpr())
                fields.put((55, 63)[index], 1, 1)
                may_be_scalar = False
            else:
                fields.put(at, 8, self._vgpr(dwords_of(kind)))
            fields.put((48, 56)[index], 3, 6 if plain else self._rng.randrange(7))
            if not plain:
                self._modify(fields, kind, (52, 60)[index], (53, 61)[index])
                from_8_bits = "_fp8" in row.mnemonic or "_bf8" in row.mnemonic
                if kind not in _FLOATS and not from_8_bits and self._chance(40):
                    fields.put((51, 59)[index], 1, 1)
                    fields.modifiers.add("sext")
        if row.format == "VOPC":
            if self._chance(70):
                fields.put(47, 1, 1)
                fields.put(40, 7, self._rng.randrange(0, 102, 2))
            return fields, 2
        fields.put(17, 8, self._vector_destination(row))
        whole = "_fp8" in row.mnemonic or "_bf8" in row.mnemonic  # it writes whole registers
        fields.put(40, 3, 6 if plain or whole else self._rng.randrange(7))
        fields.put(43, 2, 0 if whole else 2 if plain else self._rng.randrange(3))
        if not plain and self._chance(30):
            fields.put(45, 1, 1)
            fields.modifiers.add("clamp")
        if not plain and row.result[0] in _FLOATS and self._chance(30):
            fields.put(46, 2, self._rng.randint(1, 3))
            fields.modifiers.add("omod")
        return fields, 2

    def _dpp(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields()
        self._vector_opcode(row, fields)
        fields.put(0, 9, 250)
        sources = self._sources(row)
        if sources:
            fields.put(32, 8, self._vgpr(dwords_of(sources[0])))
        if len(sources) > 1:
            fields.put(9, 8, self._vgpr(dwords_of(sources[1])))
        if row.format != "VOPC":
            fields.put(17, 8, self._vector_destination(row))
        shifts = [base + n for base in (0x100, 0x110, 0x120) for n in range(1, 16)]
        others = [0x130, 0x134, 0x138, 0x13C, 0x140, 0x141, 0x142, 0x143]
        broadcasts = list(range(0x150, 0x160))
        wide = 2 in [dwords_of(kind) for kind in (*sources, row.result[0])]
        kinds = [broadcasts] if wide else [range(256), shifts, others, broadcasts]
        control = self._rng.choice(self._rng.choice(kinds))
        fields.put(40, 9, control)
        fields.put(51, 1, self._bits(1))
        fields.put(56, 4, self._bits(4))
        fields.put(60, 4, self._bits(4))
        if not plain:
            for index, kind in enumerate(sources[:2]):
                self._modify(fields, kind, (52, 54)[index], (53, 55)[index])
        return fields, 2

    def _vop3(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        base = {"VOPC": 0, "VOP2": 0x100, "VOP1": 0x140, "VOP3": 0}[row.format]
        fields = _Fields((26, 6, 0x34), (16, 10, base + row.opcode))
        role = row.result[1]
        fields.put(0, 8, self._sgpr(2) if role == "lane_mask" else self._vector_destination(row))
        if role == "with_carry":
            fields.put(8, 7, self._sgpr(2))
        if "bitop3" in row.mnemonic:  # a truth table instead of modifiers
            for low, width in ((61, 3), (8, 3), (59, 2)):
                fields.put(low, width, self._bits(width))
        # One SGPR, or pair of them, is all that an instruction can read.
        scalar = self._sgpr(2) if self._reads_vcc(row) else None
        operands = [pair for pair in row.sources if pair[1] in ("source", "lane_bit")]
        for index, (kind, source_role) in enumerate(operands):
            if source_role == "lane_bit":
                assert scalar is not None
                value = scalar
            elif "readlane" in row.mnemonic or "writelane" in row.mnemonic:
                is_data = index == 0 and "readlane" in row.mnemonic
                value = 256 + self._vgpr() if is_data else self._lane_source(scalar)
            elif self._needs_vgpr(row, kind) or self._chance(55):
                value = 256 + self._vgpr(dwords_of(kind))
            elif scalar is None and self._chance(40):
                value = self._sgpr(dwords_of(kind))
            else:
                value = self._constant()
            if value < 128:
                scalar = value
            fields.put(32 + 9 * index, 9, value)
            if not plain and source_role == "source":
                self._modify(fields, kind, 61 + index, None if role == "with_carry" else 8 + index)
                if kind in _HALVES and row.format == "VOP3" and self._chance(30):
                    fields.put(11 + index, 1, 1)
                    fields.modifiers.add("op_sel")
        if not plain:
            self._modify_vop3_result(row, fields)
        return fields, 2

    def _lane_source(self, scalar: int | None) -> int:
        """An SGPR or a constant, as lane numbers are."""
        return self._rng.choice(
            (self._sgpr() if scalar is None else scalar, self._rng.randint(128, 191))
        )

    def _needs_vgpr(self, row: Definition, kind: str) -> bool:
        # LLVM knows no constant of two floats.
        pairs_of_floats = "sr_pk_fp4_f32" in row.mnemonic
        return dwords_of(kind) > 2 or "swap" in row.mnemonic or pairs_of_floats

    def _modify_vop3_result(self, row: Definition, fields: _Fields) -> None:
        kind = row.result[0]
        if self._chance(30) and "bitop3" not in row.mnemonic and "swap" not in row.mnemonic:
            fields.put(15, 1, 1)
            fields.modifiers.add("clamp")
        if kind in _FLOATS and self._chance(30):
            fields.put(59, 2, self._rng.randint(1, 3))
            fields.modifiers.add("omod")
        if kind in _HALVES and row.format == "VOP3" and self._chance(30):
            fields.put(14, 1, 1)
            fields.modifiers.add("op_sel")

    def _vop3p(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields((23, 9, 0x1A7), (16, 7, row.opcode), (0, 8, self._vector_destination(row)))
        sources = self._sources(row)
        scalar_left = True
        for index, kind in enumerate(sources):
            moves = "accvgpr" in row.mnemonic
            if self._chance(55) or "accvgpr_read" in row.mnemonic:
                value = 256 + self._vgpr(dwords_of(kind))
            elif scalar_left and self._chance(40) and not moves:
                value = self._sgpr(dwords_of(kind))
                scalar_left = False
            else:
                value = self._constant()
            fields.put(32 + 9 * index, 9, value)
        count = len(sources)
        is_mix = "_mix" in row.mnemonic
        ones = (1 << count) - 1
        op_sel, op_sel_hi, neg_lo, neg_hi = 0, 0 if is_mix else 7, 0, 0
        if not plain and "accvgpr" not in row.mnemonic:
            if self._chance(50) and "dot" not in row.mnemonic:
                op_sel = self._bits(count)
                op_sel_hi = (op_sel_hi & ~ones) | self._bits(count)
                fields.modifiers.add("op_sel")
            if self._chance(50):
                neg_lo, neg_hi = self._bits(count), self._bits(count)
                fields.modifiers.add("neg")
            if self._chance(30):
                fields.put(15, 1, 1)
                fields.modifiers.add("clamp")
        fields.put(8, 3, neg_hi)
        fields.put(11, 3, op_sel)
        fields.put(14, 1, op_sel_hi >> 2)
        fields.put(59, 2, op_sel_hi & 3)
        fields.put(61, 3, neg_lo)
        return fields, 2

    # ---- Matrix instructions ----

    def _matrix_operands(
        self, row: Definition, fields: _Fields, base: int, cbsz: int, blgp: int
    ) -> None:
        a, b, c = row.registers
        if "f8f6f4" in row.mnemonic:
            a, b = ((8, 8, 6, 6, 4)[code] for code in (cbsz, blgp))
        accumulates = self._bits(1)
        destination = self._vgpr(c)
        fields.put(base, 8, destination)
        fields.put(base + 15, 1, accumulates)
        fields.put(base + 32, 9, 256 + self._vgpr(a))
        fields.put(base + 41, 9, 256 + self._vgpr(b))
        fields.put(base + 59, 2, self._bits(2))
        if "smfmac" in row.mnemonic:
            fields.put(base + 50, 9, 256 + self._vgpr())
        elif self._chance(60):
            fields.put(base + 50, 9, 256 + destination)  # it must not overlap in part
        else:
            fields.put(base + 50, 9, self._constant())

    def _mfma(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields((23, 9, 0x1A7), (16, 7, row.opcode))
        cbsz, abid, blgp = 0, 0, 0
        if "f8f6f4" in row.mnemonic:
            cbsz, blgp = self._rng.randrange(5), self._rng.randrange(5)
        elif not plain:
            # Products of doubles negate with blgp's bits; SMFMAC's indices leave no room for it.
            if "f64" not in row.mnemonic:
                cbsz, abid = self._bits(3), self._bits(4)
            if "smfmac" not in row.mnemonic:
                blgp = self._bits(3)
            fields.modifiers.update({"cbsz"} if cbsz or abid else (), {"blgp"} if blgp else ())
        self._matrix_operands(row, fields, 0, cbsz, blgp)
        fields.put(8, 3, cbsz)
        fields.put(11, 4, abid)
        fields.put(61, 3, blgp)
        return fields, 2

    def _mfma_scale(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        fields = _Fields((16, 16, 0xD3AC))
        for position in (32, 41):
            fields.put(position, 9, 256 + self._vgpr())
        fields.put(11, 2, self._bits(2))
        fields.put(59, 2, self._bits(2))
        cbsz, blgp = self._rng.randrange(5), self._rng.randrange(5)
        fields.put(64 + 23, 9, 0x1A7)
        fields.put(64 + 16, 7, row.opcode)
        self._matrix_operands(row, fields, 64, cbsz, blgp)
        fields.put(64 + 8, 3, cbsz)
        fields.put(64 + 61, 3, blgp)
        # LLVM sets it in the first half of these.
        fields.put(64 + 11, 4, 1)
        return fields, 4

    # ---- Memory ----

    def _ds(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        data0, data1, result = row.registers
        fields = _Fields((26, 6, 0x36), (17, 8, row.opcode))
        without_address = ("ds_append", "ds_consume", "ds_nop", "addtid", "gws_sema_v")
        without_address += ("gws_sema_p", "gws_sema_release_all")
        fields.put(16, 1, int("gws" in row.mnemonic))
        if row.mnemonic != "ds_nop":
            fields.put(0, 16, self._bits(16))
        if not any(name in row.mnemonic for name in without_address):
            # LLVM wants the register of the latter to be even.
            fields.put(32, 8, self._vgpr(2 if "gws" in row.mnemonic else 1))
        if data0 or data1 or result:
            fields.put(25, 1, self._bits(1))
        for position, dwords in ((40, data0), (48, data1), (56, result)):
            if dwords:
                fields.put(position, 8, self._vgpr(dwords))
        return fields, 2

    def _cache(self, row: Definition, fields: _Fields, positions: tuple[int, int, int]) -> bool:
        """sc0, nt, sc1. Returns whether an atomic returns."""
        sc0 = self._bits(1)
        for position, value in zip(positions, (sc0, self._bits(1), self._bits(1)), strict=True):
            fields.put(position, 1, value)
        return row.unit != "vmem_atomic" or bool(sc0)

    def _buffer_address(self, fields: _Fields) -> None:
        offen, idxen = self._bits(1), self._bits(1)
        for place in ((0, 12, self._bits(12)), (12, 1, offen), (13, 1, idxen)):
            fields.put(*place)
        if offen + idxen:
            fields.put(32, 8, self._vgpr(offen + idxen))
        fields.put(48, 5, self._sgpr(4, special=False) // 4)
        fields.put(56, 8, self._rng.choice([self._sgpr(), self._constant()]))

    def _mubuf(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        data, result, _ = row.registers
        fields = _Fields((26, 6, 0x38), (18, 7, row.opcode))
        if not data and not result:  # cache control
            fields.put(14, 1, self._bits(1))
            fields.put(15, 1, self._bits(1))
            return fields, 2
        self._cache(row, fields, (14, 17, 15))
        self._buffer_address(fields)
        loads_lds = row.mnemonic in (
            *("buffer_load_ubyte", "buffer_load_sbyte", "buffer_load_ushort"),
            *("buffer_load_sshort", "buffer_load_dword"),
            *(("buffer_load_dwordx3", "buffer_load_dwordx4") if self._chip == "gfx950" else ()),
        )
        if loads_lds and not plain and self._chance(50):
            fields.put(16, 1, 1)
            fields.modifiers.add("lds")
        else:
            fields.put(40, 8, self._vgpr(max(data, result)))
            fields.put(55, 1, self._bits(1))
        return fields, 2

    def _mtbuf(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        data, result, _ = row.registers
        fields = _Fields((26, 6, 0x3A), (15, 4, row.opcode))
        fields.put(19, 4, self._rng.randint(1, 14))  # data format
        fields.put(23, 3, self._rng.choice((0, 1, 2, 3, 4, 5, 7)))  # number format
        self._cache(row, fields, (14, 54, 53))
        self._buffer_address(fields)
        fields.put(40, 8, self._vgpr(max(data, result)))
        fields.put(55, 1, self._bits(1))
        return fields, 2

    def _flat(self, row: Definition, plain: bool) -> tuple[_Fields, int]:
        data, result, _ = row.registers
        segment = {"FLAT": 0, "SCRATCH": 1, "GLOBAL": 2}[row.format]
        fields = _Fields(
            (26, 6, 0x37),
            (18, 7, row.opcode),
            (14, 2, segment),
            (0, 13, self._bits(12 if segment == 0 else 13)),
        )
        returns = self._cache(row, fields, (16, 17, 25))
        accumulation = self._bits(1)
        has_scalar = segment and self._bits(1)
        scalar = self._sgpr(1 if segment == 1 else 2, special=False) if has_scalar else None
        if segment:
            fields.put(48, 7, 0x7F if scalar is None else scalar)
        has_vaddr = segment != 1 or bool(self._bits(1))
        if segment == 1:
            fields.put(13, 1, int(has_vaddr))
        if has_vaddr:
            fields.put(32, 8, self._vgpr(1 if segment == 1 or scalar is not None else 2))
        if data:
            fields.put(40, 8, self._vgpr(data))
        if result and returns:
            fields.put(56, 8, self._vgpr(result))
        if data or (result and returns):
            # LLVM has some atomics without accumulation registers, and forgets sc1 of f64's.
            if row.unit == "vmem_atomic" and (plain or "f64" in row.mnemonic):
                accumulation = 0
            elif row.unit == "vmem_atomic" and accumulation:
                fields.modifiers.add("accumulation")
            fields.put(55, 1, accumulation)
        return fields, 2


def encodings(
    rows: Sequence[Definition], chip: str, rng: random.Random, *, samples: int
) -> Iterator[Encoding]:
    """`samples` plain and as many modified encodings of each form of each row."""
    encoder = Encoder(chip, rng)
    for row in rows:
        if chip in row.chips:
            for form in encoder.forms(row):
                for index in range(2 * samples):
                    yield encoder.encode(row, form, plain=index < samples)
