"""The scalar ALU's instructions in Python integers, from the ISA documents' words.

A `ScalarOperation` takes its sources (signed ones as signed integers) and SCC, and gives the result
and the new SCC; None leaves either alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class ExecOperation:
    """s_..._saveexec_b64, s_..._wrexec_b64: (source, EXEC) -> (result, new EXEC)."""

    function: Callable[[int, int], tuple[int, int]]


def _mask(width: int) -> int:
    return (1 << width) - 1


def _signed(value: int, width: int) -> int:
    value &= _mask(width)
    return value - (1 << width) if value >> (width - 1) else value


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
        exact = function(_signed(a, 32), _signed(b, 32))
        return exact, int(_signed(exact, 32) != exact)

    return operate


def _bit_field(width: int, signed: bool) -> Callable[[int, int], int]:
    def extract(value: int, control: int) -> int:
        position, size = control & (width - 1), control >> 16 & 0x7F
        if size == 0:
            return 0
        field = value >> position  # a signed value brings its sign along
        if size >= width:
            return field
        return (
            _signed(field, size)
            if signed and position + size < width
            else field & (_mask(size) if not signed else -1)
        )

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


def _table() -> dict[str, ScalarOperation]:
    o = _operation
    bits: dict[str, Callable[[int, int], int]] = {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "andn2": lambda a, b: a & ~b, "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
    }  # fmt: skip
    table = {
        "s_add_u32": o("u32 u32 u32", lambda s, d, a, b: (a + b, a + b >> 32)),
        "s_sub_u32": o("u32 u32 u32", lambda s, d, a, b: (a - b, int(b > a))),
        "s_add_i32": o("u32 u32 u32", _overflow(lambda a, b: a + b)),
        "s_sub_i32": o("u32 u32 u32", _overflow(lambda a, b: a - b)),
        "s_addc_u32": o("u32 u32 u32", lambda s, d, a, b: (a + b + s, a + b + s >> 32)),
        "s_subb_u32": o("u32 u32 u32", lambda s, d, a, b: (a - b - s, int(b + s > a))),
        "s_cselect_b32": o("u32 u32 u32", lambda s, d, a, b: (a if s else b, None)),
        "s_cselect_b64": o("u64 u64 u64", lambda s, d, a, b: (a if s else b, None)),
        "s_bfm_b32": o("u32 u32 u32", _keeps_scc(lambda a, b: _mask(a & 31) << (b & 31))),
        "s_bfm_b64": o("u64 u32 u32", _keeps_scc(lambda a, b: _mask(a & 63) << (b & 63))),
        "s_mul_i32": o("u32 u32 u32", _keeps_scc(lambda a, b: a * b)),
        "s_mul_hi_u32": o("u32 u32 u32", _keeps_scc(lambda a, b: a * b >> 32)),
        "s_mul_hi_i32": o("i32 i32 i32", _keeps_scc(lambda a, b: a * b >> 32)),
        "s_absdiff_i32": o("u32 i32 i32", _nonzero(32, lambda a, b: abs(_signed(a - b, 32)))),
        "s_pack_ll_b32_b16": o(
            "u32 u32 u32", _keeps_scc(lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16)
        ),
        "s_pack_lh_b32_b16": o("u32 u32 u32", _keeps_scc(lambda a, b: a & 0xFFFF | b & 0xFFFF0000)),
        "s_pack_hh_b32_b16": o("u32 u32 u32", _keeps_scc(lambda a, b: a >> 16 | b & 0xFFFF0000)),
        "s_abs_i32": o("u32 i32", _nonzero(32, abs)),
        "s_sext_i32_i8": o("i32 u32", _keeps_scc(lambda a: _signed(a, 8))),
        "s_sext_i32_i16": o("i32 u32", _keeps_scc(lambda a: _signed(a, 16))),
        "s_flbit_i32": o("i32 u32", _keeps_scc(_flbit_signed(32))),
        "s_flbit_i32_i64": o("i32 u64", _keeps_scc(_flbit_signed(64))),
        "s_bitreplicate_b64_b32": o(
            "u64 u32", _keeps_scc(lambda a: sum((a >> i & 1) * 3 << (2 * i) for i in range(32)))
        ),
    }
    for n in (1, 2, 3, 4):
        table[f"s_lshl{n}_add_u32"] = o(
            "u32 u32 u32", lambda s, d, a, b, n=n: ((a << n) + b, int((a << n) + b >= 1 << 32))
        )
    for kind in ("i32", "u32"):
        types = f"{kind} {kind} {kind}"
        table[f"s_min_{kind}"] = o(types, lambda s, d, a, b: (min(a, b), int(a < b)))
        table[f"s_max_{kind}"] = o(types, lambda s, d, a, b: (max(a, b), int(a >= b)))
    for width in (32, 64):
        u, i = f"u{width}", f"i{width}"
        top = width - 1
        table |= {
            f"s_{name}_b{width}": o(f"{u} {u} {u}", _nonzero(width, function))
            for name, function in bits.items()
        }
        table |= {
            f"s_lshl_b{width}": o(
                f"{u} {u} u32", _nonzero(width, lambda a, b, t=top: a << (b & t))
            ),
            f"s_lshr_b{width}": o(
                f"{u} {u} u32", _nonzero(width, lambda a, b, t=top: a >> (b & t))
            ),
            f"s_ashr_i{width}": o(
                f"{i} {i} u32", _nonzero(width, lambda a, b, t=top: a >> (b & t))
            ),
            f"s_bfe_u{width}": o(f"{u} {u} u32", _nonzero(width, _bit_field(width, signed=False))),
            f"s_bfe_i{width}": o(f"{i} {i} u32", _nonzero(width, _bit_field(width, signed=True))),
            f"s_mov_b{width}": o(f"{u} {u}", _keeps_scc(lambda a: a)),
            f"s_cmov_b{width}": o(f"{u} {u}", lambda s, d, a: (a if s else d, None)),
            f"s_not_b{width}": o(f"{u} {u}", _nonzero(width, lambda a: ~a)),
            f"s_wqm_b{width}": o(f"{u} {u}", _nonzero(width, _whole_quads(width))),
            f"s_quadmask_b{width}": o(f"{u} {u}", _nonzero(width, _quad_mask(width))),
            f"s_brev_b{width}": o(
                f"{u} {u}", _keeps_scc(lambda a, w=width: int(f"{a:0{w}b}"[::-1], 2))
            ),
            f"s_bcnt0_i32_b{width}": o(
                f"u32 {u}", _nonzero(32, lambda a, w=width: w - a.bit_count())
            ),
            f"s_bcnt1_i32_b{width}": o(f"u32 {u}", _nonzero(32, lambda a: a.bit_count())),
            f"s_ff0_i32_b{width}": o(f"i32 {u}", _keeps_scc(lambda a, w=width: _first(a, w, 0))),
            f"s_ff1_i32_b{width}": o(f"i32 {u}", _keeps_scc(lambda a, w=width: _first(a, w, 1))),
            f"s_flbit_i32_b{width}": o(
                f"i32 {u}", _keeps_scc(lambda a, w=width: _first(a, w, 1, from_top=True))
            ),
            f"s_bitset0_b{width}": o(
                f"{u} u32", lambda s, d, a, t=top: (d & ~(1 << (a & t)), None)
            ),
            f"s_bitset1_b{width}": o(f"{u} u32", lambda s, d, a, t=top: (d | 1 << (a & t), None)),
            f"s_bitcmp0_b{width}": o(
                f"- {u} u32", _only_scc(lambda a, b, t=top: not a >> (b & t) & 1)
            ),
            f"s_bitcmp1_b{width}": o(
                f"- {u} u32", _only_scc(lambda a, b, t=top: bool(a >> (b & t) & 1))
            ),
        }
    compare: dict[str, Callable[[int, int], bool]] = {
        "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    }  # fmt: skip
    for name, function in compare.items():
        for kind in ("i32", "u32") + (("u64",) if name in ("eq", "lg") else ()):
            table[f"s_cmp_{name}_{kind}"] = o(f"- {kind} {kind}", _only_scc(function))
    return table


OPERATIONS = _table()
EXEC_OPERATIONS = {
    "s_and_saveexec_b64": ExecOperation(lambda a, e: (e, a & e)),
    "s_or_saveexec_b64": ExecOperation(lambda a, e: (e, a | e)),
    "s_xor_saveexec_b64": ExecOperation(lambda a, e: (e, a ^ e)),
    "s_andn2_saveexec_b64": ExecOperation(lambda a, e: (e, a & ~e)),
    "s_orn2_saveexec_b64": ExecOperation(lambda a, e: (e, a | ~e)),
    "s_nand_saveexec_b64": ExecOperation(lambda a, e: (e, ~(a & e))),
    "s_nor_saveexec_b64": ExecOperation(lambda a, e: (e, ~(a | e))),
    "s_xnor_saveexec_b64": ExecOperation(lambda a, e: (e, ~(a ^ e))),
    "s_andn1_saveexec_b64": ExecOperation(lambda a, e: (e, ~a & e)),
    "s_orn1_saveexec_b64": ExecOperation(lambda a, e: (e, ~a | e)),
    "s_andn1_wrexec_b64": ExecOperation(lambda a, e: (~a & e, ~a & e)),
    "s_andn2_wrexec_b64": ExecOperation(lambda a, e: (a & ~e, a & ~e)),
}


def _constant_operations() -> dict[str, Callable[..., Result]]:
    """SOPK: (scc, destination, unsigned 16-bit constant) -> (result, scc)."""

    def add(scc: int, d: int, k: int) -> Result:
        exact = _signed(d, 32) + _signed(k, 16)
        return exact, int(_signed(exact, 32) != exact)

    compare: dict[str, Any] = {
        "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    }  # fmt: skip
    table: dict[str, Callable[..., Result]] = {
        "s_movk_i32": lambda s, d, k: (_signed(k, 16), None),
        "s_cmovk_i32": lambda s, d, k: (_signed(k, 16) if s else d, None),
        "s_addk_i32": add,
        "s_mulk_i32": lambda s, d, k: (d * _signed(k, 16), None),
    }
    for name, function in compare.items():
        table[f"s_cmpk_{name}_u32"] = lambda s, d, k, f=function: (None, int(f(d, k)))
        table[f"s_cmpk_{name}_i32"] = lambda s, d, k, f=function: (
            None,
            int(f(_signed(d, 32), _signed(k, 16))),
        )
    return table


CONSTANT_OPERATIONS = _constant_operations()
