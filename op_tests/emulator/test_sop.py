"""SOP1, SOP2, SOPC, SOPK, SOPP: the scalar ALU, program flow, hardware registers, VGPR indexing."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from models.scalar_alu import CONSTANT_OPERATIONS, EXEC_OPERATIONS, OPERATIONS, skips_vector
from programs import LANES, Segment, run

from jitfmha.emulator import Emulator, EmulatorError

_WAVES = 24


def _value(rng: random.Random, width: int) -> int:
    edges = [0, 1, 2, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1, width - 1]
    if rng.random() < 0.3:
        return rng.choice(edges)
    return rng.getrandbits(rng.choice((width, width, width // 2, 6)))


def _register(first: int, width: int) -> str:
    return f"s{first}" if width == 32 else f"s[{first}:{first + 1}]"


def _array(values: list[int], width: int) -> np.ndarray:
    return np.array(values, np.uint32 if width == 32 else np.uint64)


def _run(emulator: Emulator, arch: str, code: str, inputs: dict, *outputs: str) -> list[int]:
    """The outputs of one segment in the first wave."""
    (result,) = run(emulator, arch, [Segment(code, inputs, outputs)])
    return [int(result[name][0]) for name in outputs]


def _width(kind: str) -> int:
    return int(kind[1:])


def _typed(value: int, kind: str) -> int:
    width = _width(kind)
    return value - (1 << width) if kind[0] == "i" and value >> (width - 1) else value


def test_arithmetic(emulator, arch, seed):
    rng = random.Random(seed)
    segments, inputs = [], []
    for name, op in OPERATIONS.items():
        sources = [[_value(rng, _width(kind)) for _ in range(_WAVES)] for kind in op.sources]
        if "bfe" in name:  # position and size
            sources[1] = [
                rng.choice((v, rng.getrandbits(6) | rng.getrandbits(7) << 16)) for v in sources[1]
            ]
        if rng.random() < 0.5 and "cmp" in name and "bitcmp" not in name:
            sources[1][::3] = sources[0][::3]
        old = [_value(rng, 64) for _ in range(_WAVES)]
        scc = [rng.getrandbits(1) for _ in range(_WAVES)]
        inputs.append((sources, old, scc))
        width = _width(op.result) if op.result else 32
        registers = [_register(8 + 2 * k, _width(kind)) for k, kind in enumerate(op.sources)]
        given = {
            r: _array(v, _width(kind))
            for r, v, kind in zip(registers, sources, op.sources, strict=True)
        }
        given |= {"s[4:5]": _array(old, 64), "scc": _array(scc, 32)}
        operands = ([_register(4, width)] if op.result else []) + registers
        segments.append(Segment(f"{name} {', '.join(operands)}", given, ["s[4:5]", "scc"]))
    report = []
    for (name, op), (sources, old, scc), result in zip(
        OPERATIONS.items(), inputs, run(emulator, arch, segments), strict=True
    ):
        for wave in range(_WAVES):
            width = _width(op.result) if op.result else 32
            content = old[wave] & ((1 << width) - 1)
            typed = [_typed(v[wave], kind) for v, kind in zip(sources, op.sources, strict=True)]
            value, bit = op.function(scc[wave], content, *typed)
            expected = old[wave]
            if value is not None:
                value &= (1 << width) - 1
                expected = value if width == 64 else value | old[wave] >> 32 << 32
            expected_scc = scc[wave] if bit is None else bit
            actual = int(result["s[4:5]"][wave]), int(result["scc"][wave])
            if actual != (expected, expected_scc):
                shown = ", ".join(f"{v & (2**64 - 1):x}" for v in typed)
                report.append(
                    f"{name} ({shown}): {actual[0]:x} {actual[1]}, not {expected:x} {expected_scc}"
                )
    assert not report, "\n".join(report[:40])


def test_constants(emulator, arch, seed):
    rng = random.Random(seed)
    cases = []
    for name in CONSTANT_OPERATIONS:
        for _ in range(4):
            k = rng.choice((0, 1, 0x7FFF, 0x8000, 0xFFFF, rng.getrandbits(16)))
            old = [_value(rng, 32) for _ in range(_WAVES)]
            old[::4] = [(k - (k >> 15 << 16)) & 0xFFFFFFFF] * len(old[::4])
            cases.append((name, k, old, [rng.getrandbits(1) for _ in range(_WAVES)]))
    segments = [
        Segment(
            f"{name} s4, 0x{k:x}", {"s4": _array(old, 32), "scc": _array(scc, 32)}, ["s4", "scc"]
        )
        for name, k, old, scc in cases
    ]
    for (name, k, old, scc), result in zip(cases, run(emulator, arch, segments), strict=True):
        for wave in range(_WAVES):
            value, bit = CONSTANT_OPERATIONS[name](scc[wave], old[wave], k)
            expected = (old[wave] if value is None else value) & 0xFFFFFFFF
            expected_scc = scc[wave] if bit is None else bit
            actual = int(result["s4"][wave]), int(result["scc"][wave])
            assert actual == (expected, expected_scc), (name, hex(k), hex(old[wave]), actual)


def test_exec(emulator, arch, seed):
    rng = random.Random(seed)
    cases = [
        (name, [_value(rng, 64) for _ in range(_WAVES)], [_value(rng, 64) for _ in range(_WAVES)])
        for name in EXEC_OPERATIONS
    ]
    segments = [
        Segment(f"{name} s[4:5], s[6:7]", {"s[6:7]": _array(a, 64), "exec": _array(e, 64)},
                ["s[4:5]", "exec", "scc"])
        for name, a, e in cases
    ]  # fmt: skip
    for (name, sources, masks), result in zip(cases, run(emulator, arch, segments), strict=True):
        for wave, (a, e) in enumerate(zip(sources, masks, strict=True)):
            value, mask = (x & (2**64 - 1) for x in EXEC_OPERATIONS[name](a, e))
            actual = [int(result[key][wave]) for key in ("s[4:5]", "exec", "scc")]
            assert actual == [value, mask, int(mask != 0)], name


def test_literals_and_inline_constants(emulator, arch):
    cases = {
        "s_mov_b32 s4, -16": 0xFFFFFFF0,
        "s_mov_b32 s4, 64": 64,
        "s_mov_b32 s4, 0.5": 0x3F000000,
        "s_mov_b32 s4, 0.15915494": 0x3E22F983,
        "s_mov_b32 s4, 0x12345678": 0x12345678,
        "s_mov_b64 s[4:5], -1": 2**64 - 1,
        "s_mov_b64 s[4:5], 1.0": 0x3FF0000000000000,
        "s_mov_b64 s[4:5], 0x12345678": 0x12345678,
        "s_ashr_i64 s[4:5], 0xf0000000, 4": 0xFFFFFFFFFF000000,
        "s_lshr_b64 s[4:5], 0xf0000000, 4": 0x0F000000,
    }
    segments = [Segment(code, {"s[4:5]": 0}, ["s[4:5]"]) for code in cases]
    for (code, expected), result in zip(cases.items(), run(emulator, arch, segments), strict=True):
        assert int(result["s[4:5]"][0]) == expected, code


_BRANCHES = """
s_mov_b32 s4, 0
s_cmp_eq_u32 s5, 3
s_cbranch_scc1 1f
s_or_b32 s4, s4, 1
1:
s_cmp_eq_u32 s5, 3
s_cbranch_scc0 2f
s_or_b32 s4, s4, 2
2:
s_cbranch_vccz 3f
s_or_b32 s4, s4, 4
3:
s_cbranch_vccnz 4f
s_or_b32 s4, s4, 8
4:
s_cbranch_execz 5f
s_or_b32 s4, s4, 16
5:
s_cbranch_execnz 6f
s_or_b32 s4, s4, 32
6:
s_cbranch_cdbgsys 7f
s_or_b32 s4, s4, 64
7:
s_branch 8f
s_or_b32 s4, s4, 128
8:
"""


def test_branches(emulator, arch):
    cases = [
        (number, vcc, mask) for number in (3, 4) for vcc in (0, 1 << 40) for mask in (0, 1 << 63)
    ]
    segments = [Segment(_BRANCHES, {"s5": n, "vcc": v, "exec": e}, ["s4"]) for n, v, e in cases]
    for (number, vcc, mask), result in zip(cases, run(emulator, arch, segments), strict=True):
        expected = (1 if number != 3 else 2) | (4 if vcc else 8) | (16 if mask else 32) | 64
        assert int(result["s4"][0]) == expected


_CALLS = """
s_mov_b32 s4, 0
s_call_b64 s[6:7], callee
s_add_u32 s4, s4, 1
s_getpc_b64 s[10:11]
s_add_u32 s10, s10, callee-here
s_addc_u32 s11, s11, 0
s_swappc_b64 s[6:7], s[10:11]
s_add_u32 s4, s4, 0x100
s_branch 8f
callee:
s_add_u32 s4, s4, 0x10000
s_setpc_b64 s[6:7]
8:
"""


def test_calls(emulator, arch):
    code = _CALLS.replace("s_add_u32 s10", "here:\ns_add_u32 s10")
    assert _run(emulator, arch, code, {}, "s4") == [0x20101]


_I_FORK = "s_cbranch_i_fork s[20:21], {label}"
_G_FORK = """s_getpc_b64 s[22:23]
{label}_from:
s_add_u32 s22, s22, {label}-{label}_from
s_addc_u32 s23, s23, 0
s_cbranch_g_fork s[20:21], s[22:23]"""
# Both ways add to v0; s40 lists them in the order in which they run, a digit each.
_FORK = """{fork}
v_add_u32 v0, 1, v0
s_mul_i32 s40, s40, 10
s_add_u32 s40, s40, 1
s_branch {label}_join
{label}:
v_add_u32 v0, 2, v0
s_mul_i32 s40, s40, 10
s_add_u32 s40, s40, 2
{label}_join:
s_cbranch_join s41"""


def test_forks(emulator, arch, seed):
    rng = random.Random(seed)
    masks = [0, 1, rng.getrandbits(64), (1 << 40) - 1, 0xFFFF << 20, (1 << 64) - 1]
    cases = [(passes, active) for passes in masks for active in ((1 << 64) - 1, 0xFF00FF00FF)]
    segments = []
    for i, (passes, active) in enumerate(cases):
        label = f"taken_{i}"
        fork = (_I_FORK if i % 2 else _G_FORK).format(label=label)
        code = _FORK.format(fork=fork, label=label)
        inputs = {"s[20:21]": passes, "exec": active, "v0": np.zeros(LANES, np.uint32)}
        segments.append(Segment(code, inputs | {"s40": 0, "s41": 0}, ["v0", "s40", "exec", "mode"]))
    for (passes, active), result in zip(cases, run(emulator, arch, segments), strict=True):
        taken, other = passes & active, ~passes & active
        ways = [(2, taken), (1, other)] if other.bit_count() >= taken.bit_count() else []
        ways = ways or [(1, other), (2, taken)]
        ways = [(way, lanes) for way, lanes in ways if lanes]
        assert int(result["s40"][0]) == int("".join(str(way) for way, _ in ways))
        expected = [sum(way for way, lanes in ways if lanes >> lane & 1) for lane in range(LANES)]
        assert result["v0"].tolist() == expected
        # The lanes of the second way go on alone, as the documents have it.
        assert int(result["exec"][0]) == ways[-1][1]
        assert int(result["mode"][0]) >> 29 == 0


def test_nested_forks(emulator, arch):
    """A fork within the first way of another: the inner join comes first."""
    inner = _FORK.format(fork=_I_FORK.format(label="inner"), label="inner").replace("s41", "s42")
    inner = inner.replace("s[20:21]", "s[24:25]")
    outer = _FORK.format(fork=_I_FORK.format(label="outer"), label="outer")
    code = outer.replace("s_branch outer_join", f"{inner}\ns_branch outer_join")
    inputs = {"s[20:21]": (1 << 64) - 4, "s[24:25]": 1, "v0": np.zeros(LANES, np.uint32)}
    segment = Segment(code, inputs | {"s40": 0, "s41": 0, "s42": 1}, ["v0", "s40", "mode"])
    (result,) = run(emulator, arch, [segment])
    # Lanes 0 and 1 do not take the outer branch and run first, lane 0 takes the inner one.
    assert int(result["s40"][0]) == 1212
    assert result["v0"].tolist() == [3, 2] + [2] * 62
    assert int(result["mode"][0]) >> 29 == 0


def test_loop(emulator, arch):
    code = "s_mov_b32 s4, 0\n1:\ns_add_u32 s4, s4, s5\ns_sub_u32 s5, s5, 1\ns_cmp_lg_u32 s5, 0\n"
    code += "s_cbranch_scc1 1b"
    assert _run(emulator, arch, code, {"s5": 100}, "s4") == [5050]


_HIGH, _LOW = 7 << 96 | 5 << 32, 7 << 32 | 6


@pytest.mark.parametrize(
    ("code", "inputs", "output", "expected"),
    [
        ("s_movrels_b32 s4, s8", {"s[8:11]": _HIGH, "m0": 3}, "s4", 7),
        ("s_movrels_b64 s[4:5], s[8:9]", {"s[8:11]": _LOW << 64, "m0": 2}, "s[4:5]", _LOW),
        ("s_movreld_b32 s4, s8", {"s8": 9, "s[4:7]": 0, "m0": 2}, "s6", 9),
        ("s_movreld_b64 s[4:5], s[8:9]", {"s[8:9]": _LOW, "s[4:7]": 0, "m0": 2}, "s[6:7]", _LOW),
        ("s_movrels_b32 s4, s11", {"s[8:11]": 7 << 32, "m0": -2}, "s4", 7),
        ("s_movrels_b64 s[4:5], s[10:11]", {"s[8:11]": _LOW, "m0": -2}, "s[4:5]", _LOW),
        ("s_movreld_b32 s9, s8", {"s8": 9, "s[4:7]": 0, "m0": -3}, "s6", 9),
        ("s_movreld_b64 s[10:11], s[8:9]", {"s[8:9]": _LOW, "s[4:7]": 0, "m0": -4}, "s[6:7]", _LOW),
    ],
)
def test_relative_moves(emulator, arch, code, inputs, output, expected):
    assert _run(emulator, arch, code, inputs, output) == [expected]


@pytest.mark.parametrize(
    ("code", "m0", "reached"),
    [
        ("s_movrels_b32 s4, s0", -1, "s-1"),
        ("s_movreld_b32 s0, s4", -1, "s-1"),
        ("s_movrels_b64 s[4:5], s[0:1]", -2, "s-2"),
        ("s_movreld_b64 s[0:1], s[4:5]", -2, "s-2"),
        ("s_movrels_b32 s4, s9", -(2**31), "s-2147483639"),
        ("s_movrels_b32 s4, s9", 93, "s102"),
        ("s_movreld_b64 s[8:9], s[4:5]", 94, "s102"),
        ("s_movreld_b32 s9, s4", 2**31 - 1, "s2147483656"),
    ],
)
def test_relative_moves_stay_in_the_registers(emulator, code, m0, reached):
    """A sum of 2**32 - 1 wrapped around where its end was checked."""
    words = rf"s_movrel with {m0} in M0 reaches {reached}$"
    with pytest.raises(EmulatorError, match=words):
        run(emulator, "gfx950", [Segment(code, {"m0": m0}, [])])


def test_mode_register(emulator, arch):
    code = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 5\n"
    code += "s_getreg_b32 s4, hwreg(HW_REG_MODE, 2, 8)"
    assert _run(emulator, arch, code, {"mode": 0x3F0}, "s4", "mode") == [0x350 >> 2 & 0xFF, 0x350]
    code, inputs = "s_setreg_b32 hwreg(HW_REG_MODE, 0, 2), s5", {"mode": 0x3F0, "s5": 0xFFFFFFFF}
    assert _run(emulator, arch, code, inputs, "mode") == [0x3F3]


_SKIP_OFF = "s_setvskip 0, 0\ns_nop 1"
_VSKIP = f"""s_setvskip s5, s6
s_nop 1
s_getreg_b32 s7, hwreg(HW_REG_MODE)
v_add_u32 v0, 1, v0
s_cselect_b32 s8, 1, 0
{_SKIP_OFF}"""


def test_setvskip(emulator, arch, seed):
    rng = random.Random(seed)
    sources = [_value(rng, 32) for _ in range(_WAVES)]
    bits = [rng.choice((rng.getrandbits(5), rng.getrandbits(32))) for _ in range(_WAVES)]
    scc = [rng.getrandbits(1) for _ in range(_WAVES)]
    inputs = {"s5": _array(sources, 32), "s6": _array(bits, 32), "scc": _array(scc, 32)}
    inputs["v0"] = np.arange(_WAVES * LANES, dtype=np.uint32)
    (result,) = run(emulator, arch, [Segment(_VSKIP, inputs, ["v0", "s7", "s8"])])
    skipped = [skips_vector(source, bit) for source, bit in zip(sources, bits, strict=True)]
    assert (result["s7"] >> 28 & 1).tolist() == skipped
    assert result["s8"].tolist() == scc
    added = result["v0"] - inputs["v0"]
    assert added.reshape(_WAVES, LANES).tolist() == [[not each] * LANES for each in skipped]


# Each writes v[8:11], s[8:9], a[0:3], VCC or memory, but for the last ones, which are scalar.
_VECTOR_INSTRUCTIONS = (
    "v_mov_b32 v8, v2",
    "v_mov_b32_dpp v8, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf",
    "v_exp_f32 v8, v2",
    "v_fma_f32 v8, v2, v2, v2",
    "v_pk_add_f16 v8, v2, v2",
    "v_cmp_ne_u32 vcc, v2, v3",
    "v_cmp_ne_u32 s[8:9], v2, v3",
    "v_readfirstlane_b32 s8, v2",
    "v_mfma_f32_4x4x1_16b_f32 a[0:3], v2, v3, 0",
    "ds_write_b32 v3, v2",
    "ds_read_b32 v8, v3",
    "global_load_dword v8, v3, s[20:21]",
    "global_store_dword v3, v2, s[20:21]",
    "global_atomic_add v3, v2, s[20:21]",
    "flat_load_dword v8, v[4:5]",
    "buffer_load_dword v8, v3, s[24:27], 0 offen",
    "buffer_store_dword v2, v3, s[24:27], 0 offen",
)


def test_vskip_skips_vector_instructions_only(emulator, arch):
    memory = np.full(LANES, 7, np.uint32)
    address = memory.ctypes.data
    lanes = np.arange(LANES, dtype=np.uint32)
    inputs = {
        "v2": lanes + 100, "v3": 4 * lanes, "v[8:11]": np.full((4, LANES), 5, np.uint32),
        "v[4:5]": address + 4 * lanes.astype(np.uint64),
        "a[0:3]": np.full((4, LANES), 6, np.uint32),
        "s[20:21]": address, "s[24:27]": address | 256 << 64 | 0x20000 << 96,
        "s[8:9]": 11, "vcc": 12, "s10": 0,
    }  # fmt: skip
    outputs = ["v[8:11]", "a[0:3]", "s[8:9]", "vcc", "s10"]
    scalar = "s_load_dword s10, s[20:21], 0x0\ns_waitcnt lgkmcnt(0)\ns_add_u32 s10, s10, 1"

    def segment(on: str, code: str) -> Segment:
        # Memory is not written where the instruction is skipped: LDS is read back as zeros.
        read_back = "ds_read_b32 v11, v3\ns_waitcnt lgkmcnt(0)"
        text = f"{on}\ns_nop 1\n{code}\n{scalar}\n{_SKIP_OFF}\n{read_back}"
        return Segment(text, inputs, outputs)

    by_setreg = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 28, 1), 1"
    segments = [
        segment(on, code) for code in _VECTOR_INSTRUCTIONS for on in ("s_setvskip 1, 0", by_setreg)
    ]
    for case, result in zip(
        segments, run(emulator, arch, segments, memory=[memory], lds_bytes=256), strict=True
    ):
        np.testing.assert_array_equal(result["v[8:11]"][:3], 5, case.code)
        np.testing.assert_array_equal(result["v[8:11]"][3], 0, case.code)
        np.testing.assert_array_equal(result["a[0:3]"], 6, case.code)
        values = [int(result[name][0]) for name in ("s[8:9]", "vcc", "s10")]
        assert values == [11, 12, 8], case.code
    np.testing.assert_array_equal(memory, 7)
    # The instructions do write something where they are not skipped.
    live = [segment("s_setvskip 0, 0", code) for code in _VECTOR_INSTRUCTIONS]
    for case, result in zip(
        live, run(emulator, arch, live, memory=[memory], lds_bytes=256), strict=True
    ):
        written = (result["v[8:11]"] != [[5], [5], [5], [0]]).any() or (result["a[0:3]"] != 6).any()
        changed = [int(result["s[8:9]"][0]), int(result["vcc"][0])] != [11, 12]
        is_store = "store" in case.code or "atomic" in case.code or "ds_write" in case.code
        assert written or changed or is_store, case.code
    assert (memory != 7).any()


def test_skipped_memory_instructions_are_not_waited_for(emulator, arch):
    """They raise no counter: one load is outstanding, which vmcnt(1) does not wait for."""
    memory = np.arange(1, LANES + 1, dtype=np.uint32)
    code = """buffer_load_dword v3, s[24:27], 0 offen lds
        s_setvskip 1, 0
        s_nop 1
        global_load_dword v8, v3, s[20:21]
        s_setvskip 0, 0
        s_nop 1
        s_waitcnt vmcnt(1)
        ds_read_b32 v8, v3
        s_waitcnt vmcnt(0)
        ds_read_b32 v9, v3
        s_waitcnt lgkmcnt(0)"""
    address = memory.ctypes.data
    inputs = {
        "v3": 4 * np.arange(LANES, dtype=np.uint32), "s[20:21]": address, "m0": 0,
        "s[24:27]": address | 256 << 64 | 0x20000 << 96,
    }  # fmt: skip
    segment = Segment(code, inputs, ["v8", "v9"])
    (result,) = run(emulator, arch, [segment], memory=[memory], lds_bytes=256)
    np.testing.assert_array_equal(result["v8"], 0)
    np.testing.assert_array_equal(result["v9"], memory)


def test_vgpr_indexing(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, (8, LANES), dtype=np.uint32)
    inputs = {"v[8:15]": values, "s4": 3 | 0xFFFFFF00, "m0": 0xABC0000, "v1": values[0]}

    def indexed(operands: str, code: str, *outputs: str, **more: int) -> Segment:
        """The code with indexing on; after it, v2 is v8 without."""
        text = f"s_set_gpr_idx_on s4, gpr_idx({operands})\n{code}\n"
        text += "s_set_gpr_idx_off\nv_mov_b32 v2, v8"
        return Segment(text, inputs | more, [*outputs, "v2"])

    both = "s_set_gpr_idx_idx s5\nv_mov_b32 v0, v8\n"
    both += "s_set_gpr_idx_mode gpr_idx(SRC1)\nv_sub_u32 v3, v8, v9"
    segments = [
        indexed("SRC0", "v_mov_b32 v0, v8", "v0", "m0"),
        indexed("DST", "v_mov_b32 v16, v8", "v19"),
        indexed("SRC1", "v_sub_u32 v0, v8, v9", "v0"),
        indexed("SRC2", "v_add3_u32 v0, v1, v8, v9", "v0"),
        indexed("SRC0", both, "v0", "v3", s5=6),
    ]
    source, destination, second, third, changed = run(emulator, arch, segments)
    np.testing.assert_array_equal(source["v0"], values[3])
    np.testing.assert_array_equal(source["v2"], values[0])
    assert int(source["m0"][0]) == 0xABC1003
    np.testing.assert_array_equal(destination["v19"], values[0])
    np.testing.assert_array_equal(second["v0"], values[0] - values[4])
    np.testing.assert_array_equal(third["v0"], values[0] + values[0] + values[4])
    np.testing.assert_array_equal(changed["v0"], values[6])
    np.testing.assert_array_equal(changed["v3"], values[0] - values[7])
    for result in (source, destination, second, third, changed):
        np.testing.assert_array_equal(result["v2"], values[0])


def test_every_row_is_tested(emulator):
    text = Path(__file__).read_text(encoding="utf-8")
    modelled = {*OPERATIONS, *CONSTANT_OPERATIONS, *EXEC_OPERATIONS}
    # What does nothing here but end, wait or hint.
    quiet = {
        "s_nop", "s_endpgm", "s_endpgm_saved", "s_wakeup", "s_barrier", "s_waitcnt", "s_sleep",
        "s_setprio", "s_icache_inv", "s_incperflevel", "s_decperflevel", "s_ttracedata",
        "s_cbranch_cdbguser", "s_cbranch_cdbgsys_or_user",
        "s_cbranch_cdbgsys_and_user",
    }  # fmt: skip
    missing = {
        row.mnemonic
        for row in emulator.definitions()
        if row.format.startswith("SOP")
        and row.mnemonic not in modelled | quiet
        and row.mnemonic not in text
    }
    assert not missing


@pytest.mark.parametrize(
    "code",
    [
        "s_sendmsg sendmsg(MSG_GET_DOORBELL)", "s_sendmsghalt sendmsg(MSG_INTERRUPT)",
        "s_sethalt 1", "s_setkill 1", "s_trap 2", "s_rfe_b64 s[4:5]",
        "s_rfe_restore_b64 s[4:5], s6", "s_endpgm_ordered_ps_done",
        "s_getreg_b32 s4, hwreg(HW_REG_TRAPSTS)", "s_getreg_b32 s4, hwreg(HW_REG_GPR_ALLOC)",
        "s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS), 1", "s_setreg_b32 hwreg(HW_REG_HW_ID), s4",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 12, 9), 1",
    ],
)  # fmt: skip
def test_what_is_not_emulated_is_an_error(emulator, arch, code):
    with pytest.raises(EmulatorError, match=code.split()[0]):
        run(emulator, arch, [Segment(code)])


def test_what_means_nothing_without_a_debugger(emulator, arch):
    code = "s_mov_b32 s4, 5\ns_sethalt 0\ns_setkill 0\ns_trap 3\n"
    code += "s_sendmsg sendmsg(MSG_INTERRUPT)\ns_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 0, 9), 0"
    assert _run(emulator, arch, code, {}, "s4") == [5]


def test_hardware_registers(emulator, arch):
    code = "s_setprio 2\ns_cmp_eq_u32 s8, s8\ns_getreg_b32 s4, hwreg(HW_REG_STATUS)\n"
    code += "s_setprio 0\ns_getreg_b32 s5, hwreg(HW_REG_SH_MEM_BASES)\n"
    code += "s_getreg_b32 s6, hwreg(HW_REG_XCC_ID)\ns_getreg_b32 s7, hwreg(HW_REG_HW_ID)"
    for vcc, mask in ((0, 3), (1, 0)):
        status = 1 | 2 << 3 | (mask == 0) << 9 | (vcc == 0) << 10 | 1 << 16
        inputs = {"s8": 0, "vcc": vcc, "exec": mask}
        values = _run(emulator, arch, code, inputs, "s4", "s5", "s6", "s7")
        assert values == [status, 0x2 | 0x1 << 16, 0, 0]
