"""VOP3P: packed math with halves chosen and negated, mixed precision, dot products, moves."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from lane_checks import LaneCheck, check_lanes
from models.number_formats import F16, F32, FORMATS, Format
from models.vector_alu import Environment
from models.vop3p import PACKED, Modifiers, Packed, dot_of_halves, dot_of_integers, mixed, packed
from programs import LANES, Array, Segment, run
from vector_cases import random_environment, random_values

from jitfmha.emulator import EmulatorError

_NAMES = ("v0", "v2", "v4", "v6")
_PAIRS = ("v[0:1]", "v[2:3]", "v[4:5]", "v[6:7]")


def _check(
    code: str,
    sources: list[list[int]],
    old: list[int],
    model: Callable[..., int],
    kind: str,
    *,
    wide: bool = False,
    environment: Environment | None = None,
) -> LaneCheck:
    """With the destination and the sources in the registers of `_NAMES`, or of `_PAIRS`."""
    destination, *names = _PAIRS if wide else _NAMES
    mode = (environment or Environment()).bits
    contents = dict(zip(names, sources, strict=False))
    return LaneCheck(code, destination, old, contents, model, FORMATS.get(kind), mode)


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
) -> LaneCheck:
    wide = op.kind == "f32"
    names = _PAIRS if wide else _NAMES
    code = f"{name} " + ", ".join(names[: op.count + 1])
    code += _listed("op_sel", modifiers.op_sel) + _listed("op_sel_hi", modifiers.op_sel_hi)
    if op.kind[0] == "f":
        code += _listed("neg_lo", modifiers.neg_lo) + _listed("neg_hi", modifiers.neg_hi)
    code += " clamp" * modifiers.clamp

    def model(old: int, *sources: int) -> int:
        return packed(op, environment, modifiers, *sources)

    sources = [_pairs(op.kind, rng) for _ in range(op.count)]
    old = _pairs(op.kind, rng)
    return _check(code, sources, old, model, op.kind, wide=wide, environment=environment)


def _plain(count: int, *, clamp: bool = False) -> Modifiers:
    return Modifiers((0,) * count, (1,) * count, (0,) * count, (0,) * count, clamp)


def test_packed(emulator, arch, seed):
    """With drawn modifiers, and floating point in drawn modes."""
    rng = random.Random(seed)
    checks = []
    for name, op in PACKED.items():
        if arch not in op.archs:
            continue
        is_float = op.kind[0] == "f"
        cases = [(_plain(op.count), Environment())]
        for _ in range(4):
            clamp = rng.random() < 0.4 and (op.saturates or is_float)
            bits = [_random_bits(rng, op.count) for _ in range(4)]
            cases.append((Modifiers(*bits, clamp), Environment()))
        for_modes = (False, False, False, True) if is_float else ()
        cases += [(_plain(op.count, clamp=clamp), random_environment(rng)) for clamp in for_modes]
        checks += [_packed_check(name, op, modifiers, rng, mode) for modifiers, mode in cases]
    check_lanes(emulator, arch, checks)


def test_constants_and_scalars(emulator, arch, seed):
    """A constant of two halves is in the lower one; integers fill both with their sign."""
    rng = random.Random(seed)
    texts = {"1.0": 0x3C00, "-4.0": 0xC400, "0.15915494": 0x3118, "-1": 0xFFFFFFFF, "3": 3}
    floats = {"1.0": 0x3F800000, "-4.0": 0xC0800000, "-1": 0xFFFFFFFF, "3": 3}

    def with_constant(name: str, text: str, bits: int) -> LaneCheck:
        def model(old: int, a: int) -> int:
            return packed(op, Environment(), modifiers, a, bits)

        op, modifiers = PACKED[name], Modifiers((0, 0), _random_bits(rng, 2), (0, 0), (0, 0))
        code = f"{name} v0, v2, {text}" + _listed("op_sel_hi", modifiers.op_sel_hi)
        return _check(code, [_pairs(op.kind, rng)], _pairs(op.kind, rng), model, op.kind)

    def with_scalar(kind: str, scalar: int, registers: str) -> LaneCheck:
        def model(old: int, a: int) -> int:
            return packed(PACKED[f"v_pk_mul_{kind}"], Environment(), _plain(2), scalar, a)

        code = f"s_mov_b32 s4, 0x{scalar & 0xFFFFFFFF:x}\ns_mov_b32 s5, 0x{scalar >> 32:x}\n"
        code += f"v_pk_mul_{kind} {registers}"
        return _check(code, [_pairs(kind, rng)], _pairs(kind, rng), model, kind, wide=kind == "f32")

    cases = [(name, texts) for name in ("v_pk_add_f16", "v_pk_mul_f16")]
    cases += [(name, floats) for name in ("v_pk_add_u16", "v_pk_max_i16")]
    checks = [with_constant(name, *each) for name, values in cases for each in values.items()]
    checks.append(with_scalar("f16", 0x42483E48, "v0, s4, v2"))
    checks.append(with_scalar("f32", 0x40490FDB3FC90FDB, "v[0:1], s[4:5], v[2:3]"))
    check_lanes(emulator, arch, checks)


def test_an_undocumented_half_of_a_constant_stops(emulator, arch):
    segment = Segment("v_pk_mul_f32 v[0:1], v[2:3], 2.0", {}, [])
    with pytest.raises(EmulatorError, match="upper half of a constant"):
        run(emulator, arch, [segment])
    inputs: dict[str, Array | int] = {"v[2:3]": np.full(LANES, 0x404000003F800000, np.uint64)}
    lower = Segment("v_pk_mul_f32 v[0:1], v[2:3], 2.0 op_sel_hi:[1,0]", inputs, ["v[0:1]"])
    (result,) = run(emulator, arch, [lower])
    assert set(result["v[0:1]"]) == {0x40C0000040000000}


def test_mixed_precision(emulator, arch, seed):
    rng = random.Random(seed)

    def check(result: str, name: str, environment: Environment) -> LaneCheck:
        def model(old: int, *sources: int) -> int:
            return mixed(result, environment, modifiers, old, *sources)

        modifiers = Modifiers(*(_random_bits(rng, 3) for _ in range(4)), rng.random() < 0.3)
        code = f"v_fma_mix{name} v0"
        for k in range(3):
            text = f"|v{2 + 2 * k}|" if modifiers.neg_hi[k] else f"v{2 + 2 * k}"
            code += f", {'-' if modifiers.neg_lo[k] else ''}{text}"
        code += _listed("op_sel", modifiers.op_sel) + _listed("op_sel_hi", modifiers.op_sel_hi)
        code += " clamp" * modifiers.clamp
        sources = [
            _pairs("f16", rng) if modifiers.op_sel_hi[k] else random_values("f32", rng, LANES)
            for k in range(3)
        ]
        kind = "f32" if result == "f32" else "f16"
        return _check(code, sources, _pairs("f16", rng), model, kind, environment=environment)

    results = (("f32", "_f32"), ("low", "lo_f16"), ("high", "hi_f16"))
    environments = [random_environment(rng) if i % 2 else Environment() for i in range(12)]
    check_lanes(emulator, arch, [check(*each, e) for each in results for e in environments])


def test_constants_of_mixed_precision(emulator, arch, seed):
    """As float32, or as float16 where op_sel_hi says so."""
    rng = random.Random(seed)

    def check(op_sel_hi: tuple[int, ...], bits: int) -> LaneCheck:
        def model(old: int, a: int, c: int) -> int:
            modifiers = Modifiers((0, 0, 0), op_sel_hi, (0, 0, 0), (0, 0, 0))
            return mixed("f32", Environment(), modifiers, old, a, bits, c)

        code = "v_fma_mix_f32 v0, v2, 0.5, v4" + _listed("op_sel_hi", op_sel_hi)
        sources = [random_values("f32", rng, LANES) for _ in range(2)]
        return _check(code, sources, random_values("f32", rng, LANES), model, "f32")

    check_lanes(emulator, arch, [check((0, 0, 0), 0x3F000000), check((0, 1, 0), 0x3800)])


def _numbers(number: Format, rng: random.Random) -> list[int]:
    if number is F16:
        return _pairs("f16", rng)
    wide = [random_values("f32", rng, LANES) for _ in range(2)]
    return [x >> 16 | y & 0xFFFF0000 for x, y in zip(*wide, strict=True)]


def test_dot_products_of_floats(emulator, arch, seed):
    rng = random.Random(seed)

    def check(name: str, i: int) -> LaneCheck:
        def model(old: int, a: int, b: int, c: int) -> int:
            pairs = []
            for half, negate in enumerate(negated):
                halves = (source >> (16 * half) & 0xFFFF for source in (a, b))
                x, y = (bits ^ 0x8000 * negate[k] for k, bits in enumerate(halves))
                pairs.append((x, y))
            return dot_of_halves(number, pairs, c ^ F32.sign * negated[0][2])

        number, negated = FORMATS[name], [(0, 0, 0), (0, 0, 0)]
        if i > 2:
            negated = [_random_bits(rng, 3), (*_random_bits(rng, 2), 0)]
        code = f"v_dot2_f32_{name} v0, v2, v4, v6"
        code += _listed("neg_lo", negated[0]) + _listed("neg_hi", negated[1])
        addend, old = (random_values("f32", rng, LANES) for _ in range(2))
        sources = [_numbers(number, rng), _numbers(number, rng), addend]
        environment = random_environment(rng) if i % 2 else None
        return _check(code, sources, old, model, "f32", environment=environment)

    names = ("f16", "bf16") if arch == "gfx950" else ("f16",)
    check_lanes(emulator, arch, [check(name, i) for name in names for i in range(6)])


def test_scales_without_their_product_are_an_error(emulator):
    with pytest.raises(EmulatorError, match=r"v_mfma_ld_scale_b32 v0, v1.*does not emulate"):
        run(emulator, "gfx950", [Segment("v_mfma_ld_scale_b32 v0, v1")])


def test_dot_products_of_integers(emulator, arch, seed):
    rng = random.Random(seed)

    def check(name: str, width: int, clamp: bool) -> LaneCheck:
        def model(old: int, a: int, b: int, c: int) -> int:
            return dot_of_integers(width, "_i32_" in name, clamp, a, b, c)

        sources = [random_values("u32", rng, LANES) for _ in range(3)]
        code = f"{name} v0, v2, v4, v6" + " clamp" * clamp
        return _check(code, sources, random_values("u32", rng, LANES), model, "u32")

    names = [(f"v_dot{32 // w}_{s}32_{s}{w}", w) for w in (16, 8, 4) for s in "iu"]
    checks = [check(*each, clamp) for each in names for clamp in (False, True)]
    check_lanes(emulator, arch, checks)


@pytest.mark.parametrize("op_sel", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_packed_moves(emulator, arch, seed, op_sel):
    rng = random.Random(seed)

    def model(old: int, a: int, b: int) -> int:
        return a >> (32 * op_sel[0]) & 0xFFFFFFFF | (b >> (32 * op_sel[1]) & 0xFFFFFFFF) << 32

    values = [random_values("u64", rng, LANES) for _ in range(3)]
    selected = _listed("op_sel", op_sel)
    code = f"v_pk_mov_b32 v[0:1], v[2:3], v[4:5]{selected}"
    checks = [_check(code, values[:2], values[2], model, "u64", wide=True)]
    code = f"v_pk_mov_b32 v[0:1], v[0:1], v[2:3]{selected}"
    in_place = _check(
        code, values[:1], values[2], lambda old, b: model(old, old, b), "u64", wide=True
    )
    check_lanes(emulator, arch, [*checks, in_place])


def test_accumulation_registers(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    a, b, c = rng.integers(0, 2**32, (3, LANES), np.uint32)
    mask = 0xF0F0F0F0F0F0F0F0
    active = np.array([mask >> i & 1 for i in range(LANES)], bool)
    segments = [
        Segment("v_accvgpr_read_b32 v0, a3", {"v0": a, "a3": b, "exec": mask}, ["v0"]),
        Segment("v_accvgpr_write_b32 a3, v0", {"v0": a, "a3": c, "exec": mask}, ["a3"]),
        Segment("v_accvgpr_write_b32 a3, 1.0", {"a3": c, "exec": mask}, ["a3"]),
    ]
    read, written, constant = run(emulator, arch, segments)
    np.testing.assert_array_equal(read["v0"], np.where(active, b, a))
    np.testing.assert_array_equal(written["a3"], np.where(active, a, c))
    np.testing.assert_array_equal(constant["a3"], np.where(active, 0x3F800000, c))
