"""SOP1, SOP2, SOPC, SOPK, SOPP: the scalar ALU, program flow, hardware registers, VGPR indexing."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.scalar_alu import (
    CONSTANT_OPERATIONS,
    EXEC_OPERATIONS,
    OPERATIONS,
    ScalarOperation,
    skips_vector,
)
from models.vector_alu import signed
from programs import DEFAULT_MODE, LANES, Segment, run
from vector_cases import random_values

from jitfmha.emulator import Emulator, EmulatorError

_WAVES = 24


def _register(first: int, width: int) -> str:
    return f"s{first}" if width == 32 else f"s[{first}:{first + 1}]"


def _array(values: list[int], width: int) -> np.ndarray:
    return np.array(values, np.uint32 if width == 32 else np.uint64)


# Code, inputs and what registers have afterwards, from the first lane or wave on.
_Program = tuple[str, dict[str, Any], dict[str, Any]]


def _check(emulator: Emulator, arch: str, programs: list[_Program], **memory: Any) -> None:
    """All in one launch."""
    segments = [Segment(code, inputs, list(after)) for code, inputs, after in programs]
    results = run(emulator, arch, segments, **memory)
    for (code, _, after), result in zip(programs, results, strict=True):
        for name, value in after.items():
            expected = np.ravel(np.array(value, np.uint64))
            actual = np.ravel(result[name])[: expected.size].astype(np.uint64)
            np.testing.assert_array_equal(actual, expected, f"{name} after {code}")


def _width(kind: str) -> int:
    return int(kind[1:])


def _typed(value: int, kind: str) -> int:
    return signed(value, _width(kind)) if kind[0] == "i" else value


def _sources(name: str, kinds: Sequence[str], rng: random.Random) -> list[list[int]]:
    sources = [random_values(f"u{_width(kind)}", rng, _WAVES) for kind in kinds]
    if "bfe" in name:  # position and size
        sources[1] = [
            rng.choice((v, rng.getrandbits(6) | rng.getrandbits(7) << 16)) for v in sources[1]
        ]
    if rng.random() < 0.5 and "cmp" in name and "bitcmp" not in name:
        sources[1][::3] = sources[0][::3]
    return sources


def _arithmetic(name: str, op: ScalarOperation, rng: random.Random) -> _Program:
    sources = _sources(name, op.sources, rng)
    old = random_values("u64", rng, _WAVES)
    scc = [rng.getrandbits(1) for _ in range(_WAVES)]
    width = _width(op.result) if op.result else 32
    mask = (1 << width) - 1
    registers = [_register(8 + 2 * k, _width(kind)) for k, kind in enumerate(op.sources)]
    inputs = {"s[4:5]": _array(old, 64), "scc": _array(scc, 32)}
    for register, values, kind in zip(registers, sources, op.sources, strict=True):
        inputs[register] = _array(values, _width(kind))
    results, bits = [], []
    for wave in range(_WAVES):
        typed = [_typed(v[wave], kind) for v, kind in zip(sources, op.sources, strict=True)]
        value, bit = op.function(scc[wave], old[wave] & mask, *typed)
        results.append(old[wave] if value is None else value & mask | old[wave] & ~mask)
        bits.append(scc[wave] if bit is None else bit)
    operands = ([_register(4, width)] if op.result else []) + registers
    return f"{name} {', '.join(operands)}", inputs, {"s[4:5]": results, "scc": bits}


def _with_constant(name: str, rng: random.Random) -> _Program:
    k = rng.choice((0, 1, 0x7FFF, 0x8000, 0xFFFF, rng.getrandbits(16)))
    old = random_values("u32", rng, _WAVES)
    old[::4] = [signed(k, 16) & 0xFFFFFFFF] * len(old[::4])
    scc = [rng.getrandbits(1) for _ in range(_WAVES)]
    results, bits = [], []
    for before, before_scc in zip(old, scc, strict=True):
        value, bit = CONSTANT_OPERATIONS[name](before_scc, before, k)
        results.append((before if value is None else value) & 0xFFFFFFFF)
        bits.append(before_scc if bit is None else bit)
    inputs = {"s4": _array(old, 32), "scc": _array(scc, 32)}
    return f"{name} s4, 0x{k:x}", inputs, {"s4": results, "scc": bits}


def _on_exec(name: str, rng: random.Random) -> _Program:
    sources, masks = (random_values("u64", rng, _WAVES) for _ in range(2))
    results = [EXEC_OPERATIONS[name](a, e) for a, e in zip(sources, masks, strict=True)]
    values, after = ([x & (2**64 - 1) for x in column] for column in zip(*results, strict=True))
    inputs = {"s[6:7]": _array(sources, 64), "exec": _array(masks, 64)}
    outputs = {"s[4:5]": values, "exec": after, "scc": [int(mask != 0) for mask in after]}
    return f"{name} s[4:5], s[6:7]", inputs, outputs


def test_every_row_of_the_models(emulator, arch, seed):
    rng = random.Random(seed)
    programs = [_arithmetic(*row, rng) for row in OPERATIONS.items()]
    programs += [_with_constant(name, rng) for name in CONSTANT_OPERATIONS for _ in range(4)]
    _check(emulator, arch, programs + [_on_exec(name, rng) for name in EXEC_OPERATIONS])


# ---- Program flow and registers ------------------------------------------------------------------

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
_CALLS = """
s_mov_b32 s4, 0
s_call_b64 s[6:7], callee
s_add_u32 s4, s4, 1
s_getpc_b64 s[10:11]
here:
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
_LOOP = """s_mov_b32 s4, 0
1:
s_add_u32 s4, s4, s5
s_sub_u32 s5, s5, 1
s_cmp_lg_u32 s5, 0
s_cbranch_scc1 1b"""
_HIGH, _LOW = 7 << 96 | 5 << 32, 7 << 32 | 6
_ONLY_A_DEBUGGER_SEES = """s_mov_b32 s4, 5
s_sethalt 0
s_setkill 0
s_trap 3
s_sendmsg sendmsg(MSG_INTERRUPT)
s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 0, 9), 0"""
_STATUS = """s_setprio 2
s_cmp_eq_u32 s8, s8
s_getreg_b32 s4, hwreg(HW_REG_STATUS)
s_setprio 0
s_getreg_b32 s5, hwreg(HW_REG_SH_MEM_BASES)
s_getreg_b32 s6, hwreg(HW_REG_XCC_ID)
s_getreg_b32 s7, hwreg(HW_REG_HW_ID)"""
_SET_FIELD = """s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 5
s_getreg_b32 s4, hwreg(HW_REG_MODE, 2, 8)"""
_CONSTANTS = {
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
_PROGRAMS: list[_Program] = [
    (_CALLS, {}, {"s4": 0x20101}),
    (_LOOP, {"s5": 100}, {"s4": 5050}),
    ("s_movrels_b32 s4, s8", {"s[8:11]": _HIGH, "m0": 3}, {"s4": 7}),
    ("s_movrels_b64 s[4:5], s[8:9]", {"s[8:11]": _LOW << 64, "m0": 2}, {"s[4:5]": _LOW}),
    ("s_movreld_b32 s4, s8", {"s8": 9, "s[4:7]": 0, "m0": 2}, {"s6": 9}),
    ("s_movreld_b64 s[4:5], s[8:9]", {"s[8:9]": _LOW, "s[4:7]": 0, "m0": 2}, {"s[6:7]": _LOW}),
    ("s_movrels_b32 s4, s11", {"s[8:11]": 7 << 32, "m0": -2}, {"s4": 7}),
    ("s_movrels_b64 s[4:5], s[10:11]", {"s[8:11]": _LOW, "m0": -2}, {"s[4:5]": _LOW}),
    ("s_movreld_b32 s9, s8", {"s8": 9, "s[4:7]": 0, "m0": -3}, {"s6": 9}),
    ("s_movreld_b64 s[10:11], s[8:9]", {"s[8:9]": _LOW, "s[4:7]": 0, "m0": -4}, {"s[6:7]": _LOW}),
    (_SET_FIELD, {"mode": 0x3F0}, {"s4": 0x350 >> 2 & 0xFF, "mode": 0x350}),
    (
        "s_setreg_b32 hwreg(HW_REG_MODE, 0, 2), s5",
        {"mode": 0x3F0, "s5": 2**32 - 1},
        {"mode": 0x3F3},
    ),
    (_ONLY_A_DEBUGGER_SEES, {}, {"s4": 5}),
]


def test_programs(emulator, arch):
    programs = list(_PROGRAMS)
    programs += [(code, {"s[4:5]": 0}, {"s[4:5]": x}) for code, x in _CONSTANTS.items()]
    for number, vcc, mask in itertools.product((3, 4), (0, 1 << 40), (0, 1 << 63)):
        taken = (1 if number != 3 else 2) | (4 if vcc else 8) | (16 if mask else 32) | 64
        programs.append((_BRANCHES, {"s5": number, "vcc": vcc, "exec": mask}, {"s4": taken}))
        status = 1 | 2 << 3 | (mask == 0) << 9 | (vcc == 0) << 10 | 1 << 16
        after = {"s4": status, "s5": 0x2 | 0x1 << 16, "s6": 0, "s7": 0}
        programs.append((_STATUS, {"s8": 0, "vcc": vcc, "exec": mask}, after))
    _check(emulator, arch, programs)


_ZEROS = np.zeros(LANES, np.uint32)
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


def _fork(number: int, passes: int, active: int) -> _Program:
    label = f"taken_{number}"
    fork = (_I_FORK if number % 2 else _G_FORK).format(label=label)
    taken, other = passes & active, ~passes & active
    ways = [(1, other), (2, taken)]
    if other.bit_count() >= taken.bit_count():
        ways.reverse()
    ways = [(way, lanes) for way, lanes in ways if lanes]
    inputs = {"s[20:21]": passes, "exec": active, "v0": _ZEROS, "s40": 0, "s41": 0}
    after = {
        "s40": int("".join(str(way) for way, _ in ways)),
        "v0": [sum(way for way, lanes in ways if lanes >> i & 1) for i in range(LANES)],
        # The lanes of the second way go on alone, as the documents have it.
        "exec": ways[-1][1],
        "mode": DEFAULT_MODE,
    }
    return _FORK.format(fork=fork, label=label), inputs, after


def test_forks(emulator, arch, seed):
    rng = random.Random(seed)
    masks = [0, 1, rng.getrandbits(64), (1 << 40) - 1, 0xFFFF << 20, (1 << 64) - 1]
    cases = itertools.product(masks, ((1 << 64) - 1, 0xFF00FF00FF))
    _check(emulator, arch, [_fork(i, *case) for i, case in enumerate(cases)])


def test_nested_forks(emulator, arch):
    """A fork within the first way of another: the inner join comes first."""
    inner = _FORK.format(fork=_I_FORK.format(label="inner"), label="inner").replace("s41", "s42")
    inner = inner.replace("s[20:21]", "s[24:25]")
    outer = _FORK.format(fork=_I_FORK.format(label="outer"), label="outer")
    code = outer.replace("s_branch outer_join", f"{inner}\ns_branch outer_join")
    inputs = {"s[20:21]": (1 << 64) - 4, "s[24:25]": 1, "v0": _ZEROS, "s40": 0, "s41": 0, "s42": 1}
    # Lanes 0 and 1 do not take the outer branch and run first, lane 0 takes the inner one.
    after = {"s40": 1212, "v0": [3, 2] + [2] * 62, "mode": DEFAULT_MODE}
    _check(emulator, arch, [(code, inputs, after)])


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


_SKIP_OFF = "s_setvskip 0, 0\ns_nop 1"
_VSKIP = f"""s_setvskip s5, s6
s_nop 1
s_getreg_b32 s7, hwreg(HW_REG_MODE)
v_add_u32 v0, 1, v0
s_cselect_b32 s8, 1, 0
{_SKIP_OFF}"""


def test_setvskip(emulator, arch, seed):
    rng = random.Random(seed)
    sources = random_values("u32", rng, _WAVES)
    bits = [rng.choice((rng.getrandbits(5), rng.getrandbits(32))) for _ in range(_WAVES)]
    scc = [rng.getrandbits(1) for _ in range(_WAVES)]
    inputs = {"s5": _array(sources, 32), "s6": _array(bits, 32), "scc": _array(scc, 32)}
    inputs["v0"] = np.arange(_WAVES * LANES, dtype=np.uint32)
    skipped = np.array(list(map(skips_vector, sources, bits)), np.uint64)
    added = inputs["v0"] + np.repeat(1 - skipped, LANES)
    after = {"v0": added, "s7": DEFAULT_MODE | skipped << np.uint64(28), "s8": scc}
    _check(emulator, arch, [(_VSKIP, inputs, after)])


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
    scalar = "s_load_dword s10, s[20:21], 0x0\ns_waitcnt lgkmcnt(0)\ns_add_u32 s10, s10, 1"
    # Memory is not written where the instruction is skipped: LDS is read back as zeros.
    after = {"v[8:11]": [[5] * LANES] * 3 + [_ZEROS], "a[0:3]": [6] * (4 * LANES)}
    after |= {"s[8:9]": 11, "vcc": 12, "s10": 8}

    def program(on: str, code: str) -> _Program:
        read_back = "ds_read_b32 v11, v3\ns_waitcnt lgkmcnt(0)"
        return f"{on}\ns_nop 1\n{code}\n{scalar}\n{_SKIP_OFF}\n{read_back}", inputs, after

    ways = ("s_setvskip 1, 0", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 28, 1), 1")
    programs = [program(on, code) for code in _VECTOR_INSTRUCTIONS for on in ways]
    _check(emulator, arch, programs, memory=[memory], lds_bytes=256)
    np.testing.assert_array_equal(memory, 7)
    # The instructions do write something where they are not skipped.
    live = [program("s_setvskip 0, 0", code)[0] for code in _VECTOR_INSTRUCTIONS]
    segments = [Segment(code, inputs, list(after)) for code in live]
    results = run(emulator, arch, segments, memory=[memory], lds_bytes=256)
    for code, result in zip(_VECTOR_INSTRUCTIONS, results, strict=True):
        unchanged = [np.all(np.ravel(result[name]) == np.ravel(after[name])) for name in after]
        is_store = "store" in code or "atomic" in code or "ds_write" in code
        assert is_store or not all(unchanged), code
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
    program = (code, inputs, {"v8": _ZEROS, "v9": memory})
    _check(emulator, arch, [program], memory=[memory], lds_bytes=256)


def test_vgpr_indexing(emulator, arch, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, (8, LANES), dtype=np.uint32)
    inputs = {"v[8:15]": values, "s4": 3 | 0xFFFFFF00, "m0": 0xABC0000, "v1": values[0], "s5": 6}

    def indexed(operands: str, code: str, after: dict[str, Any]) -> _Program:
        """The code with indexing on; after it, v2 is v8 without."""
        text = f"s_set_gpr_idx_on s4, gpr_idx({operands})\n{code}\n"
        text += "s_set_gpr_idx_off\nv_mov_b32 v2, v8"
        return text, inputs, after | {"v2": values[0]}

    both = "s_set_gpr_idx_idx s5\nv_mov_b32 v0, v8\n"
    both += "s_set_gpr_idx_mode gpr_idx(SRC1)\nv_sub_u32 v3, v8, v9"
    add3 = values[0] + values[0] + values[4]
    programs = [
        indexed("SRC0", "v_mov_b32 v0, v8", {"v0": values[3], "m0": 0xABC1003}),
        indexed("DST", "v_mov_b32 v16, v8", {"v19": values[0]}),
        indexed("SRC1", "v_sub_u32 v0, v8, v9", {"v0": values[0] - values[4]}),
        indexed("SRC2", "v_add3_u32 v0, v1, v8, v9", {"v0": add3}),
        indexed("SRC0", both, {"v0": values[6], "v3": values[0] - values[7]}),
    ]
    _check(emulator, arch, programs)


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


def test_a_branch_behind_the_last_instruction_is_an_error(emulator, arch):
    code = "s_branch behind\n.subsection 1\nbehind:\n.previous"
    with pytest.raises(EmulatorError, match="branch leaves the code object"):
        run(emulator, arch, [Segment(code)])
