"""VOP3 instructions that are no row of a table: truth tables, division, what works across lanes."""

import numpy as np
import pytest
from models.vector_alu import bitop3
from programs import LANES, Segment, run

from jitfmha.emulator import EmulatorError


@pytest.mark.parametrize("table", [0x00, 0xFF, 0x80, 0x01, 0x96, 0xCA])
def test_truth_tables(emulator, seed, table):
    rng = np.random.default_rng(seed)
    a, b, c = rng.integers(0, 2**32, (3, LANES), dtype=np.uint32)
    code = f"v_bitop3_b32 v0, v1, v2, v3 bitop3:0x{table:x}"
    (result,) = run(emulator, "gfx950", [Segment(code, {"v1": a, "v2": b, "v3": c}, ["v0"])])
    model = bitop3(table, 32)
    expected = [model(None, *map(int, abc)) for abc in zip(a, b, c, strict=True)]
    assert result["v0"].tolist() == expected


_DIVIDE_F32 = """
v_div_scale_f32 v10, s[10:11], v2, v2, v1
v_div_scale_f32 v11, vcc, v1, v2, v1
v_rcp_f32 v12, v10
s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3
v_fma_f32 v13, -v10, v12, 1.0
v_fma_f32 v12, v13, v12, v12
v_mul_f32 v14, v11, v12
v_fma_f32 v15, -v10, v14, v11
v_fma_f32 v14, v15, v12, v14
v_fma_f32 v10, -v10, v14, v11
v_div_fmas_f32 v10, v10, v12, v14
v_div_fixup_f32 v0, v10, v2, v1
"""
# v_rcp_f64 is replaced by what the test computes: it says nothing about v_div_*.
_DIVIDE_F64 = """
v_div_scale_f64 v[10:11], s[10:11], v[4:5], v[4:5], v[2:3]
v_div_scale_f64 v[12:13], vcc, v[2:3], v[4:5], v[2:3]
v_cvt_f32_f64 v14, v[10:11]
v_rcp_f64 v[14:15], v[10:11]
v_fma_f64 v[16:17], -v[10:11], v[14:15], 1.0
v_fma_f64 v[14:15], v[14:15], v[16:17], v[14:15]
v_fma_f64 v[16:17], -v[10:11], v[14:15], 1.0
v_fma_f64 v[14:15], v[14:15], v[16:17], v[14:15]
v_mul_f64 v[16:17], v[12:13], v[14:15]
v_fma_f64 v[10:11], -v[10:11], v[16:17], v[12:13]
v_div_fmas_f64 v[10:11], v[10:11], v[14:15], v[16:17]
v_div_fixup_f64 v[0:1], v[10:11], v[4:5], v[2:3]
"""


def _same_numbers(actual: np.ndarray, expected: np.ndarray) -> None:
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    unsigned = f"u{expected.itemsize}"
    np.testing.assert_array_equal(actual.view(unsigned)[~nan], expected.view(unsigned)[~nan])


