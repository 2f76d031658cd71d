"""VOP3P: packed math with halves chosen and negated, mixed precision, dot products, moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from models.number_formats import BF16, F16, F32, Format
from models.vector_alu import Environment
from models.vop3p import (
    PACKED,
    Modifiers,
    Packed,
    dot_of_halves,
    dot_of_integers,
    mixed,
    packed,
    same,
)
from programs import LANES, Array, Segment, run
from vector_cases import random_environment, random_values

from jitfmha.emulator import Emulator, EmulatorError

_NAMES = ("v0", "v2", "v4", "v6")
_PAIRS = ("v[0:1]", "v[2:3]", "v[4:5]", "v[6:7]")


@dataclass
class _Check:
    """An instruction on random lanes, and the model of one lane: (old, *sources) -> result."""

    code: str
    sources: list[list[int]]
    old: list[int]
    model: Callable[..., int]
    kind: str
    wide: bool = False
    environment: Environment | None = None

    def segment(self) -> Segment:
        dtype = np.uint64 if self.wide else np.uint32
        names = _PAIRS if self.wide else _NAMES
        inputs: dict[str, Array | int] = {
            name: np.array(values, dtype)
            for name, values in zip(names, [self.old, *self.sources], strict=False)
        }
        inputs["exec"] = 0xFFFF_FF0F_FFFF_FFFE
        if self.environment:
            inputs["mode"] = self.environment.bits
        return Segment(self.code, inputs, [names[0]])

    def failures(self, result: dict[str, Array]) -> list[str]:
        (values,) = result.values()
        wrong = []
        for lane in range(len(self.old)):
            arguments = [source[lane] for source in self.sources]
            active = 0xFFFF_FF0F_FFFF_FFFE >> (lane % LANES) & 1
            expected = self.model(self.old[lane], *arguments) if active else self.old[lane]
            if not same(self.kind, int(values[lane]), expected):
                listed = " ".join(f"{x:x}" for x in arguments)
                wrong.append(f"    lane {lane}: ({listed}) gave {values[lane]:x}, not {expected:x}")
        return wrong


def _run(emulator: Emulator, arch: str, checks: list[_Check]) -> None:
    results = run(emulator, arch, [each.segment() for each in checks])
    report = []
    for each, result in zip(checks, results, strict=True):
        wrong = each.failures(result)
        if wrong:
            mode = f"  mode 0x{each.environment.bits:x}" if each.environment else ""
            report += [each.code + mode, *wrong[:3]]
    assert not report, "\n".join(report[:60])


def _pairs(kind: str, rng: random.Random, n: int = LANES) -> list[int]:
    low, high = random_values(kind, rng, n), random_values(kind, rng, n)
    width = int(kind[1:])
    return [x | y << width for x, y in zip(low, high, strict=True)]


def _random_bits(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2) for _ in range(count))


def _listed(name: str, bits: tuple[int, ...]) -> str:
    return f" {name}:[{','.join(map(str, bits))}]"


def _packed_check(
    name: str, op: Packed, modifiers: Modifiers, rng: random.Random, environment: Environment
) -> _Check:
    wide = op.kind == "f32"
    names = _PAIRS if wide else _NAMES
    code = f"{name} " + ", ".join(names[: op.count + 1])
    code += _listed("op_sel", modifiers.op_sel) + _listed("op_sel_hi", modifiers.op_sel_hi)
    if op.kind[0] == "f":
        code += _listed("neg_lo", modifiers.neg_lo) + _listed("neg_hi", modifiers.neg_hi)
    code += " clamp" * modifiers.clamp
    return _Check(
        code,
        [_pairs(op.kind, rng) for _ in range(op.count)],
        _pairs(op.kind, rng),
        lambda old, *sources: packed(op, environment, modifiers, *sources),
        op.kind,
        wide,
        environment,
    )


def _plain(count: int, *, clamp: bool = False) -> Modifiers:
    return Modifiers((0,) * count, (1,) * count, (0,) * count, (0,) * count, clamp)


def test_packed(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for name, op in PACKED.items():
        if arch not in op.archs:
            continue
        checks.append(_packed_check(name, op, _plain(op.count), rng, Environment()))
        for _ in range(4):
            clamp = rng.random() < 0.4 and (op.saturates or op.kind[0] == "f")
            bits = [_random_bits(rng, op.count) for _ in range(4)]
            checks.append(_packed_check(name, op, Modifiers(*bits, clamp), rng, Environment()))
    _run(emulator, arch, checks)


def test_packed_under_every_mode(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    _run(
        emulator,
        arch,
        [
            _packed_check(name, op, _plain(op.count, clamp=clamp), rng, random_environment(rng))
            for name, op in PACKED.items()
            if arch in op.archs and op.kind[0] == "f"
            for clamp in (False, False, False, True)
        ],
    )


def test_constants_and_scalars(emulator: Emulator, arch: str, seed: int) -> None:
    """A constant of two halves is in the lower one; integers fill both with their sign."""
    rng = random.Random(seed)
    texts = {"1.0": 0x3C00, "-4.0": 0xC400, "0.15915494": 0x3118, "-1": 0xFFFFFFFF, "3": 3}
    floats = {"1.0": 0x3F800000, "-4.0": 0xC0800000, "-1": 0xFFFFFFFF, "3": 3}
    checks = []
    for name, kind, constants in (
        ("v_pk_add_f16", "f16", texts),
        ("v_pk_mul_f16", "f16", texts),
        ("v_pk_add_u16", "u16", floats),
        ("v_pk_max_i16", "i16", floats),
    ):
        op = PACKED[name]
        for text, bits in constants.items():
            modifiers = Modifiers((0, 0), _random_bits(rng, 2), (0, 0), (0, 0))
            code = f"{name} v0, v2, {text}" + _listed("op_sel_hi", modifiers.op_sel_hi)

            def model(
                old: int, a: int, op: Packed = op, bits: int = bits, m: Modifiers = modifiers
            ) -> int:
                return packed(op, Environment(), m, a, bits)

            checks.append(_Check(code, [_pairs(kind, rng)], _pairs(kind, rng), model, kind))
    plain = _plain(2)
    for name, kind in (("v_pk_mul_f16", "f16"), ("v_pk_mul_f32", "f32")):
        op = PACKED[name]
        wide = kind == "f32"
        scalar = 0x40490FDB3FC90FDB if wide else 0x42483E48
        load = f"s_mov_b32 s4, 0x{scalar & 0xFFFFFFFF:x}\ns_mov_b32 s5, 0x{scalar >> 32:x}\n"
        registers = "v[0:1], s[4:5], v[2:3]" if wide else "v0, s4, v2"

        def scaled(old: int, a: int, op: Packed = op, scalar: int = scalar) -> int:
            return packed(op, Environment(), plain, scalar, a)

        values = [_pairs(kind, rng)]
        checks.append(
            _Check(f"{load}{name} {registers}", values, _pairs(kind, rng), scaled, kind, wide)
        )
    _run(emulator, arch, checks)


def test_an_undocumented_half_of_a_constant_stops(emulator: Emulator, arch: str) -> None:
    segment = Segment("v_pk_mul_f32 v[0:1], v[2:3], 2.0", {}, [])
    with pytest.raises(EmulatorError, match="upper half of a constant"):
        run(emulator, arch, [segment])
    inputs: dict[str, Array | int] = {"v[2:3]": np.full(LANES, 0x404000003F800000, np.uint64)}
    lower = Segment("v_pk_mul_f32 v[0:1], v[2:3], 2.0 op_sel_hi:[1,0]", inputs, ["v[0:1]"])
    (result,) = run(emulator, arch, [lower])
    assert set(result["v[0:1]"]) == {0x40C0000040000000}


def test_mixed_precision(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for result, name in (("f32", "_f32"), ("low", "lo_f16"), ("high", "hi_f16")):
        for i in range(12):
            environment = random_environment(rng) if i % 2 else Environment()
            bits = [_random_bits(rng, 3) for _ in range(4)]
            modifiers = Modifiers(*bits, rng.random() < 0.3)
            code = f"v_fma_mix{name} v0"
            for k in range(3):
                text = f"v{2 + 2 * k}"
                text = f"|{text}|" if modifiers.neg_hi[k] else text
                code += f", {'-' if modifiers.neg_lo[k] else ''}{text}"
            code += _listed("op_sel", modifiers.op_sel) + _listed("op_sel_hi", modifiers.op_sel_hi)
            code += " clamp" * modifiers.clamp
            sources = [
                _pairs("f16", rng) if modifiers.op_sel_hi[k] else random_values("f32", rng, LANES)
                for k in range(3)
            ]

            def model(
                old: int,
                *sources: int,
                result: str = result,
                environment: Environment = environment,
                modifiers: Modifiers = modifiers,
            ) -> int:
                return mixed(result, environment, modifiers, old, *sources)

            kind = "f32" if result == "f32" else "f16"
            checks.append(
                _Check(code, sources, _pairs("f16", rng), model, kind, environment=environment)
            )
    _run(emulator, arch, checks)


def test_constants_of_mixed_precision(emulator: Emulator, arch: str, seed: int) -> None:
    """As float32, or as float16 where op_sel_hi says so."""
    rng = random.Random(seed)
    checks = []
    for op_sel_hi in ((0, 0, 0), (0, 1, 0)):
        modifiers = Modifiers((0, 0, 0), op_sel_hi, (0, 0, 0), (0, 0, 0))
        code = "v_fma_mix_f32 v0, v2, 0.5, v4" + _listed("op_sel_hi", op_sel_hi)
        bits = 0x3800 if op_sel_hi[1] else 0x3F000000

        def model(old: int, a: int, c: int, bits: int = bits, m: Modifiers = modifiers) -> int:
            return mixed("f32", Environment(), m, old, a, bits, c)

        sources = [random_values("f32", rng, LANES) for _ in range(2)]
        checks.append(_Check(code, sources, random_values("f32", rng, LANES), model, "f32"))
    _run(emulator, arch, checks)


def _numbers(number: Format, rng: random.Random) -> list[int]:
    if number is F16:
        return _pairs("f16", rng)
    wide = [random_values("f32", rng, LANES) for _ in range(2)]
    return [x >> 16 | y & 0xFFFF0000 for x, y in zip(*wide, strict=True)]


def test_dot_products_of_floats(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    kinds = [("f16", F16)] + ([("bf16", BF16)] if arch == "gfx950" else [])
    for name, number in kinds:
        for i in range(6):
            negated = [(0, 0, 0), (0, 0, 0)]
            if i > 2:
                negated = [_random_bits(rng, 3), (*_random_bits(rng, 2), 0)]  # type: ignore[list-item]
            code = f"v_dot2_f32_{name} v0, v2, v4, v6"
            code += _listed("neg_lo", negated[0]) + _listed("neg_hi", negated[1])

            def model(
                old: int, a: int, b: int, c: int,
                number: Format = number, negated: list[tuple[int, int, int]] = negated,
            ) -> int:  # fmt: skip
                pairs = []
                for half, negate in enumerate(negated):
                    x, y = (
                        (source >> (16 * half) & 0xFFFF) ^ (0x8000 if negate[k] else 0)
                        for k, source in enumerate((a, b))
                    )
                    pairs.append((x, y))
                addend = c ^ (F32.sign if negated[0][2] else 0)
                return dot_of_halves(number, pairs, addend)

            sources = [
                _numbers(number, rng),
                _numbers(number, rng),
                random_values("f32", rng, LANES),
            ]
            old = random_values("f32", rng, LANES)
            environment = random_environment(rng) if i % 2 else None
            checks.append(_Check(code, sources, old, model, "f32", environment=environment))
    _run(emulator, arch, checks)


def test_scales_without_their_product_are_an_error(emulator: Emulator) -> None:
    with pytest.raises(EmulatorError, match=r"v_mfma_ld_scale_b32 v0, v1.*does not emulate"):
        run(emulator, "gfx950", [Segment("v_mfma_ld_scale_b32 v0, v1")])


def test_dot_products_of_integers(emulator: Emulator, arch: str, seed: int) -> None:
    rng = random.Random(seed)
    checks = []
    for name, width, is_signed in (
        ("v_dot2_i32_i16", 16, True), ("v_dot2_u32_u16", 16, False), ("v_dot4_i32_i8", 8, True),
        ("v_dot4_u32_u8", 8, False), ("v_dot8_i32_i4", 4, True), ("v_dot8_u32_u4", 4, False),
    ):  # fmt: skip
        for clamp in (False, True):

            def model(
                old: int, a: int, b: int, c: int,
                width: int = width, is_signed: bool = is_signed, clamp: bool = clamp,
            ) -> int:  # fmt: skip
                return dot_of_integers(width, is_signed, clamp, a, b, c)

            sources = [random_values("u32", rng, LANES) for _ in range(3)]
            code = f"{name} v0, v2, v4, v6" + " clamp" * clamp
            checks.append(_Check(code, sources, random_values("u32", rng, LANES), model, "u32"))
    _run(emulator, arch, checks)


@pytest.mark.parametrize("op_sel", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_packed_moves(emulator: Emulator, arch: str, seed: int, op_sel: tuple[int, int]) -> None:
    rng = random.Random(seed)

    def model(old: int, a: int, b: int) -> int:
        return a >> (32 * op_sel[0]) & 0xFFFFFFFF | (b >> (32 * op_sel[1]) & 0xFFFFFFFF) << 32

    values = [random_values("u64", rng, LANES) for _ in range(3)]
    code = "v_pk_mov_b32 v[0:1], v[2:3], v[4:5]" + _listed("op_sel", op_sel)
    in_place = "v_pk_mov_b32 v[0:1], v[0:1], v[2:3]" + _listed("op_sel", op_sel)
    _run(
        emulator,
        arch,
        [
            _Check(code, values[:2], values[2], model, "u64", wide=True),
            _Check(
                in_place, values[:1], values[2], lambda old, b: model(old, old, b), "u64", wide=True
            ),
        ],
    )


def test_accumulation_registers(emulator: Emulator, arch: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = rng.integers(0, 2**32, (3, LANES), np.uint32)
    mask = 0xF0F0F0F0F0F0F0F0
    active = np.array([mask >> i & 1 for i in range(LANES)], bool)
    read, written, constant = run(
        emulator,
        arch,
        [
            Segment("v_accvgpr_read_b32 v0, a3", {"v0": a, "a3": b, "exec": mask}, ["v0"]),
            Segment("v_accvgpr_write_b32 a3, v0", {"v0": a, "a3": c, "exec": mask}, ["a3"]),
            Segment("v_accvgpr_write_b32 a3, 1.0", {"a3": c, "exec": mask}, ["a3"]),
        ],
    )
    np.testing.assert_array_equal(read["v0"], np.where(active, b, a))
    np.testing.assert_array_equal(written["a3"], np.where(active, a, c))
    np.testing.assert_array_equal(constant["a3"], np.where(active, 0x3F800000, c))
