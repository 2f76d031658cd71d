"""One lane of the vector ALU's instructions, in Python integers, from the ISA documents' words.

An `Operation` takes the lane's sources: floating point and unsigned integers as their bits, signed
integers as signed ones. It returns the result's bits, or whatever integer the exact result is: the
caller takes the low bits, or saturates. Denormals are the caller's too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, floor, pi
from typing import Any

from .number_formats import BF16, DOWN, F16, F32, F64, FORMATS, NEAREST, TO_ZERO, UP, Format


@dataclass(frozen=True)
class Environment:
    """MODE: rounding, which denormals are kept (bit 0 sources, bit 1 results), IEEE, DX10_CLAMP."""

    round32: int = NEAREST
    round16_64: int = NEAREST
    denormal32: int = 3
    denormal16_64: int = 3
    ieee: bool = True
    dx10_clamp: bool = True

    @property
    def bits(self) -> int:
        rounding = self.round32 | self.round16_64 << 2
        denormals = self.denormal32 << 4 | self.denormal16_64 << 6
        return rounding | denormals | self.dx10_clamp << 8 | self.ieee << 9

    def rounding(self, number: Format) -> int:
        return self.round32 if number is F32 else self.round16_64

    def denormal(self, number: Format) -> int:
        return self.denormal32 if number is F32 else self.denormal16_64


Function = Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """An instruction's operands and its result in one lane.

    Attributes:
        result: type of the destination; mask for a comparison.
        sources: types of the source fields.
        function: (environment, *sources) -> result, or (result, carry).
        old: the destination's content is the last argument.
        carry_in: a lane's bit is an argument, after the sources.
        carry_out: the result has a carry.
        keeps_high: a 16-bit result leaves the upper half alone.
        saturates: clamp applies to the exact integer.
        literal: this source is the constant of the instruction (v_fmamk).
        raw: MODE's denormal flushing does not apply.
        archs: where it exists.
    """

    result: str
    sources: tuple[str, ...]
    function: Function
    old: bool = False
    carry_in: bool = False
    carry_out: bool = False
    keeps_high: bool = False
    saturates: bool = False
    literal: int | None = None
    raw: bool = False
    archs: tuple[str, ...] = ("gfx942", "gfx950")


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def fields(value: int, width: int, count: int) -> list[int]:
    return [value >> (width * i) & ((1 << width) - 1) for i in range(count)]


def saturate(value: int, kind: str) -> int:
    width = int(kind[1:])
    low = -(1 << (width - 1)) if kind[0] == "i" else 0
    return max(low, min(low + (1 << width) - 1, value))


def same(number: Format | None, actual: int, expected: int) -> bool:
    """Equal bits, or NaN where NaN is expected; of all numbers of a format that lie in 64 bits."""
    if number is None:
        return actual == expected
    pairs = (fields(bits, number.width, 64 // number.width) for bits in (actual, expected))
    return all(
        x == y or (number.is_nan(x) and number.is_nan(y)) for x, y in zip(*pairs, strict=True)
    )


def clamped(number: Format, bits: int, env: Environment) -> int:
    """To [0, 1]."""
    if number.is_nan(bits):
        return 0 if env.dx10_clamp else bits
    if number.is_negative(bits):
        return 0
    return min(bits, (number.sign >> 1) - (1 << number.mantissa))


def _operation(text: str, function: Function, **more: Any) -> Operation:
    """`text`: "result source source ..."."""
    result, *sources = text.split()
    return Operation(result, tuple(sources), function, **more)


# ---- Floating point ------------------------------------------------------------------------------


def fma(number: Format) -> Function:
    return lambda env, a, b, c: number.fma(a, b, c, env.rounding(number))


def multiply(number: Format) -> Function:
    return lambda env, a, b: number.multiply(a, b, env.rounding(number))


def add(number: Format, flip_a: bool = False, flip_b: bool = False) -> Function:
    signs = number.sign * flip_a, number.sign * flip_b
    return lambda env, a, b: number.add(a ^ signs[0], b ^ signs[1], env.rounding(number))


def _extreme(number: Format, env: Environment, a: int, b: int, *, largest: bool) -> int:
    if env.ieee and number.is_signaling(a):
        return number.quiet(a)
    if env.ieee and number.is_signaling(b):
        return number.quiet(b)
    if number.is_nan(a):
        return b
    if number.is_nan(b):
        return a
    return b if number.less(a, b) == largest else a


def minimum(number: Format) -> Function:
    return lambda env, a, b: _extreme(number, env, a, b, largest=False)


def maximum(number: Format) -> Function:
    return lambda env, a, b: _extreme(number, env, a, b, largest=True)


def three(two: Function) -> Function:
    return lambda env, a, b, c: two(env, two(env, a, b), c)


def _median(number: Format) -> Function:
    largest = maximum(number)

    def equal(a: int, b: int) -> bool:
        return a == b or (number.is_zero(a) and number.is_zero(b))

    def median(env: Environment, a: int, b: int, c: int) -> int:
        if any(map(number.is_nan, (a, b, c))):
            return int(three(minimum(number))(env, a, b, c))
        top = three(largest)(env, a, b, c)
        if equal(top, a):
            return int(largest(env, b, c))
        if equal(top, b):
            return int(largest(env, a, c))
        return int(largest(env, a, b))

    return median


def nan_wins(number: Format, *, largest: bool) -> Function:
    def choose(env: Environment, a: int, b: int) -> int:
        for x in (a, b):
            if number.is_nan(x):
                return number.quiet(x)
        return b if number.less(a, b) == largest else a

    return choose


def _multiply_add_f16(env: Environment, a: int, b: int, c: int) -> int:
    a, b, c = map(F16.flush, (a, b, c))
    product = F16.flush(F16.multiply(a, b, env.round16_64))
    return F16.flush(F16.add(product, c, env.round16_64))


def _multiply_legacy(env: Environment, a: int, b: int) -> int:
    return 0 if F32.is_zero(a) or F32.is_zero(b) else F32.multiply(a, b, env.round32)


def plus_zero(bits: int) -> int:
    """+0 for float32 denormals and -0."""
    return 0 if F32.is_denormal(bits) or F32.is_zero(bits) else bits


def _dot2(half: Format) -> Function:
    """Whatever MODE says, rounded to nearest, with +0 for float32 denormals and -0."""

    def dot2(env: Environment, a: int, b: int, d: int) -> int:
        d = plus_zero(d)
        for x, y in zip(fields(a, 16, 2), fields(b, 16, 2), strict=True):
            wide_x, wide_y = (plus_zero(half.convert(v, F32, NEAREST)) for v in (x, y))
            d = F32.fma(wide_x, wide_y, d, NEAREST)
        return plus_zero(d)

    return dot2


def _to_byte(env: Environment, a: int, index: int, word: int) -> int:
    """0 to 255, rounded as MODE says, in one byte of a word."""
    if F32.is_nan(a) or F32.is_negative(a):
        byte = 0
    elif F32.is_infinite(a) or F32.value(a) >= 255:
        byte = 255
    else:
        value = F32.value(a)
        byte = {NEAREST: round, UP: ceil, DOWN: floor, TO_ZERO: floor}[env.round32](value)
    shift = 8 * (index & 3)
    return word & ~(0xFF << shift) | byte << shift


def _pk_fmac(env: Environment, a: int, b: int, d: int) -> int:
    parts = zip(fields(a, 16, 2), fields(b, 16, 2), fields(d, 16, 2), strict=True)
    low, high = (F16.fma(x, y, z, env.round16_64) for x, y, z in parts)
    return low | high << 16


def _cube(which: str) -> Function:
    def cube(env: Environment, x: int, y: int, z: int) -> int:
        assert not any(map(F32.is_nan, (x, y, z)))
        size_x, size_y, size_z = map(F32.magnitude, (x, y, z))
        minus_x, minus_y, minus_z = (v ^ F32.sign for v in (x, y, z))
        if size_z >= size_x and size_z >= size_y:
            face = (5, minus_x, minus_y, z) if F32.is_below_zero(z) else (4, x, minus_y, z)
        elif size_y >= size_x:
            face = (3, x, minus_z, y) if F32.is_below_zero(y) else (2, x, z, y)
        else:
            face = (1, z, minus_y, x) if F32.is_below_zero(x) else (0, minus_z, minus_y, x)
        identity, s, t, axis = face
        if which == "id":
            return F32.round(Fraction(identity), NEAREST)
        if which == "ma":
            return F32.multiply(F32.round(Fraction(2), NEAREST), axis, env.round32)
        return {"sc": s, "tc": t}[which]

    return cube


def _div_fixup(number: Format, underflow: int | None) -> Function:
    def fixup(env: Environment, quotient: int, denominator: int, numerator: int) -> int:
        sign = (denominator ^ numerator) & number.sign
        if number.is_nan(numerator):
            return number.quiet(numerator)
        if number.is_nan(denominator):
            return number.quiet(denominator)
        zeros = number.is_zero(denominator), number.is_zero(numerator)
        infinities = number.is_infinite(denominator), number.is_infinite(numerator)
        if all(zeros) or all(infinities):
            return number.sign | number.quiet_nan
        if zeros[0] or infinities[1]:
            return sign | number.infinity
        if infinities[0] or zeros[1]:
            return sign
        difference = number.exponent_field(numerator) - number.exponent_field(denominator)
        if underflow is not None and difference < underflow:
            tiny = Fraction(-1 if sign else 1, 1 << 5000)
            return number.round(tiny, env.rounding(number))
        # Not of the denominator, as the documents have it: that is finite here.
        if underflow is not None and number.magnitude(quotient) >= number.infinity:
            huge = Fraction(-1 if sign else 1) * (1 << 5000)
            return number.round(huge, env.rounding(number))
        return sign | number.magnitude(quotient)

    return fixup


def _trig_preop(env: Environment, value: int, segment: int) -> int:
    shift = (segment & 31) * 53
    exponent = F64.exponent_field(value)
    shift += max(0, exponent - 1077)
    bits = (_TWO_OVER_PI << shift) & ((1 << 1201) - 1)
    whole = bits >> (1201 - 53)
    scale = -53 - shift + (128 if exponent >= 1968 else 0)
    return F64.round(Fraction(whole) * Fraction(2) ** scale, env.round16_64)


def _two_over_pi() -> int:
    """1201 bits of the fraction of 2/pi, by Machin's formula."""
    scale = 1 << 1400

    def arctangent_of_inverse(n: int) -> int:
        term, total, k = scale // n, 0, 1
        while term:
            total += term // k if k % 4 == 1 else -(term // k)
            term //= n * n
            k += 2
        return total

    circle = 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))
    assert abs(circle / scale - pi) < 1e-12
    return 2 * scale * scale // circle >> (1400 - 1201)


