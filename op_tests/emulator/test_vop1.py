"""VOP1 instructions that are no row of a table: approximations, small floats, moves."""

import numpy as np
import pytest
from models.small_floats import of_chip
from models.vop1 import APPROXIMATIONS
from numpy.typing import NDArray
from programs import LANES, Segment, run

from jitfmha.emulator import EmulatorError

# ---- Approximations ------------------------------------------------------------------------------


def _float32_inputs(name: str, rng: np.random.Generator, lanes: int) -> NDArray[np.float32]:
    """Edges, the range in which the function says something, and any bits."""
    bits = rng.integers(0, 2**32, lanes, np.uint32)
    values = bits.view(np.float32)
    third = lanes // 3
    if name == "exp":
        values[:third] = rng.uniform(-150, 130, third)
    elif name in ("sin", "cos"):
        values[:third] = rng.uniform(-2, 2, third)
        values[third : third + 64] = rng.uniform(-300, 300, 64)
    else:
        values[:third] = rng.uniform(0.4, 2.5, third)
    limits = np.finfo(np.float32)
    edges = [0.0, limits.tiny, limits.tiny / 2, limits.max, np.inf, np.nan, 1.0, 0.25, 0.5, 0.75]
    edges += [2.0, 4.0, np.nextafter(np.float32(1), np.float32(2)), 126.0, 127.9999, 128.0, 149.0]
    edges += [np.nextafter(np.float32(0.5), np.float32(0)), 2.0**23 + 1, 2.0**22 + 0.5]
    edges += [np.nextafter(np.float32(0.25), np.float32(0)), 0.49999997, 1.4901161e-08]
    both = np.array(edges, np.float32)
    values[-2 * len(edges) :] = np.concatenate([both, -both])
    return values


def _ulp(exact: NDArray[np.float64], smallest: float, mantissa: int) -> NDArray[np.float64]:
    size = np.maximum(np.abs(exact), smallest)
    return np.asarray(np.exp2(np.floor(np.log2(size)) - mantissa))


@pytest.mark.parametrize("mode", [0x3F0, 0x300, 0x3CB], ids=["default", "flushing", "rounding"])
def test_float32_approximations_are_within_one_ulp(emulator, arch, seed, mode):
    """Denormals are zeros, as sources and as results, and MODE does not matter."""
    rng = np.random.default_rng(seed)
    names = list(APPROXIMATIONS)
    inputs = [_float32_inputs(name, rng, 48 * LANES) for name in names]
    segments = [
        Segment(f"v_{name}_f32 v0, v1", {"v1": x, "mode": mode}, ["v0"])
        for name, x in zip(names, inputs, strict=True)
    ]
    smallest = float(np.finfo(np.float32).tiny)
    for name, x, result in zip(names, inputs, run(emulator, arch, segments), strict=True):
        actual = result["v0"].view(np.float32)
        with np.errstate(all="ignore"):
            flushed = np.where(np.abs(x) < smallest, np.copysign(0, x), x).astype(np.float64)
            exact = APPROXIMATIONS[name](flushed)
            overflow = np.abs(exact) >= 2.0**128
            exact = np.where(overflow, np.copysign(np.inf, exact), exact)
            error = np.abs(actual.astype(np.float64) - exact) / _ulp(exact, smallest, 23)
        nan = np.isnan(exact)
        np.testing.assert_array_equal(np.isnan(actual), nan, err_msg=name)
        special = np.isinf(exact) | (exact == 0)
        near = ~nan & ~special & (np.abs(exact) >= smallest)
        np.testing.assert_array_equal(
            actual[special], exact[special].astype(np.float32), err_msg=name
        )
        worst = int(np.argmax(np.where(near, error, 0)))
        assert error[worst] <= 1.0, f"{name}({x[worst]!r}) = {actual[worst]!r}: {error[worst]} ulp"
        small = ~nan & (np.abs(exact) < smallest)
        # At the border, an approximation may be the smallest normal number.
        below = small & (np.abs(exact) < smallest * (1 - 2**-22))
        assert not actual[below].any(), name