def test_division(emulator, arch, seed):
    """What compilers emit gives the correctly rounded quotient, whatever the operands."""
    rng = np.random.default_rng(seed)
    n = 64 * LANES
    a, b = rng.integers(0, 2**32, (2, n), dtype=np.uint32).view(np.float32)
    edges = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], np.uint32)
    a[: n // 4] = rng.choice(edges, n // 4).view(np.float32)
    b[n // 8 : n // 2] = rng.choice(edges, n // 2 - n // 8).view(np.float32)
    wide_a, wide_b = rng.integers(0, 2**64, (2, n), dtype=np.uint64).view(np.float64)
    wide_a[: n // 2] = rng.standard_normal(n // 2) * 2.0 ** rng.integers(-1070, -900, n // 2)
    results = run(
        emulator,
        arch,
        [
            Segment(_DIVIDE_F32, {"v1": a, "v2": b}, ["v0"]),
            Segment(_DIVIDE_F64, {"v[2:3]": wide_a, "v[4:5]": wide_b}, ["v[0:1]"]),
        ],
    )
    with np.errstate(all="ignore"):
        _same_numbers(results[0]["v0"].view(np.float32), a / b)
        _same_numbers(results[1]["v[0:1]"].view(np.float64), wide_a / wide_b)


def test_division_steps(emulator, arch):
    """v_div_scale and v_div_fmas on the cases that the ISA documents list."""
    cases = [  # numerator, denominator, scaled numerator, scaled denominator, VCC
        (1.0, 3.0, 1.0, 3.0, 0),
        (2.0**100, 2.0**-10, 2.0**100, 2.0**54, 1),
        (1.0, 2.0**-140, 1.0, 2.0**-76, 1),
        (2.0**-20, 2.0**-110, 2.0**-20, 2.0**-110, 0),
        (2.0**-100, 2.0**40, 2.0**-36, 2.0**40, 1),
        (4.0, 2.0**127, 2.0**-62, 2.0**63, 0),
        (2.0**-120, 3.0, 2.0**-56, 3 * 2.0**64, 0),
    ]
    numerator, denominator, of_numerator, of_denominator, scaled = (
        np.resize(np.array(column), LANES) for column in zip(*cases, strict=True)
    )
    inputs = {"v1": numerator.astype(np.float32), "v2": denominator.astype(np.float32)}
    code = "v_div_scale_f32 v3, vcc, v1, v2, v1\nv_div_scale_f32 v4, s[10:11], v2, v2, v1"
    (result,) = run(emulator, arch, [Segment(code, inputs, ["v3", "v4", "vcc", "s[10:11]"])])
    np.testing.assert_array_equal(result["v3"].view(np.float32), of_numerator.astype(np.float32))
    np.testing.assert_array_equal(result["v4"].view(np.float32), of_denominator.astype(np.float32))
    mask = sum(int(bit) << lane for lane, bit in enumerate(scaled))
    assert int(result["vcc"][0]) == int(result["s[10:11]"][0]) == mask


def test_readlane_and_writelane_ignore_exec(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    values, old = rng.integers(0, 2**32, (2, LANES), dtype=np.uint32)
    segments = []
    for lane in (0, 17, 63, 64 + 5):  # six bits of the lane count
        code = f"s_mov_b32 m0, {lane}\ns_nop 4\nv_readlane_b32 s6, v1, m0\ns_nop 4\n"
        code += "v_readlane_b32 s7, v1, s5\nv_writelane_b32 v2, s4, m0\ns_nop 4"
        inputs = {"v1": values, "v2": old, "s4": 77, "s5": 9, "exec": 0x5555}
        segments.append(Segment(code, inputs, ["s6", "s7", "v2"]))
    for lane, result in zip((0, 17, 63, 5), run(emulator, arch, segments), strict=True):
        expected = old.copy()
        expected[lane] = 77
        assert int(result["s6"][0]) == values[lane]
        assert int(result["s7"][0]) == values[9]
        np.testing.assert_array_equal(result["v2"], expected)


def test_mbcnt(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    mask, add = rng.integers(0, 2**32, (2, LANES), dtype=np.uint32)
    code = "v_mbcnt_lo_u32_b32 v0, v2, v3\nv_mbcnt_hi_u32_b32 v1, v2, v3"
    (result,) = run(emulator, arch, [Segment(code, {"v2": mask, "v3": add}, ["v0", "v1"])])
    for lane in range(LANES):
        below = (1 << lane) - 1
        low = (int(mask[lane]) & below & 0xFFFFFFFF).bit_count()
        high = (int(mask[lane]) & below >> 32).bit_count()
        assert int(result["v0"][lane]) == (low + int(add[lane])) % 2**32
        assert int(result["v1"][lane]) == (high + int(add[lane])) % 2**32


def test_mqsad_u32(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 2**64, LANES, dtype=np.uint64)
    reference = rng.integers(0, 2**32, LANES, dtype=np.uint32) & np.uint32(0xFF00FFFF)
    sums = rng.integers(0, 2**32, (4, LANES), dtype=np.uint32)
    inputs = {"v[2:3]": data, "v4": reference, "v[8:11]": sums}
    code = "v_mqsad_u32_u8 v[12:15], v[2:3], v4, v[8:11]"
    (result,) = run(emulator, arch, [Segment(code, inputs, ["v[12:15]"])])
    for i in range(4):
        expected = sums[i].astype(np.int64)
        for k in range(4):
            byte = (data >> np.uint64(8 * (i + k)) & np.uint64(255)).astype(np.int64)
            other = (reference >> np.uint32(8 * k) & np.uint32(255)).astype(np.int64)
            expected += np.where(other == 0, 0, np.abs(byte - other))
        np.testing.assert_array_equal(result["v[12:15]"][i], expected % 2**32)


@pytest.mark.parametrize("code", ["v_bfe_u32", "v_add3_u32", "v_alignbit_b32"])
def test_clamp_that_is_not_known_is_an_error(emulator, arch, code):
    # Bit 15 of a VOP3 instruction, which the assembler does not write for these.
    words = {"v_bfe_u32": 0xD1C88000, "v_add3_u32": 0xD1FF8000, "v_alignbit_b32": 0xD1CE8000}
    segment = Segment(f".long 0x{words[code]:x}, 0x040e0501", {"v1": np.zeros(LANES, np.uint32)})
    with pytest.raises(EmulatorError, match=f"{code}.*clamp is not emulated"):
        run(emulator, arch, [segment])


@pytest.mark.parametrize(
    ("a", "b"), [(2**-6 * (1 + 2**-10), 2**-5 * (1 - 2**-10)), (2**-11 * (1 + 2**-10), 1 - 2**-10)]
)
def test_half_fma_rounds_once(emulator, arch, a, b):
    """The product is just below half of the addend's last bit.

    A float32 sum rounds it up to that half, and the tie then rounds to 1.001953125.
    """
    c, expected = 1 + 2**-10, 1.0009765625
    bits = [int(np.float16(value).view(np.uint16)) for value in (a, b, c)]
    assert [float(np.uint16(each).view(np.float16)) for each in bits] == [a, b, c]
    lanes = [np.full(LANES, each, np.uint32) for each in bits]
    pairs = [each | each << np.uint32(16) for each in lanes]
    inputs = dict(zip(("v1", "v2", "v3"), lanes, strict=True))
    packed = dict(zip(("v1", "v2", "v3"), pairs, strict=True))
    segments = [
        Segment("v_fma_f16 v0, v1, v2, v3", inputs, ["v0"]),
        Segment("v_fma_legacy_f16 v0, v1, v2, v3", inputs, ["v0"]),
        Segment("v_pk_fma_f16 v0, v1, v2, v3", packed, ["v0"]),
        Segment("v_pk_fmac_f16 v3, v1, v2", packed, ["v3"]),
    ]
    for segment, result in zip(segments, run(emulator, arch, segments), strict=True):
        (values,) = result.values()
        halves = values.view(np.float16).reshape(LANES, 2)
        written = halves if "pk" in segment.code else halves[:, :1]
        np.testing.assert_array_equal(written, expected, segment.code)