_TWO_OVER_PI = _two_over_pi()


def _pack_halves(rounding: int, half: Format) -> Function:
    def pack(env: Environment, a: int, b: int) -> int:
        low, high = (F32.convert(x, half, rounding) for x in (a, b))
        if half is F16 and not env.denormal16_64 & 2:
            low, high = F16.flush(low), F16.flush(high)
        return low | high << 16

    return pack


def _norms(number: Format, lowest: int, scale: int) -> Function:
    def one(bits: int) -> int:
        if number.is_nan(bits):
            return 0
        if number.is_infinite(bits):
            value = Fraction(lowest if number.is_negative(bits) else 1)
        else:
            value = max(Fraction(lowest), min(Fraction(1), number.value(bits)))
        return round(value * scale) & 0xFFFF  # Python rounds ties to even

    return lambda env, a, b: one(a) | one(b) << 16


# ---- Integers ------------------------------------------------------------------------------------


def _i24(value: int) -> int:
    return signed(value, 24)


def _u24(value: int) -> int:
    return value & 0xFFFFFF


def _dot_fields(width: int) -> Function:
    def dot(env: Environment, a: int, b: int, d: int) -> int:
        pairs = zip(fields(a, width, 32 // width), fields(b, width, 32 // width), strict=True)
        return d + sum(signed(x, width) * signed(y, width) for x, y in pairs)

    return dot


def _sad(a: int, b: int, *, masked: bool = False, width: int = 8) -> int:
    pairs = zip(fields(a, width, 32 // width), fields(b, width, 32 // width), strict=True)
    return sum(abs(x - y) for x, y in pairs if y or not masked)


def _quad_sad(masked: bool) -> Function:
    def sad(env: Environment, a: int, b: int, c: int) -> int:
        result = 0
        for i, addend in enumerate(fields(c, 16, 4)):
            total = _sad(a >> (8 * i) & 0xFFFFFFFF, b, masked=masked) + addend
            result |= (total & 0xFFFF) << (16 * i)
        return result

    return sad


def _lerp(env: Environment, a: int, b: int, c: int) -> int:
    parts = zip(fields(a, 8, 4), fields(b, 8, 4), fields(c, 8, 4), strict=True)
    return sum((x + y + (z & 1) >> 1) << (8 * i) for i, (x, y, z) in enumerate(parts))


def _pack_saturated(kind: str) -> Function:
    return lambda env, a, b: saturate(a, kind) & 0xFFFF | (saturate(b, kind) & 0xFFFF) << 16


def _bfe_signed(env: Environment, a: int, b: int, c: int) -> int:
    width = c & 31
    return signed(a >> (b & 31), width) if width else 0


def _perm(env: Environment, a: int, b: int, selectors: int) -> int:
    data = fields(a << 32 | b, 8, 8)
    result = 0
    for i, selector in enumerate(fields(selectors, 8, 4)):
        if selector >= 13:
            byte = 0xFF
        elif selector == 12:
            byte = 0
        elif selector >= 8:
            byte = 0xFF * (data[2 * (selector - 8) + 1] >> 7)
        else:
            byte = data[selector]
        result |= byte << (8 * i)
    return result


def _mad_u64(env: Environment, a: int, b: int, c: int) -> tuple[int, int]:
    exact = a * b + c
    return exact, exact >> 64 & 1


def _borrow(env: Environment, a: int, b: int, c: int = 0) -> tuple[int, int]:
    return a - b - c, int(b + c > a)


def _carry(env: Environment, a: int, b: int, c: int = 0) -> tuple[int, int]:
    return a + b + c, int(a + b + c >= 1 << 32)


def _ashr_pk(low: int, high: int) -> Function:
    def pack(env: Environment, a: int, b: int, c: int) -> int:
        x, y = (max(low, min(high, v >> (c & 31))) & 0xFF for v in (a, b))
        return x | y << 8

    return pack


def bitop3(table: int, width: int) -> Function:
    def operate(env: Environment, a: int, b: int, c: int) -> int:
        rows = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(width))
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    return operate


def _choose(env: Environment, a: int, b: int, bit: int) -> int:
    return b if bit else a


def _reverse_borrow(env: Environment, a: int, b: int, c: int = 0) -> tuple[int, int]:
    return _borrow(env, b, a, c)


def _middle(env: Environment, *values: int) -> int:
    return sorted(values)[1]


# ---- VOP2 ----------------------------------------------------------------------------------------


def _vop2() -> dict[str, Operation]:
    o = _operation
    carries = {"carry_in": True, "carry_out": True, "saturates": True}
    table = {
        "v_cndmask_b32": o("u32 f32 f32", _choose, carry_in=True, raw=True),
        "v_mul_i32_i24": o("i32 i32 i32", lambda e, a, b: _i24(a) * _i24(b), saturates=True),
        "v_mul_hi_i32_i24": o("i32 i32 i32", lambda e, a, b: _i24(a) * _i24(b) >> 32),
        "v_mul_u32_u24": o("u32 u32 u32", lambda e, a, b: _u24(a) * _u24(b), saturates=True),
        "v_mul_hi_u32_u24": o("u32 u32 u32", lambda e, a, b: _u24(a) * _u24(b) >> 32),
        "v_lshrrev_b32": o("u32 u32 u32", lambda e, a, b: b >> (a & 31)),
        "v_ashrrev_i32": o("i32 u32 i32", lambda e, a, b: b >> (a & 31)),
        "v_lshlrev_b32": o("u32 u32 u32", lambda e, a, b: b << (a & 31)),
        "v_and_b32": o("u32 u32 u32", lambda e, a, b: a & b),
        "v_or_b32": o("u32 u32 u32", lambda e, a, b: a | b),
        "v_xor_b32": o("u32 u32 u32", lambda e, a, b: a ^ b),
        "v_xnor_b32": o("u32 u32 u32", lambda e, a, b: ~(a ^ b)),
        "v_mul_lo_u16": o("u16 u16 u16", lambda e, a, b: a * b),
        "v_lshlrev_b16": o("u16 u16 u16", lambda e, a, b: b << (a & 15)),
        "v_lshrrev_b16": o("u16 u16 u16", lambda e, a, b: b >> (a & 15)),
        "v_ashrrev_i16": o("i16 u16 i16", lambda e, a, b: b >> (a & 15)),
        "v_ldexp_f16": o("f16 f16 i16", lambda e, a, b: F16.power_of_two(a, b, e.round16_64)),
        "v_dot2c_f32_f16": o("f32 p16 p16", _dot2(F16), old=True, raw=True),
        "v_dot2c_f32_bf16": o("f32 pb16 pb16", _dot2(BF16), old=True, raw=True, archs=("gfx950",)),
        "v_dot2c_i32_i16": o("i32 u32 u32", _dot_fields(16), old=True, saturates=True),
        "v_dot4c_i32_i8": o("i32 u32 u32", _dot_fields(8), old=True, saturates=True),
        "v_dot8c_i32_i4": o("i32 u32 u32", _dot_fields(4), old=True, saturates=True),
        "v_pk_fmac_f16": o("p16 p16 p16", _pk_fmac, old=True),
        "v_fmac_f32": o("f32 f32 f32", fma(F32), old=True),
        "v_fmac_f64": o("f64 f64 f64", fma(F64), old=True),
        "v_mac_f16": o("f16 f16 f16", _multiply_add_f16, old=True, keeps_high=True),
        "v_fmamk_f32": o("f32 f32 f32 f32", fma(F32), literal=1),
        "v_fmaak_f32": o("f32 f32 f32 f32", fma(F32), literal=2),
        "v_madmk_f16": o("f16 f16 f16 f16", _multiply_add_f16, literal=1, keeps_high=True),
        "v_madak_f16": o("f16 f16 f16 f16", _multiply_add_f16, literal=2, keeps_high=True),
        "v_add_co_u32": o("u32 u32 u32", _carry, carry_out=True, saturates=True),
        "v_sub_co_u32": o("u32 u32 u32", _borrow, carry_out=True, saturates=True),
        "v_subrev_co_u32": o("u32 u32 u32", _reverse_borrow, carry_out=True, saturates=True),
        "v_addc_co_u32": o("u32 u32 u32", _carry, **carries),
        "v_subb_co_u32": o("u32 u32 u32", _borrow, **carries),
        "v_subbrev_co_u32": o("u32 u32 u32", _reverse_borrow, **carries),
    }
    for kind in ("u16", "u32"):
        types = f"{kind} {kind} {kind}"
        table |= {
            f"v_add_{kind}": o(types, lambda e, a, b: a + b, saturates=True),
            f"v_sub_{kind}": o(types, lambda e, a, b: a - b, saturates=True),
            f"v_subrev_{kind}": o(types, lambda e, a, b: b - a, saturates=True),
        }
    for kind in ("i16", "u16", "i32", "u32"):
        types = f"{kind} {kind} {kind}"
        table[f"v_min_{kind}"] = o(types, lambda e, a, b: min(a, b))
        table[f"v_max_{kind}"] = o(types, lambda e, a, b: max(a, b))
    for kind in ("f16", "f32"):
        number, types = FORMATS[kind], f"{kind} {kind} {kind}"
        table |= {
            f"v_add_{kind}": o(types, add(number)),
            f"v_sub_{kind}": o(types, add(number, flip_b=True)),
            f"v_subrev_{kind}": o(types, add(number, flip_a=True)),
            f"v_mul_{kind}": o(types, multiply(number)),
            f"v_min_{kind}": o(types, minimum(number)),
            f"v_max_{kind}": o(types, maximum(number)),
        }
    return table


# ---- VOPC ----------------------------------------------------------------------------------------


def _compare_float(number: Format, name: str) -> Function:
    def compare(env: Environment, a: int, b: int) -> int:
        unordered = number.is_nan(a) or number.is_nan(b)
        equal = not unordered and (a == b or (number.is_zero(a) and number.is_zero(b)))
        less = not unordered and not equal and number.less(a, b)
        greater = not (less or equal or unordered)
        answers = {
            "f": False, "lt": less, "eq": equal, "le": less or equal, "gt": greater,
            "lg": less or greater, "ge": greater or equal, "o": not unordered, "u": unordered,
            "nge": not (greater or equal), "nlg": not (less or greater), "ngt": not greater,
            "nle": not (less or equal), "neq": not equal, "nlt": not less, "tru": True,
        }  # fmt: skip
        return int(answers[name])

    return compare


def _compare_integer(name: str) -> Function:
    answers: dict[str, Callable[[int, int], bool]] = {
        "f": lambda a, b: False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b,
        "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ne": lambda a, b: a != b,
        "ge": lambda a, b: a >= b, "t": lambda a, b: True,
    }  # fmt: skip
    return lambda env, a, b: int(answers[name](a, b))


def _class_of(number: Format) -> Function:
    def has_class(env: Environment, a: int, classes: int) -> int:
        negative = number.is_negative(a)
        if number.is_nan(a):
            bit = 0 if number.is_signaling(a) else 1
        elif number.is_infinite(a):
            bit = 2 if negative else 9
        elif number.is_zero(a):
            bit = 5 if negative else 6
        elif number.is_denormal(a):
            bit = 4 if negative else 7
        else:
            bit = 3 if negative else 8
        return classes >> bit & 1

    return has_class


_FLOAT_COMPARISONS = (
    "f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u",
    "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru",
)  # fmt: skip


def _vopc() -> dict[str, Operation]:
    table = {}
    for kind in ("f16", "f32", "f64"):
        for name in _FLOAT_COMPARISONS:
            compare = _compare_float(FORMATS[kind], name)
            table[f"v_cmp_{name}_{kind}"] = _operation(f"mask {kind} {kind}", compare)
        of_class = _class_of(FORMATS[kind])
        table[f"v_cmp_class_{kind}"] = _operation(f"mask {kind} u32", of_class, raw=True)
    for kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
        for name in ("f", "lt", "eq", "le", "gt", "ne", "ge", "t"):
            compare = _compare_integer(name)
            table[f"v_cmp_{name}_{kind}"] = _operation(f"mask {kind} {kind}", compare)
    return table


# ---- VOP3 ----------------------------------------------------------------------------------------


def _vop3() -> dict[str, Operation]:
    o = _operation
    of_gfx950 = partial(_operation, archs=("gfx950",))
    u32x3, i32x3 = "u32 u32 u32 u32", "i32 i32 i32 i32"
    table = {
        "v_mad_i32_i24": o(i32x3, lambda e, a, b, c: _i24(a) * _i24(b) + c, saturates=True),
        "v_mad_u32_u24": o(u32x3, lambda e, a, b, c: _u24(a) * _u24(b) + c, saturates=True),
        "v_bfe_u32": o(u32x3, lambda e, a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1)),
        "v_bfe_i32": o("i32 i32 u32 u32", _bfe_signed),
        "v_bfi_b32": o(u32x3, lambda e, a, b, c: (a & b) | (~a & c)),
        "v_lerp_u8": o(u32x3, _lerp),
        "v_alignbit_b32": o(u32x3, lambda e, a, b, c: (a << 32 | b) >> (c & 31)),
        "v_alignbyte_b32": o(u32x3, lambda e, a, b, c: (a << 32 | b) >> (8 * (c & 3))),
        "v_sad_u8": o(u32x3, lambda e, a, b, c: _sad(a, b) + c, saturates=True),
        "v_sad_hi_u8": o(u32x3, lambda e, a, b, c: (_sad(a, b) << 16) + c, saturates=True),
        "v_sad_u16": o(u32x3, lambda e, a, b, c: _sad(a, b, width=16) + c, saturates=True),
        "v_sad_u32": o(u32x3, lambda e, a, b, c: abs(a - b) + c, saturates=True),
        "v_msad_u8": o(u32x3, lambda e, a, b, c: _sad(a, b, masked=True) + c, saturates=True),
        "v_qsad_pk_u16_u8": o("u64 u64 u32 u64", _quad_sad(masked=False)),
        "v_mqsad_pk_u16_u8": o("u64 u64 u32 u64", _quad_sad(masked=True)),
        "v_mad_u64_u32": o("u64 u32 u32 u64", _mad_u64, carry_out=True),
        "v_mad_i64_i32": o("i64 i32 i32 i64", _mad_u64, carry_out=True),
        "v_perm_b32": o(u32x3, _perm),
        "v_mad_u32_u16": o("u32 u16 u16 u32", lambda e, a, b, c: a * b + c, saturates=True),
        "v_mad_i32_i16": o("i32 i16 i16 i32", lambda e, a, b, c: a * b + c, saturates=True),
        "v_xad_u32": o(u32x3, lambda e, a, b, c: (a ^ b) + c),
        "v_lshl_add_u32": o(u32x3, lambda e, a, b, c: (a << (b & 31)) + c),
        "v_add_lshl_u32": o(u32x3, lambda e, a, b, c: (a + b) << (c & 31)),
        "v_add3_u32": o(u32x3, lambda e, a, b, c: a + b + c),
        "v_lshl_or_b32": o(u32x3, lambda e, a, b, c: (a << (b & 31)) | c),
        "v_and_or_b32": o(u32x3, lambda e, a, b, c: (a & b) | c),
        "v_or3_b32": o(u32x3, lambda e, a, b, c: a | b | c),
        "v_lshl_add_u64": o("u64 u64 u32 u64", lambda e, a, b, c: (a << (b & 7)) + c),
        "v_mul_lo_u32": o("u32 u32 u32", lambda e, a, b: a * b),
        "v_mul_hi_u32": o("u32 u32 u32", lambda e, a, b: a * b >> 32),
        "v_mul_hi_i32": o("i32 i32 i32", lambda e, a, b: a * b >> 32),
        "v_bcnt_u32_b32": o("u32 u32 u32", lambda e, a, b: a.bit_count() + b),
        "v_lshlrev_b64": o("u64 u32 u64", lambda e, a, b: b << (a & 63)),
        "v_lshrrev_b64": o("u64 u32 u64", lambda e, a, b: b >> (a & 63)),
        "v_ashrrev_i64": o("i64 u32 i64", lambda e, a, b: b >> (a & 63)),
        "v_bfm_b32": o("u32 u32 u32", lambda e, a, b: ((1 << (a & 31)) - 1) << (b & 31)),
        "v_cvt_pk_u16_u32": o("u32 u32 u32", _pack_saturated("u16")),
        "v_cvt_pk_i16_i32": o("u32 i32 i32", _pack_saturated("i16")),
        "v_add_i32": o("i32 i32 i32", lambda e, a, b: a + b, saturates=True),
        "v_sub_i32": o("i32 i32 i32", lambda e, a, b: a - b, saturates=True),
        "v_add_i16": o("i16 i16 i16", lambda e, a, b: a + b, saturates=True),
        "v_sub_i16": o("i16 i16 i16", lambda e, a, b: a - b, saturates=True),
        "v_pack_b32_f16": o("u32 f16 f16", lambda e, a, b: a | b << 16),
        "v_mul_legacy_f32": o("f32 f32 f32", _multiply_legacy),
        "v_ldexp_f32": o("f32 f32 i32", lambda e, a, b: F32.power_of_two(a, b, e.round32)),
        "v_ldexp_f64": o("f64 f64 i32", lambda e, a, b: F64.power_of_two(a, b, e.round16_64)),
        "v_trig_preop_f64": o("f64 f64 u32", _trig_preop),
        "v_cvt_pk_u8_f32": o("u32 f32 u32 u32", _to_byte),
        "v_cvt_pkaccum_u8_f32": o("u32 f32 u32", _to_byte, old=True),
        "v_cvt_pknorm_i16_f32": o("u32 f32 f32", _norms(F32, -1, 32767)),
        "v_cvt_pknorm_u16_f32": o("u32 f32 f32", _norms(F32, 0, 65535)),
        "v_cvt_pknorm_i16_f16": o("u32 f16 f16", _norms(F16, -1, 32767)),
        "v_cvt_pknorm_u16_f16": o("u32 f16 f16", _norms(F16, 0, 65535)),
        "v_cvt_pkrtz_f16_f32": o("h16 f32 f32", _pack_halves(TO_ZERO, F16)),
        "v_cvt_pk_f16_f32": of_gfx950("h16 f32 f32", _pack_halves(NEAREST, F16)),
        "v_cvt_pk_bf16_f32": of_gfx950("hb16 f32 f32", _pack_halves(NEAREST, BF16)),
        "v_ashr_pk_i8_i32": of_gfx950("u16 i32 i32 u32", _ashr_pk(-128, 127), keeps_high=True),
        "v_ashr_pk_u8_i32": of_gfx950("u16 i32 i32 u32", _ashr_pk(0, 255), keeps_high=True),
        "v_minimum3_f32": of_gfx950("f32 f32 f32 f32", three(nan_wins(F32, largest=False))),
        "v_maximum3_f32": of_gfx950("f32 f32 f32 f32", three(nan_wins(F32, largest=True))),
        "v_mad_legacy_f16": o("f16 f16 f16 f16", _multiply_add_f16),
        "v_mad_f16": o("f16 f16 f16 f16", _multiply_add_f16, keeps_high=True),
        "v_fma_legacy_f16": o("f16 f16 f16 f16", fma(F16)),
        "v_fma_f16": o("f16 f16 f16 f16", fma(F16), keeps_high=True),
        "v_fma_f32": o("f32 f32 f32 f32", fma(F32)),
        "v_fma_f64": o("f64 f64 f64 f64", fma(F64)),
        "v_add_f64": o("f64 f64 f64", add(F64)),
        "v_mul_f64": o("f64 f64 f64", multiply(F64)),
        "v_min_f64": o("f64 f64 f64", minimum(F64)),
        "v_max_f64": o("f64 f64 f64", maximum(F64)),
        "v_div_fixup_f32": o("f32 f32 f32 f32", _div_fixup(F32, -150)),
        "v_div_fixup_f64": o("f64 f64 f64 f64", _div_fixup(F64, -1075)),
        "v_div_fixup_f16": o("f16 f16 f16 f16", _div_fixup(F16, None), keeps_high=True),
        "v_div_fixup_legacy_f16": o("f16 f16 f16 f16", _div_fixup(F16, None)),
    }
    for which in ("id", "sc", "tc", "ma"):
        table[f"v_cube{which}_f32"] = o("f32 n32 n32 n32", _cube(which))
    for kind in ("i16", "u16"):
        types = f"{kind} {kind} {kind} {kind}"
        product = lambda e, a, b, c: a * b + c  # noqa: E731
        table[f"v_mad_{kind}"] = o(types, product, keeps_high=True, saturates=True)
        table[f"v_mad_legacy_{kind}"] = o(types, product, saturates=True)
    for kind in ("i16", "u16", "i32", "u32"):
        types = f"{kind} {kind} {kind} {kind}"
        table[f"v_min3_{kind}"] = o(types, lambda e, *values: min(values))
        table[f"v_max3_{kind}"] = o(types, lambda e, *values: max(values))
        table[f"v_med3_{kind}"] = o(types, _middle)
    for kind in ("f16", "f32"):
        number, types = FORMATS[kind], f"{kind} {kind} {kind} {kind}"
        table[f"v_min3_{kind}"] = o(types, three(minimum(number)))
        table[f"v_max3_{kind}"] = o(types, three(maximum(number)))
        table[f"v_med3_{kind}"] = o(types, _median(number))
    table["v_bitop3_b32"] = of_gfx950(u32x3, bitop3(0x1B, 32))
    table["v_bitop3_b16"] = of_gfx950("u16 u16 u16 u16", bitop3(0x1B, 16), keeps_high=True)
    return table


VOP2 = _vop2()
VOPC = _vopc()
VOP3 = _vop3()
