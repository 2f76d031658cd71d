"""The scalar ALU's instructions in Python integers, from the ISA documents' words.

A `ScalarOperation` takes its sources (signed ones as signed integers) and SCC, and gives the result
and the new SCC; None leaves either alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .vector_alu import signed

Result = tuple[int | None, int | None]


@dataclass(frozen=True)
class ScalarOperation:
    """Types of result ("" for none) and sources, and (scc, old, *sources) -> (result, scc)."""

    result: str
    sources: tuple[str, ...]
    function: Callable[..., Result]


def skips_vector(source: int, bit: int) -> bool:
    """MODE.VSKIP after s_setvskip: one bit of the source; SCC stays as it is."""
    return bool(source >> (bit & 31) & 1)


def _mask(width: int) -> int:
    return (1 << width) - 1


def _nonzero(width: int, function: Callable[..., int]) -> Callable[..., Result]:
    def operate(scc: int, old: int, *sources: int) -> Result:
        value = function(*sources) & _mask(width)
        return value, int(value != 0)

    return operate


def _keeps_scc(function: Callable[..., int]) -> Callable[..., Result]:
    return lambda scc, old, *sources: (function(*sources), None)


def _only_scc(function: Callable[..., bool]) -> Callable[..., Result]:
    return lambda scc, old, *sources: (None, int(function(*sources)))


def _overflow(function: Callable[[int, int], int]) -> Callable[..., Result]:
    def operate(scc: int, old: int, a: int, b: int) -> Result:
        exact = function(signed(a, 32), signed(b, 32))
        return exact, int(signed(exact, 32) != exact)

    return operate


def _bit_field(width: int, *, is_signed: bool) -> Callable[[int, int], int]:
    def extract(value: int, control: int) -> int:
        position, size = control & (width - 1), control >> 16 & 0x7F
        field = value >> position  # a signed value brings its sign along
        if size == 0 or size >= width:
            return field if size else 0
        if not is_signed:
            return field & _mask(size)
        return signed(field, size) if position + size < width else field

    return extract


def _first(value: int, width: int, bit: int, *, from_top: bool = False) -> int:
    order = reversed(range(width)) if from_top else range(width)
    for count, i in enumerate(order):
        if value >> i & 1 == bit:
            return count
    return -1


def _flbit_signed(width: int) -> Callable[[int], int]:
    def count(value: int) -> int:
        sign = value >> (width - 1) & 1
        return _first(value, width, 1 - sign, from_top=True)

    return count


def _whole_quads(width: int) -> Callable[[int], int]:
    return lambda a: sum(0xF << i for i in range(0, width, 4) if a >> i & 0xF)


def _quad_mask(width: int) -> Callable[[int], int]:
    return lambda a: sum(1 << i // 4 for i in range(0, width, 4) if a >> i & 0xF)


def _operation(types: str, function: Callable[..., Result]) -> ScalarOperation:
    result, *sources = types.split()
    return ScalarOperation("" if result == "-" else result, tuple(sources), function)


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip
_BITS: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b, "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip


def _table() -> dict[str, ScalarOperation]:
    o = _operation
    u32x2 = "u32 u32 u32"
    table = {
        "s_add_u32": o(u32x2, lambda s, d, a, b: (a + b, a + b >> 32)),
        "s_sub_u32": o(u32x2, lambda s, d, a, b: (a - b, int(b > a))),
        "s_add_i32": o(u32x2, _overflow(lambda a, b: a + b)),
        "s_sub_i32": o(u32x2, _overflow(lambda a, b: a - b)),
        "s_addc_u32": o(u32x2, lambda s, d, a, b: (a + b + s, a + b + s >> 32)),
        "s_subb_u32": o(u32x2, lambda s, d, a, b: (a - b - s, int(b + s > a))),
        "s_bfm_b32": o(u32x2, _keeps_scc(lambda a, b: _mask(a & 31) << (b & 31))),
        "s_bfm_b64": o("u64 u32 u32", _keeps_scc(lambda a, b: _mask(a & 63) << (b & 63))),
        "s_mul_i32": o(u32x2, _keeps_scc(lambda a, b: a * b)),
        "s_mul_hi_u32": o(u32x2, _keeps_scc(lambda a, b: a * b >> 32)),
        "s_mul_hi_i32": o("i32 i32 i32", _keeps_scc(lambda a, b: a * b >> 32)),
        "s_absdiff_i32": o("u32 i32 i32", _nonzero(32, lambda a, b: abs(signed(a - b, 32)))),
        "s_pack_ll_b32_b16": o(u32x2, _keeps_scc(lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16)),
        "s_pack_lh_b32_b16": o(u32x2, _keeps_scc(lambda a, b: a & 0xFFFF | b & 0xFFFF0000)),
        "s_pack_hh_b32_b16": o(u32x2, _keeps_scc(lambda a, b: a >> 16 | b & 0xFFFF0000)),
        "s_abs_i32": o("u32 i32", _nonzero(32, abs)),
        "s_sext_i32_i8": o("i32 u32", _keeps_scc(lambda a: signed(a, 8))),
        "s_sext_i32_i16": o("i32 u32", _keeps_scc(lambda a: signed(a, 16))),
        "s_flbit_i32": o("i32 u32", _keeps_scc(_flbit_signed(32))),
        "s_flbit_i32_i64": o("i32 u64", _keeps_scc(_flbit_signed(64))),
        "s_bitreplicate_b64_b32": o(
            "u64 u32", _keeps_scc(lambda a: sum((a >> i & 1) * 3 << (2 * i) for i in range(32)))
        ),
    }
    for n in (1, 2, 3, 4):
        table[f"s_lshl{n}_add_u32"] = o(
            u32x2, lambda s, d, a, b, n=n: ((a << n) + b, int((a << n) + b >= 1 << 32))
        )
    for kind in ("i32", "u32"):
        types = f"{kind} {kind} {kind}"
        table[f"s_min_{kind}"] = o(types, lambda s, d, a, b: (min(a, b), int(a < b)))
        table[f"s_max_{kind}"] = o(types, lambda s, d, a, b: (max(a, b), int(a >= b)))
    for name, function in _COMPARE.items():
        for kind in ("i32", "u32") + (("u64",) if name in ("eq", "lg") else ()):
            table[f"s_cmp_{name}_{kind}"] = o(f"- {kind} {kind}", _only_scc(function))
    return table | _of_width(32) | _of_width(64)


def _of_width(width: int) -> dict[str, ScalarOperation]:
    """What there is of 32 and of 64 bits."""
    o = _operation
    u, i, top = f"u{width}", f"i{width}", width - 1
    reverse = _keeps_scc(lambda a: int(f"{a:0{width}b}"[::-1], 2))
    flbit = _keeps_scc(lambda a: _first(a, width, 1, from_top=True))
    return {
        **{
            f"s_{name}_b{width}": o(f"{u} {u} {u}", _nonzero(width, f)) for name, f in _BITS.items()
        },
        f"s_cselect_b{width}": o(f"{u} {u} {u}", lambda s, d, a, b: (a if s else b, None)),
        f"s_lshl_b{width}": o(f"{u} {u} u32", _nonzero(width, lambda a, b: a << (b & top))),
        f"s_lshr_b{width}": o(f"{u} {u} u32", _nonzero(width, lambda a, b: a >> (b & top))),
        f"s_ashr_i{width}": o(f"{i} {i} u32", _nonzero(width, lambda a, b: a >> (b & top))),
        f"s_bfe_u{width}": o(f"{u} {u} u32", _nonzero(width, _bit_field(width, is_signed=False))),
        f"s_bfe_i{width}": o(f"{i} {i} u32", _nonzero(width, _bit_field(width, is_signed=True))),
        f"s_mov_b{width}": o(f"{u} {u}", _keeps_scc(lambda a: a)),
        f"s_cmov_b{width}": o(f"{u} {u}", lambda s, d, a: (a if s else d, None)),
        f"s_not_b{width}": o(f"{u} {u}", _nonzero(width, lambda a: ~a)),
        f"s_wqm_b{width}": o(f"{u} {u}", _nonzero(width, _whole_quads(width))),
        f"s_quadmask_b{width}": o(f"{u} {u}", _nonzero(width, _quad_mask(width))),
        f"s_brev_b{width}": o(f"{u} {u}", reverse),
        f"s_bcnt0_i32_b{width}": o(f"u32 {u}", _nonzero(32, lambda a: width - a.bit_count())),
        f"s_bcnt1_i32_b{width}": o(f"u32 {u}", _nonzero(32, lambda a: a.bit_count())),
        f"s_ff0_i32_b{width}": o(f"i32 {u}", _keeps_scc(lambda a: _first(a, width, 0))),
        f"s_ff1_i32_b{width}": o(f"i32 {u}", _keeps_scc(lambda a: _first(a, width, 1))),
        f"s_flbit_i32_b{width}": o(f"i32 {u}", flbit),
        f"s_bitset0_b{width}": o(f"{u} u32", lambda s, d, a: (d & ~(1 << (a & top)), None)),
        f"s_bitset1_b{width}": o(f"{u} u32", lambda s, d, a: (d | 1 << (a & top), None)),
        f"s_bitcmp0_b{width}": o(f"- {u} u32", _only_scc(lambda a, b: not a >> (b & top) & 1)),
        f"s_bitcmp1_b{width}": o(f"- {u} u32", _only_scc(lambda a, b: bool(a >> (b & top) & 1))),
    }


OPERATIONS = _table()
EXEC_OPERATIONS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    **{f"s_{name}_saveexec_b64": lambda a, e, f=f: (e, f(a, e)) for name, f in _BITS.items()},
    "s_andn1_saveexec_b64": lambda a, e: (e, ~a & e),
    "s_orn1_saveexec_b64": lambda a, e: (e, ~a | e),
    "s_andn1_wrexec_b64": lambda a, e: (~a & e, ~a & e),
    "s_andn2_wrexec_b64": lambda a, e: (a & ~e, a & ~e),
}
"""s_..._saveexec_b64, s_..._wrexec_b64: (source, EXEC) -> (result, new EXEC)."""


def _constant_operations() -> dict[str, Callable[..., Result]]:
    """SOPK: (scc, destination, unsigned 16-bit constant) -> (result, scc)."""

    def add(scc: int, d: int, k: int) -> Result:
        exact = signed(d, 32) + signed(k, 16)
        return exact, int(signed(exact, 32) != exact)

    table: dict[str, Callable[..., Result]] = {
        "s_movk_i32": lambda s, d, k: (signed(k, 16), None),
        "s_cmovk_i32": lambda s, d, k: (signed(k, 16) if s else d, None),
        "s_addk_i32": add,
        "s_mulk_i32": lambda s, d, k: (d * signed(k, 16), None),
    }
    for name, function in _COMPARE.items():
        table[f"s_cmpk_{name}_u32"] = lambda s, d, k, f=function: (None, int(f(d, k)))
        table[f"s_cmpk_{name}_i32"] = lambda s, d, k, f=function: (
            None,
            int(f(signed(d, 32), signed(k, 16))),
        )
    return table


CONSTANT_OPERATIONS = _constant_operations()
