"""VOP3's conversions to and from fp8, bf8, fp6, bf6 and fp4, scaled and stochastic."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from lane_checks import LaneCheck, check_lanes
from models.number_formats import BF16, F16, F32, Format
from models.small_floats import SmallFormat, of_chip
from models.vector_alu import Environment, fields
from models.vop3_convert import FORMATS, as_small, is_conversion, narrow, next_random, widen
from programs import LANES, register_name
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


# ---- Every row -----------------------------------------------------------------------------------

_COUNTS = {None: 1, "pk_": 2, "pk32_": 32, "2xpk16_": 32}
_NARROWING = re.compile(r"v_cvt_(scalef32_)?(sr_)?(pk_|pk32_|2xpk16_)?(\w+)_(f32|f16|bf16)")
_WIDENING = re.compile(r"v_cvt_scalef32_(pk_|pk32_)?(f32|f16|bf16)_(\w+)")


def _dword_lists(sources: Sequence[Sequence[int] | int]) -> list[Sequence[int]]:
    return [[each] if isinstance(each, int) else each for each in sources]


def _narrowing(name: str, arch: str, rng: random.Random) -> Iterator[LaneCheck]:
    """To fp8, bf8, fp6, bf6, fp4, f16 or bf16, into every part of the destination."""
    found = _NARROWING.fullmatch(name)
    assert found
    is_scaled, is_stochastic, packing, to, source = found.groups()
    count, number = _COUNTS[packing], FORMATS[source]
    small = as_small(FORMATS[to]) if to in FORMATS else of_chip(to, arch)
    bits = count * small.width
    parts = max(1, 32 // bits)
    is_pair = bool(is_stochastic) and number is F32 and count == 2
    in_source = 2 if is_pair else 32 // number.width
    # MODE.FP16_OVFL is not emulated for halves; 32 elements take long.
    modes = (False,) if to in FORMATS or count == 32 else (False, True)
    for part, saturates in product(range(parts), modes):
        scales = _scales(rng) if is_scaled else _ONES
        draw = _floats if number is F32 or count == 1 else _pairs
        rows = [draw(small, number, rng, scales) for _ in range(max(1, count * number.width // 32))]
        sources: dict[str, list[Any]] = {f"v{2 + k}": row for k, row in enumerate(rows)}
        if packing == "2xpk16_":
            sources = {"v[8:23]": rows[:16], "v[24:39]": rows[16:]}
        elif count == 32:
            sources = {register_name("v", 8, len(rows)): rows}
        elif is_pair:
            sources = {"v[2:3]": [x | y << 32 for x, y in zip(*rows, strict=True)]}
        sources |= {"v40": _bits(rng)} if is_stochastic else {}
        sources |= {"v41": scales} if is_scaled else {}

        def model(old: Any, *given: Any, part: int = part, saturates: bool = saturates) -> Any:
            values = list(given)
            scale = values.pop() if is_scaled else None
            chosen = values.pop() if is_stochastic else None
            # Two sources take turns.
            dwords = [x for group in zip(*_dword_lists(values), strict=True) for x in group]
            elements = [x for each in dwords for x in fields(each, number.width, in_source)]
            codes = _codes(small, number, elements[:count], scale, chosen, saturates=saturates)
            return _insert(old, codes, part, bits) if bits < 32 else fields(codes, 32, bits // 32)

        chosen_part = [part & 1, part >> 1] if parts == 4 else [part] if parts == 2 else []
        zeros = [0] * (2 if parts == 4 else len(sources))
        destination = register_name("v", 0, max(1, bits // 32))
        code = f"{name} {destination}, {', '.join(sources)}"
        if chosen_part:
            code += f" op_sel:[{','.join(map(str, zeros + chosen_part))}]"
        old: list[Any] = _bits(rng) if bits < 32 else [_bits(rng) for _ in range(bits // 32)]
        yield LaneCheck(
            code, destination, old, sources, model, FORMATS.get(to), mode=_mode(saturates)
        )


def _widening(name: str, rng: random.Random) -> Iterator[LaneCheck]:
    """From every part of the source; a half alone goes into either half of the destination."""
    found = _WIDENING.fullmatch(name)
    assert found
    count, number, small = _COUNTS[found[1]], FORMATS[found[2]], of_chip(found[3], "gfx950")
    bits, results = count * small.width, count * number.width
    parts, words = max(1, 32 // bits), max(1, 32 // results)
    for part, word in product(range(parts), range(words)):

        def model(old: Any, a: Any, scale: int, part: int = part, word: int = word) -> Any:
            (dwords,) = _dword_lists([a])
            codes = sum(dword << (32 * i) for i, dword in enumerate(dwords)) >> bits * part
            values = [
                widen(small, code, number, scale) for code in fields(codes, small.width, count)
            ]
            together = sum(value << number.width * i for i, value in enumerate(values))
            if count == 32:
                return fields(together, 32, number.width)
            return _insert(old, together, word, results)

        op_sel = [part & 1, part >> 1, word] if parts == 4 else [part, 0, 0]
        if count == 32:  # the result overlaps the source
            destination = register_name("v", 8, results // 32)
            sources = {"v[2:7]": [_bits(rng) for _ in range(6)], "v0": _scales(rng)}
            old = [_bits(rng) for _ in range(results // 32)]
            code = f"{name} {destination}, {', '.join(sources)}"
        else:
            destination = register_name("v", 0, max(1, results // 32))
            sources, old = {"v2": _bits(rng), "v3": _scales(rng)}, _bits(rng, max(32, results))
            code = f"{name} {destination}, v2, v3 op_sel:[{','.join(map(str, op_sel))}]"
        yield LaneCheck(code, destination, old, sources, model, number)


def test_every_row(emulator, arch, seed):
    rng = random.Random(seed)
    rows = [row for row in emulator.definitions() if row.format == "VOP3" and arch in row.chips]
    checks = []
    for name in filter(is_conversion, (row.mnemonic for row in rows)):
        is_widening = _WIDENING.fullmatch(name)
        checks += _widening(name, rng) if is_widening else _narrowing(name, arch, rng)
    check_lanes(emulator, arch, checks)


# ---- Modifiers and MODE --------------------------------------------------------------------------


def test_signs_of_sources(emulator, arch, seed):
    rng = random.Random(seed)
    small = of_chip("fp8", arch)

    def model(old: int, a: int, b: int) -> int:
        return _insert(old, _codes(small, F32, (a ^ F32.sign, b & ~F32.sign)), 0, 16)

    sources = {f"v{2 + k}": _floats(small, F32, rng, _ONES) for k in range(2)}
    code = "v_cvt_pk_fp8_f32 v0, -v2, |v3|"
    check_lanes(emulator, arch, [LaneCheck(code, "v0", _bits(rng), sources, model)])


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
