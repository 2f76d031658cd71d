"""VOP3's conversions to and from fp8, bf8, fp6, bf6 and fp4, scaled and stochastic."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product

from lane_checks import LaneCheck, check_lanes
from models.number_formats import BF16, F16, F32, Format
from models.small_floats import SmallFormat, of_chip
from models.vector_alu import Environment, fields
from models.vop3_convert import FORMATS, narrow, next_random, stochastic_half, widen
from programs import LANES
from vector_cases import random_values

_ONES = [127 << 23] * LANES


def _mode(saturates: bool) -> int:
    return Environment().bits | saturates << 23


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
    any_bits = random_values("f16" if number is F16 else "f32", rng, LANES)
    return [
        _near(small, number, rng, scale) if rng.random() < 0.75 else bits >> 16 * (number is BF16)
        for scale, bits in zip(scales, any_bits, strict=True)
    ]


def _scales(rng: random.Random) -> list[int]:
    """Small powers, and any exponent, with a sign and a mantissa that do not matter."""
    scales = []
    for _ in range(LANES):
        exponent = rng.choice((0, 1, 254, 255, rng.randrange(256)))
        exponent = rng.randrange(120, 135) if rng.random() < 0.8 else exponent
        scales.append(exponent << 23 | rng.choice((0, rng.getrandbits(23), 1 << 31)))
    return scales


def _bits(rng: random.Random, width: int = 32) -> list[int]:
    return [rng.getrandbits(width) for _ in range(LANES)]


def _pairs(small: SmallFormat, number: Format, rng: random.Random, scales: list[int]) -> list[int]:
    """Two numbers beside each other."""
    low, high = (_floats(small, number, rng, scales) for _ in range(2))
    return [x | y << number.width for x, y in zip(low, high, strict=True)]


# ---- One lane ------------------------------------------------------------------------------------


def _codes(
    small: SmallFormat,
    number: Format,
    elements: Iterable[int],
    scale: int | None = None,
    random: int | None = None,
    *,
    saturates: bool = False,
) -> int:
    """Floats as codes beside each other; each takes a random number of its own."""
    together = 0
    for i, bits in enumerate(elements):
        code = narrow(small, number, bits, scale=scale, random=random, saturates=saturates)
        together |= code << small.width * i
        random = None if random is None else next_random(random)
    return together


def _insert(old: int, value: int, index: int, width: int) -> int:
    mask = ((1 << width) - 1) << (width * index)
    return old & ~mask | value << (width * index)


def _widened_pair(small: SmallFormat, number: Format, codes: int, scale: int) -> int:
    low, high = (widen(small, code, number, scale) for code in fields(codes, small.width, 2))
    return low | high << number.width


# ---- Without a scale -----------------------------------------------------------------------------


def test_floats_to_8_bits(emulator, arch, seed):
    rng = random.Random(seed)

    def pair(name: str, saturates: bool, word: int) -> LaneCheck:
        def model(old: int, a: int, b: int) -> int:
            return _insert(old, _codes(small, F32, (a, b), saturates=saturates), word, 16)

        small = of_chip(name, arch)
        sources = {f"v{2 + k}": _floats(small, F32, rng, _ONES) for k in range(2)}
        code = f"v_cvt_pk_{name}_f32 v0, v2, v3" + " op_sel:[0,0,1]" * word
        return LaneCheck(code, "v0", _bits(rng), sources, model, mode=_mode(saturates))

    def one(name: str, saturates: bool, byte: int) -> LaneCheck:
        def model(old: int, a: int, r: int) -> int:
            return _insert(old, _codes(small, F32, (a,), random=r, saturates=saturates), byte, 8)

        small = of_chip(name, arch)
        sources = {"v2": _floats(small, F32, rng, _ONES), "v3": _bits(rng)}
        code = f"v_cvt_sr_{name}_f32 v0, v2, v3 op_sel:[0,0,{byte & 1},{byte >> 1}]"
        return LaneCheck(code, "v0", _bits(rng), sources, model, mode=_mode(saturates))

    forms = list(product(("fp8", "bf8"), (False, True)))
    checks = [pair(*form, word) for form in forms for word in range(2)]
    check_lanes(emulator, arch, checks + [one(*form, byte) for form in forms for byte in range(4)])


def test_signs_of_sources(emulator, arch, seed):
    rng = random.Random(seed)
    small = of_chip("fp8", arch)

    def model(old: int, a: int, b: int) -> int:
        return _insert(old, _codes(small, F32, (a ^ F32.sign, b & ~F32.sign)), 0, 16)

    sources = {f"v{2 + k}": _floats(small, F32, rng, _ONES) for k in range(2)}
    code = "v_cvt_pk_fp8_f32 v0, -v2, |v3|"
    check_lanes(emulator, arch, [LaneCheck(code, "v0", _bits(rng), sources, model)])


def test_stochastic_halves(emulator, seed):
    rng = random.Random(seed)

    def check(name: str, word: int) -> LaneCheck:
        def model(old: int, a: int, r: int) -> int:
            return _insert(old, stochastic_half(FORMATS[name], a, r, saturates=False), word, 16)

        sources = {"v2": random_values("f32", rng, LANES), "v3": _bits(rng)}
        code = f"v_cvt_sr_{name}_f32 v0, v2, v3" + " op_sel:[0,0,1]" * word
        return LaneCheck(code, "v0", _bits(rng), sources, model, FORMATS[name])

    checks = [check(name, word) for name in ("f16", "bf16") for word in range(2)]
    check_lanes(emulator, "gfx950", checks)


# ---- Scaled --------------------------------------------------------------------------------------


def test_scaled_pairs(emulator, seed):
    """To fp8, bf8 and fp4, with the other parts of the destination kept."""
    rng = random.Random(seed)

    def check(name: str, source: str, i: int) -> LaneCheck:
        def model(old: int, *sources: int) -> int:
            *values, scale = sources
            elements = values if number is F32 else fields(values[0], 16, 2)
            codes = _codes(small, number, elements, scale, saturates=saturates)
            return _insert(old, codes, part, 2 * small.width)

        small, number, scales = of_chip(name, "gfx950"), FORMATS[source], _scales(rng)
        part, saturates = i if name == "fp4" else i % 2, i > 1
        if number is F32:
            contents = [_floats(small, number, rng, scales) for _ in range(2)]
        else:
            contents = [_pairs(small, number, rng, scales)]
        sources = {f"v{2 + k}": content for k, content in enumerate(contents)} | {"v4": scales}
        op_sel = f"0,0,{part & 1},{part >> 1}" if name == "fp4" else f"0,0,{part}"
        op_sel = f"0,0,0,{part}" if number is F32 and name != "fp4" else op_sel
        code = f"v_cvt_scalef32_pk_{name}_{source} v0, {', '.join(sources)} op_sel:[{op_sel}]"
        return LaneCheck(code, "v0", _bits(rng), sources, model, mode=_mode(saturates))

    forms = product(("fp8", "bf8", "fp4"), FORMATS, range(4))
    check_lanes(emulator, "gfx950", [check(*form) for form in forms])


def test_scaled_stochastic(emulator, seed):
    rng = random.Random(seed)

    def check(name: str, source: str, byte: int) -> LaneCheck:
        def model(old: int, a: int, r: int, scale: int) -> int:
            elements = fields(a, number.width, 2 if name == "fp4" else 1)
            return _insert(old, _codes(small, number, elements, scale, r), byte, 8)

        small, number, scales = of_chip(name, "gfx950"), FORMATS[source], _scales(rng)
        register = "v[2:3]" if name == "fp4" and number is F32 else "v2"
        draw = _pairs if name == "fp4" else _floats
        sources = {register: draw(small, number, rng, scales), "v4": _bits(rng), "v5": scales}
        code = f"v_cvt_scalef32_sr_{'pk_' * (name == 'fp4')}{name}_{source} v0, "
        code += f"{register}, v4, v5 op_sel:[0,0,{byte & 1},{byte >> 1}]"
        return LaneCheck(code, "v0", _bits(rng), sources, model)

    forms = product(("fp8", "bf8", "fp4"), FORMATS, range(4))
    check_lanes(emulator, "gfx950", [check(*form) for form in forms])


def test_widening(emulator, seed):
    rng = random.Random(seed)

    def pair(name: str, target: str, part: int) -> LaneCheck:
        def model(old: int, a: int, scale: int) -> int:
            return _widened_pair(small, number, a >> 2 * small.width * part, scale)

        small, number = of_chip(name, "gfx950"), FORMATS[target]
        destination = "v[0:1]" if number is F32 else "v0"
        op_sel = f"{part & 1},{part >> 1},0" if name == "fp4" else f"{part},0,0"
        code = f"v_cvt_scalef32_pk_{target}_{name} {destination}, v2, v3 op_sel:[{op_sel}]"
        sources = {"v2": _bits(rng), "v3": _scales(rng)}
        return LaneCheck(code, destination, _bits(rng, 2 * number.width), sources, model, number)

    def one(name: str, target: str, byte: int, word: int) -> LaneCheck:
        def model(old: int, a: int, scale: int) -> int:
            value = widen(small, a >> (8 * byte) & 255, number, scale)
            return _insert(old, value, word, number.width)

        small, number = of_chip(name, "gfx950"), FORMATS[target]
        code = f"v_cvt_scalef32_{target}_{name} v0, v2, v3 op_sel:[{byte & 1},{byte >> 1},{word}]"
        sources = {"v2": _bits(rng), "v3": _scales(rng)}
        return LaneCheck(code, "v0", _bits(rng), sources, model, number)

    checks = [pair(*form) for form in product(("fp8", "bf8"), FORMATS, range(2))]
    checks += [pair("fp4", target, part) for target in FORMATS for part in range(4)]
    checks += [one(*form, 0) for form in product(("fp8", "bf8"), ("f32", "f16"), range(4))]
    checks += [one(name, "f16", byte, 1) for name in ("fp8", "bf8") for byte in range(4)]
    check_lanes(emulator, "gfx950", checks)


# ---- 32 elements of 6 bits -----------------------------------------------------------------------


def test_32_elements_to_6_bits(emulator, seed):
    rng = random.Random(seed)

    def check(name: str, source: str, stochastic: bool) -> LaneCheck:
        def model(old: list[int], *sources: list[int] | int) -> list[int]:
            *values, scale = sources
            chosen = values.pop() if stochastic else None
            # Two sources take turns.
            dwords = [x for group in zip(*values, strict=True) for x in group]
            elements = [
                x for each in dwords for x in fields(each, number.width, 32 // number.width)
            ]
            return fields(_codes(small, number, elements, scale, chosen), 32, 6)

        small, number, scales = of_chip(name, "gfx950"), FORMATS[source], _scales(rng)
        draw = _floats if number is F32 else _pairs
        rows = [draw(small, number, rng, scales) for _ in range(number.width)]
        registers = {f"v[8:{7 + len(rows)}]": rows}
        if number is F32 and not stochastic:
            registers = {"v[8:23]": rows[:16], "v[24:39]": rows[16:]}
        sources = registers | ({"v40": _bits(rng)} if stochastic else {}) | {"v41": scales}
        count = "2xpk16" if number is F32 and not stochastic else "pk32"
        code = f"v_cvt_scalef32_{'sr_' * stochastic}{count}_{name}_{source} v[0:5], "
        old = [_bits(rng) for _ in range(6)]
        return LaneCheck(code + ", ".join(sources), "v[0:5]", old, sources, model)

    forms = product(("fp6", "bf6"), FORMATS, (False, True))
    check_lanes(emulator, "gfx950", [check(*form) for form in forms])


def test_32_elements_of_6_bits(emulator, seed):
    rng = random.Random(seed)

    def check(name: str, target: str) -> LaneCheck:
        def model(old: list[int], a: list[int], scale: int) -> list[int]:
            codes = fields(sum(dword << (32 * i) for i, dword in enumerate(a)), 6, 32)
            values = [widen(small, code, number, scale) for code in codes]
            together = sum(value << number.width * i for i, value in enumerate(values))
            return fields(together, 32, number.width)

        small, number = of_chip(name, "gfx950"), FORMATS[target]
        destination = f"v[8:{7 + number.width}]"
        # The result overlaps the source.
        code = f"v_cvt_scalef32_pk32_{target}_{name} {destination}, v[2:7], v0"
        sources = {"v[2:7]": [_bits(rng) for _ in range(6)], "v0": _scales(rng)}
        old = [_bits(rng) for _ in range(number.width)]
        return LaneCheck(code, destination, old, sources, model, number)

    forms = product(("fp6", "bf6"), FORMATS)
    check_lanes(emulator, "gfx950", [check(*form) for form in forms])


def test_denormals_of_floats_are_what_mode_says(emulator, seed):
    """Those of the small formats are kept."""
    rng = random.Random(seed)
    small, flushing = of_chip("fp4", "gfx950"), Environment(denormal32=0).bits
    denormals = [rng.randrange(1, 1 << 23) | rng.choice((0, F32.sign)) for _ in range(LANES)]
    lowest = [0] * LANES  # 2 ** -127

    def to_small(old: int, a: int, b: int, scale: int) -> int:
        return _insert(old, _codes(small, F32, map(F32.flush, (a, b)), scale), 0, 8)

    def to_float(old: int, a: int, scale: int) -> int:
        low, high = map(F32.flush, fields(_widened_pair(small, F32, a, scale), 32, 2))
        return low | high << 32

    code = "v_cvt_scalef32_pk_fp4_f32 v0, v2, v3, v4"
    sources = {"v2": denormals, "v3": denormals[::-1], "v4": lowest}
    checks = [LaneCheck(code, "v0", _bits(rng), sources, to_small, mode=flushing)]
    code = "v_cvt_scalef32_pk_f32_fp4 v[0:1], v2, v3"
    sources = {"v2": _bits(rng), "v3": lowest}
    checks.append(LaneCheck(code, "v[0:1]", _bits(rng, 64), sources, to_float, F32, flushing))
    check_lanes(emulator, "gfx950", checks)
