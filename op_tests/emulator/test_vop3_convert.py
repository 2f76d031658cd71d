"""VOP3's conversions to and from fp8, bf8, fp6, bf6 and fp4, scaled and stochastic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from models.number_formats import BF16, F16, F32, Format
from models.small_floats import SmallFormat, of_chip
from models.vector_alu import Environment, fields
from models.vop3_convert import FORMATS, narrow, next_random, stochastic_half, widen
from programs import LANES, Array, Segment, run
from vector_cases import random_values

from jitfmha.emulator import Emulator

_FP16_OVFL = 1 << 23
_EXEC = 0xFF00_FFFF_FFFF_FFFE


@dataclass
class _Check:
    """An instruction, registers by name, and the model of one lane: (old, *sources) -> dwords."""

    code: str
    destination: str
    old: list[list[int]]
    sources: dict[str, list[list[int]]]
    model: Callable[..., list[int]]
    result: Format | None = None  # of the elements, where NaN compares as equal
    mode: int = Environment().bits
    _: int = field(default=0, repr=False)

    def segment(self) -> Segment:
        inputs: dict[str, Array | int] = {}
        for name, rows in {self.destination: self.old, **self.sources}.items():
            array = np.array(rows, np.uint32)
            if array.shape[0] == 2 and "[" in name:
                wide = array.astype(np.uint64)
                inputs[name] = wide[0] | wide[1] << np.uint64(32)
            else:
                inputs[name] = array if "[" in name else array[0]
        inputs |= {"exec": _EXEC, "mode": self.mode}
        return Segment(self.code, inputs, [self.destination])

    def _parts(self, dword: int) -> list[int]:
        if self.result is None or self.result is F32:
            return [dword]
        return fields(dword, 16, 2)

    def failures(self, result: dict[str, Array]) -> list[str]:
        values = result[self.destination]
        if len(self.old) == 1:
            values = values[None]
        elif len(self.old) == 2:
            values = np.stack([values & 0xFFFFFFFF, values >> np.uint64(32)])
        wrong = []
        for lane in range(LANES):
            old = [row[lane] for row in self.old]
            sources = [[row[lane] for row in rows] for rows in self.sources.values()]
            expected = self.model(old, *sources) if _EXEC >> lane & 1 else old
            actual = [int(row[lane]) for row in values]
            number = self.result
            for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
                for got, wanted in zip(self._parts(x), self._parts(y), strict=True):
                    if got != wanted and not (
                        number and number.is_nan(got) and number.is_nan(wanted)
                    ):
                        shown = " ".join(f"{bits:x}" for source in sources for bits in source[:4])
                        wrong.append(f"    lane {lane}, dword {i}: ({shown}) gave {x:x}, not {y:x}")
        return wrong


def _run(emulator: Emulator, arch: str, checks: list[_Check]) -> None:
    results = run(emulator, arch, [each.segment() for each in checks])
    report = []
    for each, result in zip(checks, results, strict=True):
        wrong = each.failures(result)
        if wrong:
            report += [f"{each.code}  mode 0x{each.mode:x}", *wrong[:3]]
    assert not report, "\n".join(report[:60])


# ---- Values --------------------------------------------------------------------------------------


def _near(small: SmallFormat, number: Format, rng: random.Random, scale: int) -> int:
    """A float that scales to a value of the format, between two of them, or beside a tie."""
    value = small.value(rng.randrange(small.largest + 1))
    above = small.value(rng.randrange(small.largest + 1))
    assert not isinstance(value, float)
    assert not isinstance(above, float)
    exponent = min(254, max(1, scale >> 23 & 255)) - 127
    middle = rng.choice((value, (value + above) / 2, value * 17 / 16, value * 33 / 32))
    bits = number.round(middle * (1 << 140) * (1 << (exponent + 140)) / (1 << 280), 0)
    bits = max(0, min(number.infinity - 1, bits + rng.choice((0, 0, -1, 1))))
    return bits | rng.choice((0, number.sign))


def _floats(small: SmallFormat, number: Format, rng: random.Random, scales: list[int]) -> list[int]:
    if number is BF16:
        any_bits = [bits >> 16 for bits in random_values("f32", rng, LANES)]
    else:
        any_bits = random_values("f32" if number is F32 else "f16", rng, LANES)
    return [
        _near(small, number, rng, scale) if rng.random() < 0.75 else bits
        for scale, bits in zip(scales, any_bits, strict=True)
    ]


def _scales(rng: random.Random) -> list[int]:
    """Small powers, and any exponent, with a sign and a mantissa that do not matter."""
    return [
        (
            rng.randrange(120, 135)
            if rng.random() < 0.8
            else rng.choice((0, 1, 254, 255, rng.randrange(256)))
        )
        << 23
        | rng.choice((0, rng.getrandbits(23), 1 << 31))
        for _ in range(LANES)
    ]


def _bits(rng: random.Random) -> list[int]:
    return [rng.getrandbits(32) for _ in range(LANES)]


def _pairs(
    small: SmallFormat, number: Format, rng: random.Random, scales: list[int]
) -> list[list[int]]:
    """Two numbers, in registers of their own or in one."""
    low, high = (_floats(small, number, rng, scales) for _ in range(2))
    return [low, high] if number is F32 else [[x | y << 16 for x, y in zip(low, high, strict=True)]]


def _elements(number: Format, source: list[int]) -> list[int]:
    return source if number is F32 else [half for dword in source for half in fields(dword, 16, 2)]


def _insert(old: int, value: int, index: int, width: int) -> int:
    mask = ((1 << width) - 1) << (width * index)
    return old & ~mask | value << (width * index)


# ---- Without a scale -----------------------------------------------------------------------------


def test_floats_to_8_bits(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    ones = [127 << 23] * LANES
    for name in ("fp8", "bf8"):
        small = of_chip(name, arch)
        for saturates in (False, True):
            mode = Environment().bits | (_FP16_OVFL if saturates else 0)
            for word in range(2):

                def pair(
                    old: list[int], a: list[int], b: list[int],
                    small: SmallFormat = small, saturates: bool = saturates, word: int = word,
                ) -> list[int]:  # fmt: skip
                    low, high = (narrow(small, F32, x[0], saturates=saturates) for x in (a, b))
                    return [_insert(old[0], low | high << 8, word, 16)]

                sources = {f"v{2 + k}": [_floats(small, F32, rng, ones)] for k in range(2)}
                code = f"v_cvt_pk_{name}_f32 v0, v2, v3" + " op_sel:[0,0,1]" * word
                checks.append(_Check(code, "v0", [_bits(rng)], sources, pair, mode=mode))
            for byte in range(4):

                def one(
                    old: list[int], a: list[int], r: list[int],
                    small: SmallFormat = small, saturates: bool = saturates, byte: int = byte,
                ) -> list[int]:  # fmt: skip
                    code = narrow(small, F32, a[0], random=r[0], saturates=saturates)
                    return [_insert(old[0], code, byte, 8)]

                sources = {"v2": [_floats(small, F32, rng, ones)], "v3": [_bits(rng)]}
                code = f"v_cvt_sr_{name}_f32 v0, v2, v3 op_sel:[0,0,{byte & 1},{byte >> 1}]"
                checks.append(_Check(code, "v0", [_bits(rng)], sources, one, mode=mode))
    _run(emulator, arch, checks)


def test_signs_of_sources(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    small = of_chip("fp8", arch)

    def model(old: list[int], a: list[int], b: list[int]) -> list[int]:
        low = narrow(small, F32, a[0] ^ F32.sign)
        high = narrow(small, F32, b[0] & ~F32.sign)
        return [old[0] & 0xFFFF0000 | low | high << 8]

    sources = {f"v{2 + k}": [_floats(small, F32, rng, [127 << 23] * LANES)] for k in range(2)}
    code = "v_cvt_pk_fp8_f32 v0, -v2, |v3|"
    _run(emulator, arch, [_Check(code, "v0", [_bits(rng)], sources, model)])


def test_stochastic_halves(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for name in ("f16", "bf16"):
        number = FORMATS[name]
        for word in range(2):

            def model(
                old: list[int],
                a: list[int],
                r: list[int],
                number: Format = number,
                word: int = word,
            ) -> list[int]:
                return [
                    _insert(old[0], stochastic_half(number, a[0], r[0], saturates=False), word, 16)
                ]

            sources = {"v2": [random_values("f32", rng, LANES)], "v3": [_bits(rng)]}
            code = f"v_cvt_sr_{name}_f32 v0, v2, v3" + " op_sel:[0,0,1]" * word
            checks.append(_Check(code, "v0", [_bits(rng)], sources, model, number))
    _run(emulator, "gfx950", checks)


# ---- Scaled --------------------------------------------------------------------------------------


def test_scaled_pairs(emulator: Emulator, seed: int) -> None:
    """To fp8, bf8 and fp4, with the other parts of the destination kept."""
    rng = random.Random(seed)
    checks = []
    for name in ("fp8", "bf8", "fp4"):
        small = of_chip(name, "gfx950")
        for source, number in FORMATS.items():
            for i in range(4):
                part = i if name == "fp4" else i % 2
                saturates = i > 1
                scales = _scales(rng)

                def model(
                    old: list[int], *sources: list[int], small: SmallFormat = small,
                    number: Format = number, part: int = part, saturates: bool = saturates,
                ) -> list[int]:  # fmt: skip
                    *values, scale = [x for source in sources for x in source]
                    low, high = (
                        narrow(small, number, x, scale=scale, saturates=saturates)
                        for x in _elements(number, values)
                    )
                    return [_insert(old[0], low | high << small.width, part, 2 * small.width)]

                rows = _pairs(small, number, rng, scales)
                sources = {f"v{2 + k}": [row] for k, row in enumerate(rows)} | {"v4": [scales]}
                op_sel = (0, 0, part & 1, part >> 1) if name == "fp4" else (0, 0, 0, part)
                if number is not F32 and name != "fp4":
                    op_sel = (0, 0, part)  # type: ignore[assignment]
                code = f"v_cvt_scalef32_pk_{name}_{source} v0, " + ", ".join(sources)
                code += f" op_sel:[{','.join(map(str, op_sel))}]"
                mode = Environment().bits | (_FP16_OVFL if saturates else 0)
                checks.append(_Check(code, "v0", [_bits(rng)], sources, model, mode=mode))
    _run(emulator, "gfx950", checks)


def test_scaled_stochastic(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for source, number in FORMATS.items():
        for name in ("fp8", "bf8"):
            small = of_chip(name, "gfx950")
            for byte in range(4):

                def one(
                    old: list[int], a: list[int], r: list[int], scale: list[int],
                    small: SmallFormat = small, number: Format = number, byte: int = byte,
                ) -> list[int]:  # fmt: skip
                    bits = a[0] & (2 * number.sign - 1)
                    code = narrow(small, number, bits, scale=scale[0], random=r[0])
                    return [_insert(old[0], code, byte, 8)]

                scales = _scales(rng)
                sources = {
                    "v2": [_floats(small, number, rng, scales)], "v3": [_bits(rng)], "v4": [scales]
                }  # fmt: skip
                code = f"v_cvt_scalef32_sr_{name}_{source} v0, v2, v3, v4"
                code += f" op_sel:[0,0,{byte & 1},{byte >> 1}]"
                checks.append(_Check(code, "v0", [_bits(rng)], sources, one))
        small = of_chip("fp4", "gfx950")
        for byte in range(4):

            def pair(
                old: list[int], a: list[int], r: list[int], scale: list[int],
                small: SmallFormat = small, number: Format = number, byte: int = byte,
            ) -> list[int]:  # fmt: skip
                low, high = _elements(number, a)
                code = narrow(small, number, low, scale=scale[0], random=r[0])
                code |= narrow(small, number, high, scale=scale[0], random=next_random(r[0])) << 4
                return [_insert(old[0], code, byte, 8)]

            scales = _scales(rng)
            register = "v[2:3]" if number is F32 else "v2"
            sources = {
                register: _pairs(small, number, rng, scales), "v4": [_bits(rng)], "v5": [scales]
            }  # fmt: skip
            code = f"v_cvt_scalef32_sr_pk_fp4_{source} v0, {register}, v4, v5"
            code += f" op_sel:[0,0,{byte & 1},{byte >> 1}]"
            checks.append(_Check(code, "v0", [_bits(rng)], sources, pair))
    _run(emulator, "gfx950", checks)


def test_widening(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for name in ("fp8", "bf8", "fp4"):
        small = of_chip(name, "gfx950")
        for target, number in FORMATS.items():
            for part in range(4 if name == "fp4" else 2):

                def pair(
                    old: list[int], a: list[int], scale: list[int],
                    small: SmallFormat = small, number: Format = number, part: int = part,
                ) -> list[int]:  # fmt: skip
                    position = 2 * small.width * part
                    low, high = (
                        widen(
                            small,
                            a[0] >> (position + small.width * k) & (2 * small.sign - 1),
                            number,
                            scale[0],
                        )
                        for k in range(2)
                    )
                    return [low, high] if number is F32 else [low | high << 16]

                destination = "v[0:1]" if number is F32 else "v0"
                old = [_bits(rng) for _ in range(2 if number is F32 else 1)]
                op_sel = f"{part & 1},{part >> 1},0" if name == "fp4" else f"{part},0,0"
                code = f"v_cvt_scalef32_pk_{target}_{name} {destination}, v2, v3 op_sel:[{op_sel}]"
                sources = {"v2": [_bits(rng)], "v3": [_scales(rng)]}
                checks.append(_Check(code, destination, old, sources, pair, number))
    for name in ("fp8", "bf8"):
        small = of_chip(name, "gfx950")
        for target, number in (("f32", F32), ("f16", F16)):
            for i in range(8 if number is F16 else 4):
                byte, word = i % 4, i // 4

                def one(
                    old: list[int], a: list[int], scale: list[int],
                    small: SmallFormat = small, number: Format = number,
                    byte: int = byte, word: int = word,
                ) -> list[int]:  # fmt: skip
                    value = widen(small, a[0] >> (8 * byte) & 255, number, scale[0])
                    return [value if number is F32 else _insert(old[0], value, word, 16)]

                code = f"v_cvt_scalef32_{target}_{name} v0, v2, v3"
                code += f" op_sel:[{byte & 1},{byte >> 1},{word}]"
                sources = {"v2": [_bits(rng)], "v3": [_scales(rng)]}
                checks.append(_Check(code, "v0", [_bits(rng)], sources, one, number))
    _run(emulator, "gfx950", checks)


# ---- 32 elements of 6 bits -----------------------------------------------------------------------


def _packed(codes: list[int]) -> list[int]:
    return fields(sum(code << (6 * i) for i, code in enumerate(codes)), 32, 6)


def _six_bit_sources(
    small: SmallFormat, number: Format, rng: random.Random, scales: list[int], count: int
) -> list[list[int]]:
    columns = [_floats(small, number, rng, scales) for _ in range(count)]
    if number is F32:
        return columns
    return [
        [x | y << 16 for x, y in zip(low, high, strict=True)]
        for low, high in zip(columns[::2], columns[1::2], strict=True)
    ]


def test_32_elements_to_6_bits(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for name in ("fp6", "bf6"):
        small = of_chip(name, "gfx950")
        for source, number in FORMATS.items():
            for stochastic in (False, True):

                def model(
                    old: list[int], *sources: list[int], small: SmallFormat = small,
                    number: Format = number, stochastic: bool = stochastic,
                ) -> list[int]:  # fmt: skip
                    *values, scale = sources
                    chosen: int | None = None
                    if stochastic:
                        *values, (chosen,) = values
                    elements = [_elements(number, part) for part in values]
                    # Two sources take turns.
                    in_order = [x for group in zip(*elements, strict=True) for x in group]
                    codes = []
                    for bits in in_order:
                        codes.append(narrow(small, number, bits, scale=scale[0], random=chosen))
                        chosen = None if chosen is None else next_random(chosen)
                    return _packed(codes)

                scales = _scales(rng)
                rows = _six_bit_sources(small, number, rng, scales, 32)
                if number is not F32:
                    registers = {"v[8:23]": rows}
                elif stochastic:
                    registers = {"v[8:39]": rows}
                else:
                    registers = {"v[8:23]": rows[:16], "v[24:39]": rows[16:]}
                if stochastic:
                    registers["v40"] = [_bits(rng)]
                registers["v41"] = [scales]
                count = "2xpk16" if number is F32 and not stochastic else "pk32"
                code = f"v_cvt_scalef32_{'sr_' * stochastic}{count}_{name}_{source} v[0:5], "
                code += ", ".join(registers)
                old = [_bits(rng) for _ in range(6)]
                checks.append(_Check(code, "v[0:5]", old, registers, model))
    _run(emulator, "gfx950", checks)


def test_32_elements_of_6_bits(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for name in ("fp6", "bf6"):
        small = of_chip(name, "gfx950")
        for target, number in FORMATS.items():

            def model(
                old: list[int], a: list[int], scale: list[int],
                small: SmallFormat = small, number: Format = number,
            ) -> list[int]:  # fmt: skip
                together = sum(dword << (32 * i) for i, dword in enumerate(a))
                values = [widen(small, code, number, scale[0]) for code in fields(together, 6, 32)]
                if number is F32:
                    return values
                return [x | y << 16 for x, y in zip(values[::2], values[1::2], strict=True)]

            count = 32 if number is F32 else 16
            destination = f"v[8:{7 + count}]"
            # The result overlaps the source.
            code = f"v_cvt_scalef32_pk32_{target}_{name} {destination}, v[2:7], v0"
            sources = {"v[2:7]": [_bits(rng) for _ in range(6)], "v0": [_scales(rng)]}
            old = [_bits(rng) for _ in range(count)]
            checks.append(_Check(code, destination, old, sources, model, number))
    _run(emulator, "gfx950", checks)


def test_denormals_of_floats_are_what_mode_says(emulator: Emulator, seed: int) -> None:
    """Those of the small formats are kept."""
    rng = random.Random(seed)
    small = of_chip("fp4", "gfx950")
    flushing = Environment(denormal32=0).bits
    denormals = [rng.randrange(1, 1 << 23) | rng.choice((0, F32.sign)) for _ in range(LANES)]
    lowest = [0] * LANES  # 2 ** -127

    def to_small(old: list[int], a: list[int], b: list[int], scale: list[int]) -> list[int]:
        codes = [narrow(small, F32, F32.flush(x[0]), scale=scale[0]) for x in (a, b)]
        return [old[0] & ~0xFF | codes[0] | codes[1] << 4]

    def to_float(old: list[int], a: list[int], scale: list[int]) -> list[int]:
        return [F32.flush(widen(small, a[0] >> 4 * k & 15, F32, scale[0])) for k in range(2)]

    _run(
        emulator,
        "gfx950",
        [
            _Check(
                "v_cvt_scalef32_pk_fp4_f32 v0, v2, v3, v4", "v0", [_bits(rng)],
                {"v2": [denormals], "v3": [denormals[::-1]], "v4": [lowest]}, to_small,
                mode=flushing,
            ),
            _Check(
                "v_cvt_scalef32_pk_f32_fp4 v[0:1], v2, v3", "v[0:1]", [_bits(rng), _bits(rng)],
                {"v2": [_bits(rng)], "v3": [lowest]}, to_float, F32, mode=flushing,
            ),
        ],
    )  # fmt: skip
