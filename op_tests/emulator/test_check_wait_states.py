"""The sanitizer: wait states that software must insert.

Each hazard runs with the wait states that the documents ask for, and with one fewer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from checked_kernels import Body, code_object_of, kinds, run_checked

from jitfmha.emulator.wait_states import missing_waits
from jitfmha.jit.resources import templates_dir

# Buffers and addresses in scalar registers, zeros in vector ones: all is written that is read.
_PROLOGUE = """s_mov_b64 s[4:5], s[0:1]
s_mov_b32 s6, 0x1000
s_mov_b32 s7, 0x20000
s_mov_b64 s[8:9], s[0:1]
"""
_PROLOGUE += "\n".join(f"v_mov_b32 v{i}, 0" for i in range(1, 80))
_PROLOGUE += "\nv_mov_b32 v2, s0\n"


@dataclass(frozen=True)
class _Hazard:
    """Two instructions and the wait states between them, the same on both chips or by chip.

    The numbers are those of the ISA documents of CDNA3 and CDNA4, 4.5 and 7.5 or 7.6, but 19 where
    they say 20: LLVM does not look further back.

    Attributes:
        rule: what the first instruction does, what the second one, by the names of the rules.
    """

    rule: str
    first: str
    second: str
    waits: int | dict[str, int]
    chips: tuple[str, ...] = ("gfx942", "gfx950")

    def needed(self, arch: str) -> int:
        return self.waits if isinstance(self.waits, int) else self.waits[arch]

    def body(self, wait_states: int) -> Body:
        nops = [f"s_nop {min(left, 8) - 1}" for left in range(wait_states, 0, -8)]
        lines = ["s_nop 7\ns_nop 7\ns_nop 7", self.first, *nops, self.second]
        return Body(_PROLOGUE + "\n".join(lines), lds_bytes=256)


def _by_chip(gfx942: int, gfx950: int) -> dict[str, int]:
    return {"gfx942": gfx942, "gfx950": gfx950}


_CMP_VCC = "v_cmp_eq_u32 vcc, v1, v2"
_CMPX = "v_cmpx_eq_u32 exec, v1, v1"
_TO_S4 = "v_readfirstlane_b32 s4, v1"
_TO_S8 = "v_readfirstlane_b32 s8, v2"
_TO_V1 = "v_mov_b32 v1, 0"
_SET_MODE = "s_setreg_imm32_b32 hwreg(HW_REG_MODE), 0x3f0"
_GET_MODE = "s_getreg_b32 s4, hwreg(HW_REG_MODE)"
_SET_VSKIP = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 28, 1), 0"
_PERMLANE = "v_permlane32_swap_b32 v1, v3"
_WIDE_STORE = "global_store_dwordx4 v1, v[4:7], s[0:1]"
_SDWA = (
    "v_add_u32_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD"
)
_DOT = "v_dot2c_f32_f16 v1, v2, v3"
_DPP = "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
_XDL_32 = "v_mfma_f32_32x32x8_f16 v[8:23], v[2:3], v[4:5], 0"
_XDL_OF_B = "v_mfma_f32_16x16x16_f16 v[24:27], v[2:3], v[8:9], 0"
_XDL_16 = "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], {c}"
_F64_16 = "v_mfma_f64_16x16x4_f64 v[8:15], v[2:3], v[4:5], 0"
_F64_4 = "v_mfma_f64_4x4x4_4b_f64 v[8:9], v[2:3], v[4:5], 0"

_ON_GFX950 = ("gfx950",)
_HAZARDS = [
    _Hazard("setreg, getreg", _SET_MODE, _GET_MODE, 2),
    _Hazard("setreg, setreg", _SET_MODE, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0", 2),
    _Hazard("setreg_vskip, vector_operation", _SET_VSKIP, "v_mov_b32 v2, 0", 2),
    _Hazard("setvskip, getreg_mode", "s_setvskip 0, 0", _GET_MODE, 2),
    *(
        _Hazard(f"valu_writes_scalar, {rule}", first, second, waits)
        for rule, first, second, waits in (
            ("vmem_reads_scalar", _TO_S8, "buffer_load_dword v2, v1, s[4:7], s8 offen", 5),
            ("vmem_reads_scalar", _TO_S8, "global_load_dword v3, v1, s[8:9]", 5),
            ("valu_reads_scalar", _TO_S4, "v_mov_b32 v2, s4", 2),
            ("valu_reads_scalar", _CMP_VCC, "v_mov_b32 v2, vcc_lo", 2),
            ("selects_lane", _TO_S4, "v_readlane_b32 s6, v2, s4", 4),
            ("selects_lane", _TO_S4, "v_writelane_b32 v2, 0, s4", 4),
            ("div_fmas_reads_vcc", _CMP_VCC, "v_div_fmas_f32 v1, v2, v3, v4", 4),
            ("reads_vccz", _CMP_VCC, "v_mov_b32 v2, src_vccz", 5),
            ("reads_execz", _CMPX, "v_mov_b32 v2, src_execz", 5),
            ("dpp_under_exec", _CMPX, f"v_mov_b32_dpp v2, v3 {_DPP}", 5),
            ("lane_access_under_exec", _CMPX, "v_readlane_b32 s4, v2, 0", 4),
            ("lane_access_under_exec", _CMPX, "v_writelane_b32 v2, s2, 0", 4),
            ("matrix_under_exec", _CMPX, _XDL_32, 4),
        )
    ),
    *(
        _Hazard(f"salu_writes_scalar, {rule}", "s_mov_b32 m0, 0", second, 1)
        for rule, second in (
            ("message_reads_m0", "s_sendmsg sendmsg(MSG_INTERRUPT)"),
            ("lds_dma_reads_m0", "buffer_load_dword v1, s[4:7], 0 offen lds"),
            ("addtid_reads_m0", "ds_write_addtid_b32 v1"),
            ("movrel_reads_m0", "s_movrels_b32 s4, s2"),
        )
    ),
    _Hazard("valu_writes, dpp_reads", _TO_V1, f"v_mov_b32_dpp v2, v1 {_DPP}", 2),
    _Hazard("valu_writes, lane_access_reads", _TO_V1, "v_readlane_b32 s4, v1, 0", 1),
    _Hazard("valu_writes, lane_access_reads", _TO_V1, "v_readfirstlane_b32 s4, v1", 1),
    _Hazard("valu_writes, permlane_reads", _TO_V1, _PERMLANE, 2, _ON_GFX950),
    _Hazard("valu_writes_scalar, permlane_under_exec", _CMPX, _PERMLANE, 4, _ON_GFX950),
    _Hazard("valu_writes, matrix_reads_ab", "v_mov_b32 v3, 0", _XDL_32, 2),
    _Hazard("valu_writes, matrix_reads_c", "v_mov_b32 v8, 0", _XDL_16.format(c="v[8:11]"), 2),
    _Hazard("trans_writes, non_trans_reads", "v_exp_f32 v1, v2", "v_add_f32 v3, v1, v1", 1),
    _Hazard("valu_writes_part, valu_reads", _SDWA, "v_mov_b32 v4, v1", 1),
    _Hazard("dot_writes, valu_reads", _DOT, "v_mov_b32 v5, v1", 3),
    _Hazard("dot_writes, valu_reads", _DOT, "v_dot2c_f32_f16 v5, v1, v3", 3),
    _Hazard("dot_writes, memory_reads", _DOT, "global_store_dword v6, v1, s[0:1]", 3),
    _Hazard("dot_writes, valu_writes", _DOT, _TO_V1, 3),
    _Hazard("dgemm, f64_fma", _F64_4, "v_fma_f64 v[20:21], v[2:3], v[4:5], v[6:7]", 2),
    _Hazard("wide_store_reads, valu_writes", _WIDE_STORE, "v_mov_b32 v6, 0", 2),
    # Operands that the products below do not have.
    _Hazard("xdl_writes, matrix_reads_ab", _XDL_32, _XDL_OF_B, _by_chip(11, 12)),
    # C begins where the result does and is a part of it.
    _Hazard(
        "xdl_writes, xdl_reads_c",
        _XDL_32,
        "v_mfma_f32_16x16x16_f16 v[24:27], v[2:3], v[4:5], v[8:11]",
        _by_chip(9, 10),
    ),
    _Hazard("xdl_writes, valu_reads", _XDL_32, "v_mov_b32 v1, v23", _by_chip(11, 12)),
    _Hazard("xdl_writes, memory_reads", _XDL_32, "ds_write_b32 v1, v8", _by_chip(11, 12)),
]

# What needs no wait states although it looks like one of the above.
_HARMLESS = {
    "salu_sgpr": "s_mov_b32 s4, 0\nv_mov_b32 v1, s4",
    "carry_in": "v_cmp_eq_u32 vcc, v0, v0\nv_cndmask_b32 v1, 0, v0, vcc",
    "scalar_unit": "v_readfirstlane_b32 s4, v0\ns_mov_b32 s5, s4",
    "valu_chain": "v_mov_b32 v1, v0\nv_mov_b32 v2, v1",
    "trans_chain": "v_exp_f32 v1, v0\nv_log_f32 v2, v1",
    "same_accumulator": f"s_nop 1\n{_XDL_16.format(c=0)}\n{_XDL_16.format(c='v[8:11]')}",
    "accumulator_of_another_kind": (
        f"s_nop 1\n{_XDL_32}\nv_mfma_f32_32x32x2_f32 v[8:23], v2, v4, v[8:23]"
    ),
    "dot_to_matrix": f"s_nop 1\nv_dot2c_f32_f16 v2, v4, v5\n{_XDL_32}",
    "dot_chain": f"{_DOT}\n{_DOT}",
    "store_with_soffset": (
        "s_mov_b32 s8, 0\nbuffer_store_dwordx4 v[4:7], v1, s[4:7], s8 offen\nv_mov_b32 v6, 0"
    ),
    "narrow_store": "global_store_dwordx2 v1, v[4:5], s[0:1]\nv_mov_b32 v4, 0",
}


# ---- Matrix products -----------------------------------------------------------------------------
# The numbers once more, so that one that changes is seen: for 2, 4, 8 and 16 passes of a matrix
# instruction, and for gfx942 and gfx950 where these differ.

_Columns = tuple[int, ...]
_XDL_BY_PASSES = {
    2: "v_mfma_f32_4x4x4_16b_f16 v[8:11], v[2:3], v[4:5], {c}",
    4: _XDL_16,
    8: "v_mfma_f32_32x32x8_f16 v[8:23], v[2:3], v[4:5], {c}",
    16: "v_mfma_f32_32x32x4_2b_f16 v[8:39], v[2:3], v[4:5], {c}",
}
# No product of float32 has 4 passes.
_F32_BY_PASSES = {
    2: "v_mfma_f32_4x4x1_16b_f32 v[8:11], v2, v4, {c}",
    8: "v_mfma_f32_16x16x4_f32 v[8:11], v2, v4, {c}",
    16: "v_mfma_f32_32x32x2_f32 v[8:23], v2, v4, {c}",
}
_PASSES = (2, 4, 8, 16)
# What the second instruction does to v8. C at v[6:9] is nobody's exact result.
_SECOND = {
    "xdl_reads_c": "v_mfma_f32_4x4x4_16b_f16 v[72:75], v[2:3], v[4:5], v[6:9]",
    "sdgemm_reads_c": "v_mfma_f32_4x4x1_16b_f32 v[72:75], v2, v4, v[6:9]",
    "matrix_reads_ab": "v_mfma_f32_4x4x4_16b_f16 v[72:75], v[8:9], v[4:5], 0",
    "memory_reads": "global_store_dword v1, v8, s[0:1]",
    "valu_reads": "v_mov_b32 v72, v8",
    "valu_writes": "v_mov_b32 v8, 0",
    "dgemm_4_reads_same_c": "v_mfma_f64_4x4x4_4b_f64 v[8:9], v[2:3], v[4:5], v[8:9]",
}
_WITHOUT_C = ("matrix_reads_ab", "memory_reads", "valu_reads", "valu_writes")
_XDL_RULES: dict[str, dict[str, _Columns]] = {
    "gfx942": dict.fromkeys(("xdl_reads_c", "sdgemm_reads_c"), (3, 5, 9, 17))
    | dict.fromkeys(_WITHOUT_C, (5, 7, 11, 19)),
    "gfx950": {"xdl_reads_c": (4, 6, 10, 18), "sdgemm_reads_c": (3, 6, 10, 18)}
    | dict.fromkeys(_WITHOUT_C, (5, 8, 12, 19)),
}
_F32_RULES: dict[str, _Columns] = {"sdgemm_reads_c": (2, 4, 8, 16)}
_F32_RULES |= dict.fromkeys(_WITHOUT_C, (4, 6, 10, 18))
_F64_16_RULES = {
    "sdgemm_reads_c": _by_chip(9, 17),
    "matrix_reads_ab": _by_chip(11, 19),
    "valu_reads": _by_chip(11, 19),
    "valu_writes": _by_chip(11, 11),
    "memory_reads": _by_chip(18, 18),
}
_F64_4_RULES = {
    "dgemm_4_reads_same_c": 4,
    "sdgemm_reads_c": 4,
    "matrix_reads_ab": 6,
    "valu_reads": 6,
    "valu_writes": 6,
    "memory_reads": 9,
}


def _exact_result_as_c(product: str) -> str:
    """The same product on top of its own result."""
    result = product.split(", ")[0].split(" ")[1]
    return product.format(c=result)


def _products(arch: str) -> Iterator[_Hazard]:
    """Of every number of passes, with every use of what they write or read."""
    for kind, products, rules in (
        ("xdl", _XDL_BY_PASSES, _XDL_RULES[arch]),
        ("sgemm", _F32_BY_PASSES, _F32_RULES),
    ):
        for passes, product in products.items():
            first = product.format(c="0")
            for second, columns in rules.items():
                waits = columns[_PASSES.index(passes)]
                yield _Hazard(f"{kind}_writes, {second}", first, _SECOND[second], waits)
            waits, rule = 2 if passes == 2 else 0, f"{kind}_writes, matrix_reads_same_c"
            yield _Hazard(rule, first, _exact_result_as_c(product), waits)
    for passes, waits in zip(_PASSES, (1, 3, 7, 15), strict=True):
        registers = {8: 16, 16: 32}.get(passes, 4)
        product = _XDL_BY_PASSES[passes].format(c=f"v[40:{39 + registers}]")
        yield _Hazard("xdl_reads_c, valu_writes", product, "v_mov_b32 v41, 0", waits)
    for second, of_chips in _F64_16_RULES.items():
        yield _Hazard(f"dgemm_16_writes, {second}", _F64_16, _SECOND[second], of_chips)
    for second, waits in _F64_4_RULES.items():
        yield _Hazard(f"dgemm_4_writes, {second}", _F64_4, _SECOND[second], waits)


def test_every_rule(check_emulator, arch):
    """One state too few is the one finding, and named by the rule; just enough is none."""
    hazards = [each for each in (*_HAZARDS, *_products(arch)) if arch in each.chips]
    bodies = {}
    for i, hazard in enumerate(hazards):
        states = hazard.needed(arch)
        bodies |= {f"enough_{i}": hazard.body(states), f"few_{i}": hazard.body(max(0, states - 1))}
    findings = run_checked(check_emulator, arch, bodies)
    places = missing_waits(code_object_of(arch, bodies))
    lacking = {f"few_{i}": 1 for i, hazard in enumerate(hazards) if hazard.needed(arch)}
    assert {place.kernel: place.missing for place in places} == lacking
    for i, hazard in enumerate(hazards):
        assert findings[f"enough_{i}"] == [], hazard
        if states := hazard.needed(arch):
            assert kinds(findings[f"few_{i}"]) == ["wait-states"], hazard
            message = findings[f"few_{i}"][0].message
            after = f"needs {states} wait states after `{hazard.first.split()[0]}"
            for words in (after, f"has {states - 1} ", f" ({hazard.rule};"):
                assert words in message, hazard
            assert any(source in message for source in ("T11", "M;", "check")), hazard


def test_no_rule_is_left_out():
    table = (templates_dir() / "emulator/checks/wait_states.inc").read_text(encoding="utf-8")
    rules = set(re.findall(r"^RULE\((\w+, \w+),", table, re.MULTILINE))
    products = [*_products("gfx942"), *_products("gfx950")]
    assert {hazard.rule for hazard in (*_HAZARDS, *products)} == rules


def test_no_false_alarm(check_emulator, arch):
    bodies = {name: Body(_PROLOGUE + code) for name, code in _HARMLESS.items()}
    assert run_checked(check_emulator, arch, bodies) == {name: [] for name in _HARMLESS}
    assert missing_waits(code_object_of(arch, bodies)) == []


def test_any_instruction_is_a_wait_state(check_emulator, arch):
    code = f"{_PROLOGUE}v_readfirstlane_b32 s8, v0\ns_mov_b32 s9, 0\n" + "v_mov_b32 v5, 0\n" * 3
    load = "buffer_load_dword v2, v0, s[4:7], s8 offen"
    bodies = {"four": Body(f"{code}{load}"), "five": Body(f"{code}v_mov_b32 v5, 0\n{load}")}
    findings = run_checked(check_emulator, arch, bodies)
    assert kinds(findings["four"]) == ["wait-states"]
    assert findings["five"] == []
