"""Random assembly of every row of the instruction tables, which LLVM takes or refuses.

A row's operands come from the emulator's own text of an encoding that has hardly more than the
opcode; registers, constants, forms and modifiers are drawn. LLVM judges whether that is an
instruction, and which bits it has.
"""

import itertools
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from assembled_words import assemble_each

from jitfmha.emulator import Definition, Emulator

_V0 = 0x100 << 32 | 0x100 << 41 | 0x100 << 50
_OFF = 0x7F << 48
# CBSZ and BLGP, which say how long A and B of some products are.
_LENGTHS = [cbsz << 8 | blgp << 61 for cbsz in (0, 2, 4) for blgp in (0, 2, 4)]
# Format -> the opcode's lowest bit, and encodings that differ in which operands they have; from the
# ISA documents' microcode formats.
_ENCODINGS: dict[str, tuple[int, list[int]]] = {
    "SOP1": (8, [0x17D << 23]),
    "SOP2": (23, [2 << 30]),
    "SOPC": (16, [0x17E << 23]),
    "SOPK": (23, [0xB << 28]),
    "SOPP": (16, [0x17F << 23]),
    "SMEM": (18, [0x30 << 26 | offsets for offsets in (1 << 17, 0, 1 << 17 | 1 << 14)]),
    "VOP1": (9, [0x3F << 25 | 0x100]),
    "VOP2": (25, [0x100]),
    "VOPC": (17, [0x3E << 25 | 0x100]),
    "VOP3": (16, [0x34 << 26 | first for first in (_V0, 0x100 << 32, 0x80 << 32)]),
    "VOP3P": (16, [0x1A7 << 23 | _V0]),
    "MFMA": (16, [0x1A7 << 23 | _V0 | lengths for lengths in _LENGTHS]),
    "MFMA_SCALE": (
        64 + 16,
        [0xD3AC << 16 | _V0 | (0x1A7 << 23 | _V0 | lengths) << 64 for lengths in _LENGTHS],
    ),
    "DS": (17, [0x36 << 26 | gds << 16 for gds in (0, 1)]),
    # Neither offset nor index, either, both; loads into LDS; atomics that return.
    "MUBUF": (18, [0x38 << 26 | flags << 12 for flags in (0, 1, 2, 3, 0x11, 5)]),
    "MTBUF": (15, [0x3A << 26 | flags << 12 for flags in range(4)]),
    "FLAT": (18, [0x37 << 26 | sc0 << 16 for sc0 in (0, 1)]),
    "GLOBAL": (18, [0x37 << 26 | 2 << 14 | more for more in (_OFF, 0, 1 << 16, 1 << 16 | _OFF)]),
    "SCRATCH": (18, [0x37 << 26 | 1 << 14 | more for more in (_OFF, 0, 1 << 13, 1 << 13 | _OFF)]),
}

