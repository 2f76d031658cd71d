"""Instructions of the vector ALU in all their forms against the models of one lane.

A `Form` says how an instruction is written: encoding, modifiers, SDWA, DPP, MODE. `check` runs many
`Case`s of instruction and form in one program, on random and edge values, with some lanes inactive.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from models.number_formats import BF16, F16, F32, F64, Format
from models.vector_alu import Environment, Operation, clamped, fields, same, saturate, signed
from numpy.typing import NDArray
from programs import LANES, Array, Segment, run

from jitfmha.emulator import Emulator

FLOATS: dict[str, Format] = {"f16": F16, "f32": F32, "f64": F64, "n32": F32}
# What a destination holds: the half beside a 16-bit result has to be right, too.
_NUMBERS = FLOATS | {"p16": F16, "h16": F16, "hb16": BF16}
# Pairs of halves: p16, pb16 as sources, h16, hb16 as results of conversions.
WIDTHS = {"mask": 1, "p16": 32, "pb16": 32, "h16": 32, "hb16": 32, "n32": 32} | {
    f"{letter}{width}": width for letter in "uif" for width in (16, 32, 64)
}
_WORDS = {"BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8)} | {
    "WORD_0": (0, 16), "WORD_1": (16, 16), "DWORD": (0, 32)
}  # fmt: skip


@dataclass(frozen=True)
class Sdwa:
    """The part of the destination that is written, what becomes of the rest, parts of sources."""

    destination: str = "DWORD"
    unused: str = "UNUSED_PAD"
    sources: tuple[str, str] = ("DWORD", "DWORD")
    sign_extended: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class Dpp:
    """`control` in assembly, and the source lane of each lane (None: there is none)."""

    control: str
    source: tuple[int | None, ...]
    row_mask: int = 15
    bank_mask: int = 15
    bound_control: bool = False


@dataclass(frozen=True)
class Form:
    """How an instruction is written and under which MODE it runs."""

    encoding: str = "e32"
    negated: tuple[bool, ...] = ()
    absolute: tuple[bool, ...] = ()
    clamp: bool = False
    omod: str = ""
    op_sel: tuple[int, ...] = ()
    sdwa: Sdwa | None = None
    dpp: Dpp | None = None
    environment: Environment = field(default_factory=Environment)
    # The first source from an SGPR, or these bits, a constant of the instruction.
    scalar_source: bool = False
    constant: int | None = None

    @property
    def mask(self) -> str:
        """Where a comparison's result and a carry go."""
        return "s[10:11]" if self.encoding == "e64" else "vcc"

    @property
    def carry_in(self) -> str:
        return "s[12:13]" if self.encoding == "e64" else "vcc"


@dataclass(frozen=True)
class Case:
    name: str
    operation: Operation
    form: Form


# ---- Random values -------------------------------------------------------------------------------


def _float_values(number: Format, rng: random.Random, n: int, *, nan: bool = True) -> list[int]:
    edges = [0, 1, number.sign - 1, number.infinity, number.infinity - 1, (1 << number.mantissa)]
    edges += [(1 << number.mantissa) - 1, number.quiet_nan, number.infinity | 1]
    edges.append((2 << number.mantissa) - 1)  # its half is rounded up to a normal number
    one = (number.sign >> 1) - (1 << number.mantissa)
    edges += [one, one + 1, one - 1, one + (1 << number.mantissa)]
    values = []
    for _ in range(n):
        kind = rng.random()
        if kind < 0.25:
            bits = rng.choice(edges) | rng.choice((0, number.sign))
        elif kind < 0.75:  # near one, so that sums and products say something
            bits = one + rng.randrange(-6 << number.mantissa, 6 << number.mantissa)
            bits |= rng.choice((0, number.sign))
        else:
            bits = rng.getrandbits(number.width)
        if number.is_nan(bits) and not nan:
            bits = one
        values.append(bits)
    return values


