"""One lane of VOP3P's packed math and dot products, by the conventions of models/vector_alu.py."""

from dataclasses import dataclass

from .number_formats import BF16, F16, F32, FORMATS, NEAREST, Format
from .vector_alu import (
    Environment,
    Function,
    add,
    clamped,
    fields,
    fma,
    maximum,
    minimum,
    multiply,
    nan_wins,
    plus_zero,
    saturate,
    signed,
    three,
)


@dataclass(frozen=True)
class Packed:
    """What a half of the result is.

    Attributes:
        function: (environment, *halves) -> bits, or the exact integer if it saturates.
    """

    kind: str  # of the halves: f16, f32, i16, u16
    count: int  # of sources
    function: Function
    saturates: bool = False
    archs: tuple[str, ...] = ("gfx942", "gfx950")


PACKED: dict[str, Packed] = {
    **{
        f"v_pk_{name}_{kind}": Packed(kind, count, function(FORMATS[kind]))
        for name, count, function in (("fma", 3, fma), ("add", 2, add), ("mul", 2, multiply))
        for kind in ("f16", "f32")
    },
    "v_pk_min_f16": Packed("f16", 2, minimum(F16)),
    "v_pk_max_f16": Packed("f16", 2, maximum(F16)),
    "v_pk_minimum3_f16": Packed("f16", 3, three(nan_wins(F16, largest=False)), archs=("gfx950",)),
    "v_pk_maximum3_f16": Packed("f16", 3, three(nan_wins(F16, largest=True)), archs=("gfx950",)),
    "v_pk_mul_lo_u16": Packed("u16", 2, lambda e, a, b: a * b),
    "v_pk_lshlrev_b16": Packed("u16", 2, lambda e, a, b: b << (a & 15)),
    "v_pk_lshrrev_b16": Packed("u16", 2, lambda e, a, b: b >> (a & 15)),
    "v_pk_ashrrev_i16": Packed("i16", 2, lambda e, a, b: b >> (a & 15)),
}
for _kind in ("i16", "u16"):
    PACKED |= {
        f"v_pk_mad_{_kind}": Packed(_kind, 3, lambda e, a, b, c: a * b + c, saturates=True),
        f"v_pk_add_{_kind}": Packed(_kind, 2, lambda e, a, b: a + b, saturates=True),
        f"v_pk_sub_{_kind}": Packed(_kind, 2, lambda e, a, b: a - b, saturates=True),
        f"v_pk_max_{_kind}": Packed(_kind, 2, lambda e, a, b: max(a, b)),
        f"v_pk_min_{_kind}": Packed(_kind, 2, lambda e, a, b: min(a, b)),
    }


@dataclass(frozen=True)
class Modifiers:
    """One bit a source, in the order of the sources."""

    op_sel: tuple[int, ...]
    op_sel_hi: tuple[int, ...]
    neg_lo: tuple[int, ...]
    neg_hi: tuple[int, ...]
    clamp: bool = False


def _half(kind: str, source: int, chosen: int, negated: int, env: Environment) -> int:
    width = int(kind[1:])
    bits = source >> (width * chosen) & ((1 << width) - 1)
    if kind[0] != "f":
        return signed(bits, 16) if kind == "i16" else bits
    number = FORMATS[kind]
    if not env.denormal(number) & 1:
        bits = number.flush(bits)
    return bits ^ (number.sign if negated else 0)


def packed(operation: Packed, env: Environment, modifiers: Modifiers, *sources: int) -> int:
    """The destination, of 32 or 64 bits."""
    kind = operation.kind
    width = int(kind[1:])
    result = 0
    for upper in range(2):
        chosen = modifiers.op_sel_hi if upper else modifiers.op_sel
        negated = modifiers.neg_hi if upper else modifiers.neg_lo
        halves = [
            _half(kind, source, chosen[k], negated[k], env) for k, source in enumerate(sources)
        ]
        value = operation.function(env, *halves)
        if operation.saturates and modifiers.clamp:
            value = saturate(value, kind)
        value &= (1 << width) - 1
        if kind[0] == "f":
            number = FORMATS[kind]
            if not env.denormal(number) & 2:
                value = number.flush(value)
            if modifiers.clamp:
                value = clamped(number, value, env)
        result |= value << (width * upper)
    return result


def mixed(result: str, env: Environment, modifiers: Modifiers, old: int, *sources: int) -> int:
    """v_fma_mix: op_sel_hi makes a source a half, which op_sel chooses; neg_hi is abs."""
    values = []
    for k, source in enumerate(sources):
        if modifiers.op_sel_hi[k]:
            half = source >> (16 * modifiers.op_sel[k]) & 0xFFFF
            half = half if env.denormal16_64 & 1 else F16.flush(half)
            bits = F16.convert(half, F32, NEAREST)
        else:
            bits = source if env.denormal32 & 1 else F32.flush(source)
        bits = bits & ~F32.sign if modifiers.neg_hi[k] else bits
        values.append(bits ^ (F32.sign if modifiers.neg_lo[k] else 0))
    value = F32.fma(*values, env.round32)
    value = value if env.denormal32 & 2 else F32.flush(value)
    if result == "f32":
        return clamped(F32, value, env) if modifiers.clamp else value
    half = F32.convert(value, F16, env.round16_64)
    half = half if env.denormal16_64 & 2 else F16.flush(half)
    half = clamped(F16, half, env) if modifiers.clamp else half
    return old & 0xFFFF0000 | half if result == "low" else old & 0xFFFF | half << 16


def dot_of_halves(half: Format, pairs: list[tuple[int, int]], addend: int) -> int:
    """A sum of floats, rounded after each step: from the addend on for f16, up to it for bf16.

    Whatever MODE says: to nearest, and +0 for float32 denormals and -0.
    """

    (a, c), (b, d) = ([plus_zero(half.convert(x, F32, NEAREST)) for x in pair] for pair in pairs)
    addend = plus_zero(addend)
    if half is BF16:
        products = F32.fma(b, d, F32.multiply(a, c, NEAREST), NEAREST)
        return plus_zero(F32.add(products, addend, NEAREST))
    return plus_zero(F32.fma(b, d, F32.fma(a, c, addend, NEAREST), NEAREST))


def dot_of_integers(width: int, is_signed: bool, clamp: bool, a: int, b: int, c: int) -> int:
    columns = [fields(x, width, 32 // width) for x in (a, b)]
    if is_signed:
        columns, c = [[signed(x, width) for x in column] for column in columns], signed(c, 32)
    total = c + sum(x * y for x, y in zip(*columns, strict=True))
    return (saturate(total, "i32" if is_signed else "u32") if clamp else total) & 0xFFFFFFFF
