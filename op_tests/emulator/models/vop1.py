"""One lane of VOP1's exact instructions; see models/vector_alu.py for what an `Operation` is.

The approximations (transcendental instructions) are in `APPROXIMATIONS`, in float64.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .number_formats import BF16, F16, F32, F64, FORMATS, NEAREST, Format
from .small_floats import of_chip
from .vector_alu import Environment, Function, Operation, saturate, signed


def _to_integer(
    kind: str, number: Format, whole: Callable[[Fraction], int] = math.trunc
) -> Function:
    def convert(env: Environment, a: int) -> int:
        if number.is_nan(a):
            return 0
        if number.is_infinite(a):
            limit = -1 if number.is_negative(a) else 1
            return saturate(limit << 80, kind)
        return saturate(whole(number.value(a)), kind)

    return convert


def _from_integer(number: Format) -> Function:
    return lambda env, a: number.round(Fraction(a), env.rounding(number))


def _rounded(number: Format, whole: Callable[[Fraction], int]) -> Function:
    def to_whole(env: Environment, a: int) -> int:
        if number.is_nan(a):
            return number.quiet(a)
        if number.is_infinite(a) or number.is_zero(a):
            return a
        return number.round(
            Fraction(whole(number.value(a))), NEAREST, negative_zero=number.is_negative(a)
        )

    return to_whole


def _half_up(value: Fraction) -> int:
    # The sum with 1/2 is one of floats.
    return math.floor(F32.value(F32.round(value + Fraction(1, 2), NEAREST)))


def _fraction(number: Format) -> Function:
    one = (number.sign >> 1) - (1 << number.mantissa)

    def fraction(env: Environment, a: int) -> int:
        if number.is_nan(a) or number.is_infinite(a):
            return number.quiet_nan
        value = number.value(a)
        rounding = env.rounding(number)
        rest = value - math.floor(value)
        # Equal numbers differ by +0, rounded down by -0; -0 minus -0 is the same.
        return min(number.round(rest, rounding), one - 1) if rest else number.sign * (rounding == 2)

    return fraction


def _frexp(number: Format, bits: int) -> tuple[int, int]:
    """Mantissa from 1/2 to 1, and exponent."""
    if number.is_nan(bits) or number.is_infinite(bits) or number.is_zero(bits):
        return bits, 0
    value = number.value(bits)
    size = abs(value)
    exponent = 0
    while size >= 1:
        size, exponent = size / 2, exponent + 1
    while size < Fraction(1, 2):
        size, exponent = size * 2, exponent - 1
    return number.round(size if value > 0 else -size, NEAREST), exponent


def _norm(kind: str, scale: int) -> Function:
    def convert(env: Environment, a: int) -> int:
        if F16.is_nan(a):
            return 0
        infinity = Fraction(-1 if F16.is_negative(a) else 1)  # as good as any from there on
        value = infinity if F16.is_infinite(a) else F16.value(a)
        low = -1 if kind[0] == "i" else 0
        return round(max(Fraction(low), min(Fraction(1), value)) * scale)

    return convert


def _small(name: str, arch: str) -> Function:
    def convert(env: Environment, a: int) -> int:
        number = of_chip(name, arch)
        code = a & 0xFF
        value = number.value(code)
        if isinstance(value, Fraction):
            return F32.round(value, NEAREST, negative_zero=bool(code & number.sign))
        if math.isnan(value):
            return F32.quiet_nan
        return F32.infinity | (F32.sign if value < 0 else 0)

    return convert


def _saturated_bytes(env: Environment, a: int) -> int:
    low, high = (max(0, min(255, signed(half, 16))) for half in (a, a >> 16))
    return low | high << 8


def _leading(env: Environment, a: int) -> int:
    return 32 - a.bit_length() if a else 0xFFFFFFFF


def _leading_signs(env: Environment, a: int) -> int:
    return _leading(env, (a if a >= 0 else ~a) & 0xFFFFFFFF)


def _trailing(env: Environment, a: int) -> int:
    return (a & -a).bit_length() - 1 if a else 0xFFFFFFFF


def _operations() -> dict[str, Operation]:
    table: dict[str, tuple[str, Function]] = {
        "v_mov_b32": ("u32 u32", lambda env, a: a),
        "v_cvt_i32_f64": ("i32 f64", _to_integer("i32", F64)),
        "v_cvt_f64_i32": ("f64 i32", _from_integer(F64)),
        "v_cvt_f32_i32": ("f32 i32", _from_integer(F32)),
        "v_cvt_f32_u32": ("f32 u32", _from_integer(F32)),
        "v_cvt_u32_f32": ("u32 f32", _to_integer("u32", F32)),
        "v_cvt_i32_f32": ("i32 f32", _to_integer("i32", F32)),
        "v_cvt_f16_f32": ("f16 f32", lambda env, a: F32.convert(a, F16, env.round16_64)),
        "v_cvt_f32_f16": ("f32 f16", lambda env, a: F16.convert(a, F32, NEAREST)),
        "v_cvt_rpi_i32_f32": ("i32 f32", _to_integer("i32", F32, _half_up)),
        "v_cvt_flr_i32_f32": ("i32 f32", _to_integer("i32", F32, math.floor)),
        "v_cvt_off_f32_i4": (
            "f32 u32",
            lambda env, a: F32.round(Fraction(signed(a, 4), 16), NEAREST),
        ),
        "v_cvt_f32_f64": ("f32 f64", lambda env, a: F64.convert(a, F32, env.round32)),
        "v_cvt_f64_f32": ("f64 f32", lambda env, a: F32.convert(a, F64, NEAREST)),
        "v_cvt_u32_f64": ("u32 f64", _to_integer("u32", F64)),
        "v_cvt_f64_u32": ("f64 u32", _from_integer(F64)),
        "v_not_b32": ("u32 u32", lambda env, a: ~a),
        "v_bfrev_b32": ("u32 u32", lambda env, a: int(f"{a:032b}"[::-1], 2)),
        "v_ffbh_u32": ("u32 u32", _leading),
        "v_ffbl_b32": ("u32 u32", _trailing),
        "v_ffbh_i32": ("u32 i32", _leading_signs),
        "v_mov_b64": ("u64 u64", lambda env, a: a),
        "v_cvt_f16_u16": ("f16 u16", _from_integer(F16)),
        "v_cvt_f16_i16": ("f16 i16", _from_integer(F16)),
        "v_cvt_u16_f16": ("u16 f16", _to_integer("u16", F16)),
        "v_cvt_i16_f16": ("i16 f16", _to_integer("i16", F16)),
        "v_cvt_norm_i16_f16": ("i16 f16", _norm("i16", 32767)),
        "v_cvt_norm_u16_f16": ("u16 f16", _norm("u16", 65535)),
        "v_sat_pk_u8_i16": ("u16 u32", _saturated_bytes),
        "v_frexp_exp_i32_f64": ("i32 f64", lambda env, a: _frexp(F64, a)[1]),
        "v_frexp_exp_i32_f32": ("i32 f32", lambda env, a: _frexp(F32, a)[1]),
        "v_frexp_exp_i16_f16": ("i16 f16", lambda env, a: _frexp(F16, a)[1]),
    }
    for i in range(4):
        byte = lambda env, a, i=i: F32.round(Fraction(a >> 8 * i & 255), NEAREST)  # noqa: E731
        table[f"v_cvt_f32_ubyte{i}"] = ("f32 u32", byte)
    for name in ("f16", "f32", "f64"):
        number = FORMATS[name]
        for operation, whole in (
            ("trunc", math.trunc), ("ceil", math.ceil), ("floor", math.floor), ("rndne", round),
        ):  # fmt: skip
            table[f"v_{operation}_{name}"] = (f"{name} {name}", _rounded(number, whole))
        table[f"v_fract_{name}"] = (f"{name} {name}", _fraction(number))
        mantissa = lambda env, a, number=number: _frexp(number, a)[0]  # noqa: E731
        table[f"v_frexp_mant_{name}"] = (f"{name} {name}", mantissa)
    operations = {}
    for name, (types, function) in table.items():
        result, source = types.split()
        operations[name] = Operation(result, (source,), function)
    return operations


EXACT = _operations()
"""By mnemonic, on both chips."""

OF_ONE_CHIP = [
    (f"v_cvt_f32_{name}", Operation("f32", ("u32",), _small(name, arch), archs=(arch,)))
    for arch in ("gfx942", "gfx950")
    for name in ("fp8", "bf8")
] + [
    (
        "v_prng_b32",
        Operation(
            "u32", ("u32",), lambda env, a: a << 1 ^ (197 if a >> 31 else 0), archs=("gfx950",)
        ),
    ),
    (
        "v_cvt_f32_bf16",
        # 16 bits in the upper half of a float. The caller flushes what float32's MODE says.
        Operation("f32", ("u16",), lambda env, a: BF16.convert(a, F32, NEAREST), archs=("gfx950",)),
    ),
]

Doubles = NDArray[np.float64]


def _sine(turns: Doubles) -> Doubles:
    """Of full turns, with exact zeros."""
    rest = turns - np.rint(turns)  # exact
    folded = np.where(np.abs(rest) > 0.25, np.copysign(0.5, rest) - rest, rest)
    return np.asarray(np.sin(2 * np.pi * folded))


def _cosine(turns: Doubles) -> Doubles:
    return _sine(0.25 - np.abs(turns - np.rint(turns)))


APPROXIMATIONS: dict[str, Callable[[Doubles], Doubles]] = {
    "exp": np.exp2,
    "log": np.log2,
    "rcp": np.reciprocal,
    "rcp_iflag": np.reciprocal,
    "rsq": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": _sine,
    "cos": _cosine,
}
"""The functions of float64; sin and cos take full turns."""