# #n is a number of n bits, {a|b} one of several, [*] a bit for each operand.
_PART = "{BYTE_0|BYTE_1|BYTE_2|BYTE_3|WORD_0|WORD_1|DWORD}"
_DPP = (
    "{quad_perm:[#2,#2,#2,#2]|row_shl:#4|row_shr:#4|row_ror:#4|row_newbcast:#4|row_mirror|"
    "row_half_mirror|wave_shl:1|wave_rol:1|wave_shr:1|wave_ror:1|row_bcast:15|row_bcast:31}"
    " row_mask:#4 bank_mask:#4"
)
_OUTPUT = ("clamp", "{mul:2|mul:4|div:2}")
_CACHE = ("sc0", "nt", "sc1")
_MODIFIERS: dict[str, tuple[str, ...]] = {
    "SMEM": ("glc",),
    "e64": _OUTPUT,
    "VOP3": (*_OUTPUT, "op_sel:[*]"),
    "sdwa": (
        *(*_OUTPUT, f"src0_sel:{_PART}", f"src1_sel:{_PART}"),
        f"dst_sel:{_PART} dst_unused:{{UNUSED_PAD|UNUSED_SEXT|UNUSED_PRESERVE}}",
    ),
    "dpp": ("bound_ctrl:1",),
    "VOP3P": ("op_sel:[*]", "op_sel_hi:[*]", "neg_lo:[*]", "neg_hi:[*]", "clamp"),
    "MFMA": ("cbsz:#3", "abid:#4", "blgp:#3", "neg:[#1,#1,#1]"),
    "MFMA_SCALE": ("op_sel:[#1,#1,0]", "op_sel_hi:[#1,#1,0]", "cbsz:#1", "blgp:#1"),
    "DS": ("offset:#16", "offset0:#8", "offset1:#8"),
    "MUBUF": ("offset:#12", *_CACHE),
    "MTBUF": ("offset:#12", *_CACHE, "format:#7"),
    "FLAT": ("offset:#12", *_CACHE),
    "GLOBAL": ("offset:{#12|-#12}", *_CACHE),
    "SCRATCH": ("offset:{#12|-#12}", *_CACHE),
}
_FORMS = ("e64", "sdwa", "dpp")
_WITH_SOURCES = ("SOP1", "SOP2", "SOPC", "VOP1", "VOP2", "VOPC", "VOP3", "VOP3P")
_SIGNS = {
    **dict.fromkeys(("e64", "VOP3", "VOP3P", "dpp"), ("-{}", "|{}|", "-|{}|", "neg({})")),
    "sdwa": ("-{}", "|{}|", "-|{}|", "sext({})"),
}
_CONSTANTS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0")
_CONSTANTS += ("0.15915494", "0.15915494309189532")
# By dwords.
_NAMED = {
    1: ("vcc_lo", "vcc_hi", "m0", "exec_hi", "flat_scratch_lo", "xnack_mask_hi", "ttmp3"),
    2: ("vcc", "exec", "flat_scratch", "xnack_mask", "ttmp[2:3]"),
    4: ("ttmp[4:7]",),
}
_STATUS = ("src_scc", "src_vccz", "src_execz")
_STATUS += ("src_shared_base", "src_shared_limit", "src_private_base", "src_private_limit")
_TOKEN = re.compile(r"\b(?:([vas])(?:0\b|\[0:(\d+)\])|vcc\b|0x0\b|0\b|\w+\(.*\))")
_HOLE = re.compile(r"#(\d+)|\{([^{}]*)\}|\[(\*)\]")


class Drawn(NamedTuple):
    """A line of assembly, and what it was made of.

    Attributes:
        encoding: the number of that of the format which its operands are from.
        form: the row's format, or e64, sdwa or dpp.
        modifiers: before their numbers were drawn.
    """

    row: Definition
    encoding: int
    form: str
    modifiers: tuple[str, ...]
    text: str