# Of the ISA documents: sources and results.
_EXAMPLES = """
exp  ff800000:00000000 80000000:3f800000 7f800000:7f800000
log  ff800000:ffc00000 bf800000:ffc00000 80000000:ff800000 00000000:ff800000 3f800000:00000000
log  7f800000:7f800000
rcp  ff800000:80000000 c0000000:bf000000 80000000:ff800000 00000000:7f800000 7f800000:00000000
rsq  ff800000:ffc00000 80000000:ff800000 00000000:7f800000 40800000:3f000000 7f800000:00000000
sqrt ff800000:ffc00000 80000000:80000000 40800000:40000000
sin  ff800000:ffc00000 ff7fffff:00000000 80000000:80000000 3e800000:3f800000 7f800000:ffc00000
cos  ff800000:ffc00000 ff7fffff:3f800000 80000000:3f800000 3e800000:00000000 7f800000:ffc00000
"""


def test_documented_examples(emulator):
    examples = [line.split() for line in _EXAMPLES.strip().splitlines()]
    pairs = [[pair.split(":") for pair in row[1:]] for row in examples]
    sources = [np.resize(np.uint32([int(source, 16) for source, _ in row]), LANES) for row in pairs]
    segments = [
        Segment(f"v_{name}_f32 v0, v1", {"v1": source}, ["v0"])
        for (name, *_), source in zip(examples, sources, strict=True)
    ]
    results = run(emulator, "gfx942", segments)
    for (name, *_), row, result in zip(examples, pairs, results, strict=True):
        actual = [f"{bits:08x}" for bits in result["v0"][: len(row)]]
        assert actual == [expected for _, expected in row], name


def test_float16_approximations_of_all_numbers(emulator, arch):
    codes = np.arange(2**16, dtype=np.uint16)
    names = [name for name in APPROXIMATIONS if name != "rcp_iflag"]
    segments = [Segment(f"v_{name}_f16 v0, v1", {"v1": codes}, ["v0"]) for name in names]
    exact_inputs = codes.view(np.float16).astype(np.float64)
    for name, result in zip(names, run(emulator, arch, segments), strict=True):
        actual = result["v0"].astype(np.uint16).view(np.float16).astype(np.float64)
        with np.errstate(all="ignore"):
            exact = APPROXIMATIONS[name](exact_inputs)
            exact = np.where(np.abs(exact) >= 65520, np.copysign(np.inf, exact), exact)
            error = np.abs(actual - exact) / _ulp(exact, 2.0**-14, 10)
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(exact), err_msg=name)
        infinite = np.isinf(exact)
        np.testing.assert_array_equal(actual[infinite], exact[infinite], err_msg=name)
        worst = int(np.nanargmax(np.where(infinite, 0, error)))
        assert error[worst] <= 0.51, f"{name}({exact_inputs[worst]}): {error[worst]} ulp"


def test_float64_approximations(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**64, 8 * LANES, np.uint64).view(np.float64)
    x[: 4 * LANES] = np.exp2(rng.uniform(-40, 40, 4 * LANES))
    x[-6:] = [0.0, -0.0, np.inf, -np.inf, np.nan, -1.0]
    names = ["rcp", "rsq", "sqrt"]
    segments = [
        Segment(f"v_{name}_f64 v[0:1], v[2:3]", {"v[2:3]": x}, ["v[0:1]"]) for name in names
    ]
    for name, result in zip(names, run(emulator, arch, segments), strict=True):
        with np.errstate(all="ignore"):
            exact = APPROXIMATIONS[name](x)
        np.testing.assert_allclose(result["v[0:1]"].view(np.float64), exact, rtol=2**-48)


# ---- fp8, bf8 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_all_codes_of_8_bits(emulator, arch, name):
    """In each byte by SDWA, and pairs."""
    codes = np.arange(256, dtype=np.uint32)
    words = codes | (codes ^ 0x55) << 8 | (codes + 1 & 255) << 16 | (255 - codes) << 24
    segments = [
        Segment(f"v_cvt_f32_{name}_sdwa v0, v1 src0_sel:BYTE_{i}", {"v1": words}, ["v0"])
        for i in range(4)
    ]
    segments.append(Segment(f"v_cvt_pk_f32_{name} v[0:1], v2", {"v2": words}, ["v[0:1]"]))
    segments.append(
        Segment(f"v_cvt_pk_f32_{name}_sdwa v[0:1], v2 src0_sel:WORD_1", {"v2": words}, ["v[0:1]"])
    )
    results = run(emulator, arch, segments)
    number = of_chip(name, arch)
    table = np.array([float(number.value(code)) for code in range(256)], np.float32)

    def expected(byte: int) -> NDArray[np.float32]:
        return np.asarray(table[words >> np.uint32(8 * byte) & 255])

    for i in range(4):
        np.testing.assert_array_equal(results[i]["v0"].view(np.float32), expected(i))
    for word in range(2):
        pair = results[4 + word]["v[0:1]"]
        for i in range(2):
            part = (pair >> np.uint64(32 * i)).astype(np.uint32).view(np.float32)
            np.testing.assert_array_equal(part, expected(2 * word + i))