def random_values(kind: str, rng: random.Random, n: int) -> list[int]:
    """Bits of `n` values of a type, edges among them."""
    if kind in FLOATS:
        return _float_values(FLOATS[kind], rng, n, nan=kind != "n32")
    if kind in ("p16", "pb16"):
        low, high = (_float_values(F16, rng, n, nan=False) for _ in range(2))
        return [x | y << 16 for x, y in zip(low, high, strict=True)]
    width = WIDTHS[kind]
    edges = [0, 1, 2, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1, width, width - 1]
    return [
        rng.choice(edges) if rng.random() < 0.25
        else rng.getrandbits(rng.choice((width, width, max(1, width // 2), 5)))
        for _ in range(n)
    ]  # fmt: skip


def random_constant(kind: str, rng: random.Random) -> int:
    """Bits of a source that an instruction can hold: of 64 those that 32 stand for."""
    if kind == "f64":
        return random_values(kind, rng, 1)[0] >> 32 << 32
    bits = random_values(kind, rng, 1)[0] if WIDTHS[kind] < 64 else rng.getrandbits(32)
    return signed(bits, 32) & (1 << 64) - 1 if kind == "i64" else bits


# ---- The text ------------------------------------------------------------------------------------


def _registers(first: int, width: int, file: str = "v") -> str:
    return f"{file}[{first}:{first + 1}]" if width == 64 else f"{file}{first}"


def _of_constant(kind: str, bits: int) -> int:
    """What an assembler takes: of a double its upper half."""
    return {"f64": bits >> 32, "i64": signed(bits, 64)}.get(kind, bits)


def _source_text(case: Case, k: int) -> str:
    form, kind = case.form, case.operation.sources[k]
    if k == 0 and form.constant is not None:
        return hex(_of_constant(kind, form.constant))
    file, first = ("s", 4) if k == 0 and form.scalar_source else ("v", 2 + 2 * k)
    text = _registers(first, WIDTHS[kind], file)
    if form.absolute[k : k + 1] == (True,):
        text = f"|{text}|"
    if form.negated[k : k + 1] == (True,):
        text = f"-{text}"
    if form.sdwa and form.sdwa.sign_extended[k]:
        text = f"sext({text})"
    return text


def _text(case: Case) -> str:
    op, form = case.operation, case.form
    operands = []
    if op.result == "mask":
        operands.append(form.mask)
    else:
        operands.append(_registers(0, WIDTHS[op.result]))
    if op.carry_out:
        operands.append(form.mask)
    operands += [
        "0x3555" if k == op.literal else _source_text(case, k) for k in range(len(op.sources))
    ]
    if op.carry_in:
        operands.append(form.carry_in)
    suffix = "" if form.encoding == "vop3" or op.literal is not None else f"_{form.encoding}"
    text = f"{case.name}{suffix} " + ", ".join(operands)
    if case.name.startswith("v_bitop3"):
        text += " bitop3:0x1b"
    if form.op_sel:
        text += f" op_sel:[{','.join(map(str, form.op_sel))}]"
    text += " clamp" * form.clamp + (f" {form.omod}" if form.omod else "")
    if form.sdwa:
        if op.result != "mask":
            text += f" dst_sel:{form.sdwa.destination} dst_unused:{form.sdwa.unused}"
        for k in range(len(op.sources)):
            text += f" src{k}_sel:{form.sdwa.sources[k]}"
    if form.dpp:
        text += f" {form.dpp.control} row_mask:0x{form.dpp.row_mask:x}"
        text += f" bank_mask:0x{form.dpp.bank_mask:x}" + " bound_ctrl:1" * form.dpp.bound_control
    return text


# ---- What it should do ---------------------------------------------------------------------------


def _prepared(case: Case, k: int, bits: int) -> int:
    """A source's register content as the operation takes it."""
    op, form = case.operation, case.form
    kind = op.sources[k]
    width = WIDTHS[kind]
    if form.sdwa:
        position, size = _WORDS[form.sdwa.sources[k]]
        bits = bits >> position & ((1 << size) - 1)
        if form.sdwa.sign_extended[k]:
            bits = signed(bits, size) & 0xFFFFFFFF
    if form.op_sel[k : k + 1] == (1,):
        bits >>= 16
    bits &= (1 << width) - 1
    number = FLOATS.get(kind)
    if number:
        if form.absolute[k : k + 1] == (True,):
            bits &= ~number.sign
        if form.negated[k : k + 1] == (True,):
            bits ^= number.sign
    if not op.raw:
        bits = _flushed(kind, bits, form.environment, 1)
    return signed(bits, width) if kind[0] == "i" else bits


def _flushed(kind: str, bits: int, environment: Environment, bit: int) -> int:
    number = FLOATS.get(kind)
    if kind == "p16":
        if not environment.denormal16_64 & bit:
            low, high = map(F16.flush, fields(bits, 16, 2))
            return low | high << 16
    elif number and not environment.denormal(number) & bit:
        return number.flush(bits)
    return bits


def _output(case: Case, value: int) -> int:
    """A result with the output modifiers, as many bits as its type has."""
    op, form = case.operation, case.form
    kind, environment = op.result, form.environment
    if op.saturates and form.clamp:
        value = saturate(value, kind)
    value &= (1 << WIDTHS[kind]) - 1
    number = FLOATS.get(kind)
    if not op.raw:
        value = _flushed(kind, value, environment, 2)
    if number is None:
        return value
    if form.omod and not environment.ieee and not environment.denormal(number) & 2:
        power = {"mul:2": 1, "mul:4": 2, "div:2": -1}[form.omod]
        value = number.flush(number.power_of_two(value, power, environment.rounding(number)))
        value = 0 if number.is_zero(value) else value
    if form.clamp:
        value = clamped(number, value, environment)
    return value


def _placed(case: Case, value: int, old: int) -> int:
    """The destination's register."""
    op, sdwa = case.operation, case.form.sdwa
    if sdwa and sdwa.destination != "DWORD":
        position, size = _WORDS[sdwa.destination]
        part = ((1 << size) - 1) << position
        rest = 0
        if sdwa.unused == "UNUSED_PRESERVE":
            rest = old & ~part
        elif sdwa.unused == "UNUSED_SEXT" and value >> (size - 1) & 1:
            rest = 0xFFFFFFFF & ~((1 << (position + size)) - 1)
        return value << position & part | rest
    if WIDTHS[op.result] == 16:
        if case.form.op_sel[len(op.sources) :] == (1,):
            return value << 16 | old & 0xFFFF
        if op.keeps_high:
            return value | old & 0xFFFF0000
    return value


class _Prepared:
    """A case with its inputs: the segment, and the check of its results."""

    def __init__(self, case: Case, rng: random.Random, waves: int) -> None:
        self.case = case
        op, form = case.operation, case.form
        self.lanes = LANES * waves
        self.sources = []
        for k, kind in enumerate(op.sources):
            if k == op.literal:
                self.sources.append([0x3555] * self.lanes)
                continue
            if k == 0 and form.scalar_source:
                per_wave = random_values(kind, rng, waves)
                self.sources.append([per_wave[i // LANES] for i in range(self.lanes)])
                continue
            if k == 0 and form.constant is not None:
                self.sources.append([form.constant] * self.lanes)
                continue
            values = random_values(kind, rng, self.lanes)
            if k == 1 and kind == op.sources[0]:
                # Equal values, and integers whose sum is all ones, which hardly any draw meets.
                all_ones = (1 << WIDTHS[kind]) - 1
                masks = (0, all_ones) if kind[0] in "iu" else (0,)
                for lane in rng.sample(range(self.lanes), self.lanes // 8):
                    values[lane] = (self.sources[0][lane] ^ rng.choice(masks)) & all_ones
            if WIDTHS[kind] == 16:  # something in the other half, too
                values = [
                    v | w << 16
                    for v, w in zip(values, random_values(kind, rng, self.lanes), strict=True)
                ]
            self.sources.append(values)
        old_kind = op.result if op.result != "mask" else "u32"
        self.old = random_values(old_kind, rng, self.lanes)
        if WIDTHS[old_kind] == 16:
            self.old = [v | rng.getrandbits(16) << 16 for v in self.old]
        self.exec = [
            rng.choice((2**64 - 1, rng.getrandbits(64), rng.getrandbits(64))) for _ in range(waves)
        ]
        self.carry = [rng.getrandbits(64) for _ in range(waves)]

    def segment(self) -> Segment:
        op, form = self.case.operation, self.case.form
        inputs: dict[str, Array | int] = {"exec": np.array(self.exec, np.uint64)}
        for k, (kind, values) in enumerate(zip(op.sources, self.sources, strict=True)):
            array = np.array(values, np.uint64 if WIDTHS[kind] == 64 else np.uint32)
            if k == 0 and form.scalar_source:
                inputs[_registers(4, WIDTHS[kind], "s")] = array[::LANES].copy()
            elif k != op.literal and not (k == 0 and form.constant is not None):
                inputs[_registers(2 + 2 * k, WIDTHS[kind])] = array
        if op.result != "mask":
            wide = WIDTHS[op.result] == 64
            inputs[_registers(0, WIDTHS[op.result])] = np.array(
                self.old, np.uint64 if wide else np.uint32
            )
        if op.carry_in:
            inputs[form.carry_in] = np.array(self.carry, np.uint64)
        if form.environment != Environment():
            inputs["mode"] = form.environment.bits
        outputs = []
        if op.result != "mask":
            outputs.append(_registers(0, WIDTHS[op.result]))
        if op.result == "mask" or op.carry_out:
            outputs.append(form.mask)
        if op.result == "mask":
            outputs.append("exec")
        return Segment(_text(self.case), inputs, outputs)

    def _active(self, lane: int) -> bool:
        return bool(self.exec[lane // LANES] >> (lane % LANES) & 1)

    def _first_source(self, lane: int) -> tuple[int, bool]:
        """Of a lane, and whether the lane is written."""
        dpp = self.case.form.dpp
        if dpp is None:
            return self.sources[0][lane], True
        in_wave = lane % LANES
        source = dpp.source[in_wave]
        written = bool(
            dpp.row_mask >> (in_wave // 16) & 1 and dpp.bank_mask >> (in_wave // 4 % 4) & 1
        )
        first = lane - in_wave
        if source is None or not self._active(first + source):
            return 0, written and dpp.bound_control
        return self.sources[0][first + source], written

    def failures(self, results: dict[str, NDArray[np.generic]]) -> list[str]:
        op, form = self.case.operation, self.case.form
        masks = [0] * (self.lanes // LANES)
        failures = []
        values = results[_registers(0, WIDTHS[op.result])] if op.result != "mask" else None
        for lane in range(self.lanes):
            first, written = self._first_source(lane)
            written = written and self._active(lane)
            raw = [first] + [source[lane] for source in self.sources[1:]]
            arguments = [_prepared(self.case, k, bits) for k, bits in enumerate(raw)]
            if op.carry_in:
                arguments.append(self.carry[lane // LANES] >> (lane % LANES) & 1)
            old = self.old[lane]
            if op.old:
                content = old & ((1 << WIDTHS[op.result]) - 1)
                content = _flushed(op.result, content, form.environment, 1)
                arguments.append(signed(content, 32) if op.result == "i32" else content)
            result = op.function(form.environment, *arguments)
            if op.carry_out:
                result, bit = result
            elif op.result == "mask":
                bit = result
            else:
                bit = 0
            masks[lane // LANES] |= (bit if written else 0) << (lane % LANES)
            if values is None:
                continue
            expected = _placed(self.case, _output(self.case, result), old) if written else old
            actual = int(values[lane])
            number = FLOATS.get(op.result)
            is_part = form.sdwa is not None and form.sdwa.destination != "DWORD"
            if number and is_part and number.is_nan(result & (2 * number.sign - 1)):
                continue  # a part of a NaN, whose payload nobody promises
            if not same(_NUMBERS.get(op.result), actual, expected):
                shown = ", ".join(f"{x & (2**64 - 1):x}" for x in arguments)
                failures.append(f"lane {lane}: ({shown}) gave {actual:x}, not {expected:x}")
        if op.result == "mask" or op.carry_out:
            actual_masks = [int(x) for x in results[form.mask]]
            if actual_masks != masks:
                failures.append(f"mask {actual_masks[0]:x}, not {masks[0]:x}")
        if op.result == "mask":
            expected_exec = masks if "cmpx" in self.case.name else self.exec
            if [int(x) for x in results["exec"]] != expected_exec:
                failures.append("EXEC is wrong")
        return failures


def check(
    emulator: Emulator, arch: str, cases: Sequence[Case], seed: int, *, waves: int = 2
) -> None:
    """Runs all cases that exist on the chip, and fails with what each got wrong."""
    rng = random.Random(seed)
    prepared = [_Prepared(case, rng, waves) for case in cases if arch in case.operation.archs]
    results = run(emulator, arch, [each.segment() for each in prepared])
    report = []
    for each, result in zip(prepared, results, strict=True):
        failures = each.failures(result)
        if failures:
            report.append(f"{_text(each.case)}  mode 0x{each.case.form.environment.bits:x}")
            report += [f"    {line}" for line in failures[:3]]
    assert not report, "\n".join(report[:60])


# ---- Forms ---------------------------------------------------------------------------------------


def dpp_controls() -> list[Dpp]:
    """Every control, with its source lanes from the ISA documents' table of DPP_CTRL."""
    lanes = range(LANES)
    controls: list[tuple[str, list[int | None]]] = []
    for a, b, c, d in ((0, 1, 2, 3), (3, 0, 1, 2), (2, 2, 0, 1)):
        pattern = (a, b, c, d)
        controls.append(
            (f"quad_perm:[{a},{b},{c},{d}]", [i - i % 4 + pattern[i % 4] for i in lanes])
        )
    for n in (1, 3, 15):
        row_shl = [i + n if i % 16 + n < 16 else None for i in lanes]
        row_shr = [i - n if i % 16 >= n else None for i in lanes]
        row_ror = [i - i % 16 + (i % 16 - n) % 16 for i in lanes]
        controls += [
            (f"row_shl:{n}", row_shl),
            (f"row_shr:{n}", row_shr),
            (f"row_ror:{n}", [*row_ror]),
        ]
    for n in (0, 5, 15):
        controls.append((f"row_newbcast:{n}", [i - i % 16 + n for i in lanes]))
    controls += [
        ("wave_shl:1", [i + 1 if i < 63 else None for i in lanes]),
        ("wave_rol:1", [(i + 1) % 64 for i in lanes]),
        ("wave_shr:1", [i - 1 if i > 0 else None for i in lanes]),
        ("wave_ror:1", [(i - 1) % 64 for i in lanes]),
        ("row_mirror", [i - i % 16 + 15 - i % 16 for i in lanes]),
        ("row_half_mirror", [i - i % 8 + 7 - i % 8 for i in lanes]),
        ("row_bcast:15", [i - i % 16 - 1 if i >= 16 else None for i in lanes]),
        ("row_bcast:31", [31 if i >= 32 else None for i in lanes]),
    ]
    return [Dpp(control, tuple(source)) for control, source in controls]


def random_dpp(rng: random.Random) -> Dpp:
    return replace(
        rng.choice(dpp_controls()),
        row_mask=rng.choice((15, 15, 5, 9)),
        bank_mask=rng.choice((15, 15, 3, 12)),
        bound_control=rng.random() < 0.5,
    )


def random_sdwa(operation: Operation, rng: random.Random) -> Sdwa:
    """Parts that the assembler takes for the operation's types."""
    parts = list(_WORDS)
    is_float = [kind in FLOATS for kind in operation.sources[:2]]
    return Sdwa(
        rng.choice(parts),
        rng.choice(("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")),
        (rng.choice(parts), rng.choice(parts)),
        tuple(not x and rng.random() < 0.4 for x in is_float)[:2],  # type: ignore[arg-type]
    )


def random_environment(rng: random.Random) -> Environment:
    return Environment(
        round32=rng.randrange(4),
        round16_64=rng.randrange(4),
        denormal32=rng.randrange(4),
        denormal16_64=rng.randrange(4),
        ieee=rng.random() < 0.5,
        dx10_clamp=rng.random() < 0.5,
    )


def random_signs(operation: Operation, rng: random.Random) -> dict[str, Any]:
    """neg and abs of the sources that are floating point."""
    negated, absolute = (
        tuple(kind in FLOATS and rng.random() < 0.5 for kind in operation.sources) for _ in range(2)
    )
    return {"negated": negated, "absolute": absolute}