class Texts:
    """Draws lines of the rows of one chip."""

    def __init__(self, emulator: Emulator, chip: str, rng: random.Random) -> None:
        self._emulator = emulator
        self._chip = chip
        self._rng = rng
        self.rows = [row for row in emulator.definitions() if chip in row.chips]

    def assembled(self, samples: int) -> Iterator[tuple[Drawn, tuple[int, ...] | None]]:
        """Lines of each row with LLVM's dwords, None where it refuses them.

        Each encoding in each form, each modifier alone, and `samples` of all together.
        """
        drawn = [line for row in self.rows for line in self._lines(row, samples)]
        words = assemble_each([line.text for line in drawn], self._chip)
        yield from zip(drawn, words, strict=True)

    def _lines(self, row: Definition, samples: int) -> Iterator[Drawn]:
        templates = self._templates(row)
        assert templates, f"no encoding is decoded of {row.mnemonic}"
        has_forms = row.format in ("VOP1", "VOP2", "VOPC") and " " in templates[0][1]
        forms = (row.format, *_FORMS) if has_forms else (row.format,)
        for template, form in itertools.product(templates, forms):
            yield self._draw(row, template, form, (), is_plain=True)
        for form in forms:
            for modifier in _MODIFIERS.get(form, ()):
                yield self._draw(row, templates[0], form, (modifier,), is_plain=True)
        for _ in range(samples):
            form = self._rng.choice(forms)
            possible = _MODIFIERS.get(form, ())
            modifiers = tuple(each for each in possible if self._rng.randrange(4) == 0)
            yield self._draw(row, self._rng.choice(templates), form, modifiers, is_plain=False)

    def _templates(self, row: Definition) -> list[tuple[int, str]]:
        """The emulator's text of each encoding that it decodes."""
        at, encodings = _ENCODINGS[row.format]
        templates = []
        for number, encoding in enumerate(encodings):
            bits = encoding | row.opcode << at
            words = [bits >> 32 * i & 0xFFFFFFFF for i in range(4)]
            text, length = self._emulator.disassemble(self._chip, words)
            if length:
                # What zeros in these fields mean is a modifier that nobody drew.
                templates.append((number, re.sub(r" (op_sel_hi|format):\S+", "", text)))
        return templates

    def _draw(
        self,
        row: Definition,
        template: tuple[int, str],
        form: str,
        modifiers: tuple[str, ...],
        *,
        is_plain: bool,
    ) -> Drawn:
        """A line; a plain one has registers alone for operands."""
        encoding, text = template
        mnemonic, _, listed = text.partition(" ")
        if form in _FORMS:
            mnemonic = f"{mnemonic.removesuffix('_e32')}_{form}"
        # Of a pair of numbers, nobody says which one a sign or a constant is for.
        is_pair = form != "VOP3P" and any(kind.endswith("x2") for kind, _ in row.sources)
        operands = listed.split(", ")
        for i, operand in enumerate(operands):
            is_source = i > 0 and (row.format in _WITH_SOURCES or (i == 3 and "mfma" in mnemonic))
            is_source = is_source and not is_pair
            operands[i] = _TOKEN.sub(
                lambda token, is_source=is_source: (
                    self._plain(token) if is_plain else self._other(token, row, is_source)
                ),
                operand,
            )
            may_be_signed = form in _SIGNS and is_source and not is_plain
            if may_be_signed and self._rng.randrange(4) == 0:
                operands[i] = self._rng.choice(_SIGNS[form]).format(operands[i])
        if "v_mfma" in mnemonic and len(operands) > 3 and (is_plain or self._rng.randrange(2)):
            operands[3] = operands[0]  # C must not overlap D in part
        always = [_DPP] if form == "dpp" else ["bitop3:#8"] if "bitop3" in mnemonic else []
        line = " ".join([mnemonic, ", ".join(operands), *always, *modifiers])
        return Drawn(row, encoding, form, modifiers, self._filled(line, len(operands)))

    def _filled(self, text: str, operands: int) -> str:
        def fill(hole: re.Match[str]) -> str:
            if hole[1]:
                return str(self._rng.getrandbits(int(hole[1])))
            if hole[2]:
                return self._rng.choice(hole[2].split("|"))
            count = operands - self._rng.randrange(2)
            return f"[{','.join(str(self._rng.getrandbits(1)) for _ in range(count))}]"

        while (filled := _HOLE.sub(fill, text)) != text:
            text = filled
        return text

    def _plain(self, token: re.Match[str]) -> str:
        """Another register of that file and length, an even one, or another number."""
        if token[1]:
            return self._register(token[1], int(token[2] or 0) + 1, step=2)
        return token[0] if token[0] == "vcc" else str(self._rng.getrandbits(2))

    def _other(self, token: re.Match[str], row: Definition, is_source: bool) -> str:
        """What may stand in that place, in one instruction or another."""
        file, dwords, kind = token[1], int(token[2] or 0) + 1, self._rng.randrange(8)
        if token[0] == "vcc":
            return self._rng.choice(("vcc", self._register("s", 2)))
        if not file:
            number = self._rng.getrandbits(self._rng.choice((4, 7, 16, 21)))
            return str(-number if kind == 0 and row.format in ("SMEM", "SOPK") else number)
        if kind == 0 and file == "v":
            return self._register("a", dwords)
        if kind < 5 or not (is_source or file == "s"):
            return self._register(file, dwords)
        if kind == 5:
            return self._register("s", dwords)
        if kind == 6:
            has_status = row.format in _WITH_SOURCES and (
                file == "v" or (is_source and row.format[0] == "S")
            )
            return self._rng.choice(_NAMED.get(dwords, ("off",)) + _STATUS * has_status)
        small, literal = self._rng.randint(-16, 64), self._rng.getrandbits(32)
        return self._rng.choice((*_CONSTANTS, str(small), str(small), hex(literal)))

    def _register(self, file: str, dwords: int, step: int = 1) -> str:
        step = max(step, min(dwords, 4 if file == "s" else 2))
        first = self._rng.randrange(0, (102 if file == "s" else 256) - dwords + 1, step)
        return f"{file}{first}" if dwords == 1 else f"{file}[{first}:{first + dwords - 1}]"