# ---- Moves between registers and lanes -----------------------------------------------------------


def test_swaps(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 2**32, (2, LANES), np.uint32)
    mask = int(rng.integers(0, 2**63))
    segment = Segment("v_swap_b32 v0, v1", {"v0": a, "v1": b, "exec": mask}, ["v0", "v1"])
    (result,) = run(emulator, arch, [segment])
    active = np.array([mask >> i & 1 for i in range(LANES)], bool)
    np.testing.assert_array_equal(result["v0"], np.where(active, b, a))
    np.testing.assert_array_equal(result["v1"], np.where(active, a, b))


@pytest.mark.parametrize("row", [16, 32])
def test_swaps_of_rows(emulator, seed, row):
    """Odd rows of the first register with even rows of the second."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 2**32, (2, LANES), np.uint32)
    code = f"v_permlane{row}_swap_b32 "
    half_active = 0x0000FFFF0000FFFF if row == 32 else 0x00FF00FF00FF00FF
    segments = [
        Segment(code + "v0, v1", {"v0": a, "v1": b}, ["v0", "v1"]),
        Segment(code + "v0, v1", {"v0": a, "v1": b, "exec": half_active}, ["v0", "v1"]),
        Segment(code + "v0, v0", {"v0": a}, ["v0"]),
    ]
    one, partial, same = run(emulator, "gfx950", segments)

    rows_a, rows_b = a.reshape(-1, 2, row), b.reshape(-1, 2, row)
    first = np.stack([rows_a[:, 0], rows_b[:, 0]], axis=1).reshape(-1)
    second = np.stack([rows_a[:, 1], rows_b[:, 1]], axis=1).reshape(-1)
    np.testing.assert_array_equal(one["v0"], first)
    np.testing.assert_array_equal(one["v1"], second)
    active = np.array([half_active >> i & 1 for i in range(LANES)], bool)
    np.testing.assert_array_equal(partial["v0"], np.where(active, first, a))
    np.testing.assert_array_equal(partial["v1"], np.where(active, second, b))
    np.testing.assert_array_equal(same["v0"], a.reshape(-1, 2, row)[:, ::-1].reshape(-1))


def test_a_swap_with_an_inactive_lane_stops(emulator):
    segment = Segment("v_permlane32_swap_b32 v0, v1", {"exec": 1}, [])
    with pytest.raises(EmulatorError, match=r"v_permlane32_swap_b32.*inactive"):
        run(emulator, "gfx950", [segment])


def test_accumulation_registers_and_first_lanes(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 2**32, (2, 2 * LANES), np.uint32)
    exec_masks = np.array([0xFFFF0000FFFF0000, 0x8000000000000000], np.uint64)
    inputs = {"a1": a, "a0": b, "exec": exec_masks}
    segments = [
        Segment("v_accvgpr_mov_b32 a0, a1\nv_nop\nv_clrexcp", inputs, ["a0", "a1"]),
        Segment("v_readfirstlane_b32 s4, v1", {"v1": a, "exec": exec_masks}, ["s4"]),
        Segment("v_readfirstlane_b32 s4, v1", {"v1": a, "exec": 0}, ["s4"]),
    ]
    moved, first, none = run(emulator, arch, segments)
    active = np.array([int(mask) >> i & 1 for mask in exec_masks for i in range(LANES)], bool)
    np.testing.assert_array_equal(moved["a0"], np.where(active, a, b))
    np.testing.assert_array_equal(first["s4"], [a[16], a[2 * LANES - 1]])
    np.testing.assert_array_equal(none["s4"], [a[0], a[LANES]])


@pytest.mark.parametrize(
    "name", ["v_exp_legacy_f32", "v_log_legacy_f32", "v_screen_partition_4se_b32"]
)
def test_what_the_documents_do_not_describe_is_an_error(emulator, arch, name):
    with pytest.raises(EmulatorError, match=f"{name}.*does not emulate"):
        run(emulator, arch, [Segment(f"{name} v0, v1")])
