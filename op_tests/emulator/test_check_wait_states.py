"""The sanitizer: wait states that software must insert.

Each hazard runs with the wait states that the documents ask for, and with one fewer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from checked_kernels import Body, kinds, run_checked

from jitfmha.emulator import Emulator
from jitfmha.jit.resources import templates_dir


@dataclass(frozen=True)
class _Hazard:
    """Two instructions and the wait states between them, the same on both chips or by chip.

    The numbers are those of the ISA documents of CDNA3 and CDNA4, 4.5 and 7.5 or 7.6, but 19 where
    they say 20: LLVM does not look further back.
    """

    first: str
    second: str
    waits: int | dict[str, int]
    before: str = ""
    lds_bytes: int = field(default=0)
    chips: tuple[str, ...] = ("gfx942", "gfx950")

    def needed(self, arch: str) -> int:
        return self.waits if isinstance(self.waits, int) else self.waits[arch]

    def body(self, wait_states: int) -> Body:
        nops = [f"s_nop {min(left, 8) - 1}" for left in range(wait_states, 0, -8)]
        lines = [self.before, "s_nop 7\ns_nop 7\ns_nop 7", self.first, *nops, self.second]
        return Body("\n".join(line for line in lines if line), lds_bytes=self.lds_bytes)


def _zeros(*registers: str) -> str:
    """Registers v.., a.. and s.. set to 0, so that nothing is read that nobody wrote."""
    lines = []
    for name in registers:
        file, _, span = name.partition("[")
        first, _, last = span.rstrip("]").partition(":")
        move = {"v": "v_mov_b32", "s": "s_mov_b32", "a": "v_accvgpr_write_b32"}[file]
        lines += [f"{move} {file}{i}, 0" for i in range(int(first), int(last) + 1)]
    return "\n".join(lines)


def _by_chip(gfx942: int, gfx950: int) -> dict[str, int]:
    return {"gfx942": gfx942, "gfx950": gfx950}


_V = _zeros("v[1:40]")
_CMP_VCC = "v_cmp_eq_u32 vcc, v1, v2"
_CMPX = "v_cmpx_eq_u32 exec, v1, v1"
_SET_MODE = "s_setreg_imm32_b32 hwreg(HW_REG_MODE), 0x3f0"
_SDWA = (
    "v_add_u32_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD"
)
_DPP = "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
_BUFFER = "s_mov_b64 s[4:5], s[0:1]\ns_mov_b32 s6, 0x1000\ns_mov_b32 s7, 0x20000\n"
_XDL_4 = "v_mfma_f32_4x4x4_16b_f16 v[8:11], v[2:3], v[4:5], 0"  # 2 passes
_XDL_16 = "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], 0"  # 4 passes
_XDL_32 = "v_mfma_f32_32x32x8_f16 v[8:23], v[2:3], v[4:5], 0"  # 8 passes
_XDL_32X4 = "v_mfma_f32_32x32x4_2b_f16 v[8:39], v[2:3], v[4:5], v[8:39]"  # 16 passes
_F32_4 = "v_mfma_f32_4x4x1_16b_f32 v[8:11], v2, v4, 0"  # 2 passes
_F32_16 = "v_mfma_f32_16x16x4_f32 v[8:11], v2, v4, 0"  # 8 passes
_F64_16 = "v_mfma_f64_16x16x4_f64 v[8:15], v[2:3], v[4:5], 0"
_F64_4 = "v_mfma_f64_4x4x4_4b_f64 v[8:9], v[2:3], v[4:5], 0"

_SCALAR = {
    "getreg": _Hazard(_SET_MODE, "s_getreg_b32 s4, hwreg(HW_REG_MODE)", 2),
    "setreg": _Hazard(_SET_MODE, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0", 2),
    "vmem_sgpr": _Hazard(
        "v_readfirstlane_b32 s8, v1", "buffer_load_dword v2, v1, s[4:7], s8 offen", 5, _BUFFER + _V
    ),
    "global_sgpr": _Hazard(
        "v_readfirstlane_b32 s8, v2",
        "global_load_dword v3, v1, s[8:9]",
        5,
        _V + "\ns_mov_b64 s[8:9], s[0:1]\nv_mov_b32 v2, s0",
    ),
    "constant": _Hazard("v_readfirstlane_b32 s4, v1", "v_mov_b32 v2, s4", 2, _V),
    "vcc_constant": _Hazard(_CMP_VCC, "v_mov_b32 v2, vcc_lo", 2, _V),
    "lane_select": _Hazard("v_readfirstlane_b32 s4, v1", "v_readlane_b32 s6, v2, s4", 4, _V),
    "lane_select_of_write": _Hazard(
        "v_readfirstlane_b32 s4, v1", "v_writelane_b32 v2, 0, s4", 4, _V
    ),
    "div_fmas": _Hazard(_CMP_VCC, "v_div_fmas_f32 v1, v2, v3, v4", 4, _V),
    "vccz": _Hazard(_CMP_VCC, "v_mov_b32 v2, src_vccz", 5, _V),
    "execz": _Hazard(_CMPX, "v_mov_b32 v2, src_execz", 5, _V),
    "dpp_exec": _Hazard(_CMPX, f"v_mov_b32_dpp v2, v3 {_DPP}", 5, _V),
    "readlane_exec": _Hazard(_CMPX, "v_readlane_b32 s4, v2, 0", 4, _V),
    "writelane_exec": _Hazard(_CMPX, "v_writelane_b32 v2, s2, 0", 4, _V),
    "mfma_exec": _Hazard(_CMPX, _XDL_16, 4, _V),
    "permlane_exec": _Hazard(_CMPX, "v_permlane32_swap_b32 v2, v3", 4, _V, chips=("gfx950",)),
    "m0_movrel": _Hazard("s_mov_b32 m0, 0", "s_movrels_b32 s4, s2", 1),
    "m0_lds_dma": _Hazard(
        "s_mov_b32 m0, 0",
        "buffer_load_dword v1, s[4:7], 0 offen lds",
        1,
        _BUFFER + _V,
        lds_bytes=256,
    ),
}

_VALU = {
    "dpp": _Hazard("v_mov_b32 v1, 0", f"v_mov_b32_dpp v2, v1 {_DPP}", 2),
    "readlane": _Hazard("v_mov_b32 v1, 0", "v_readlane_b32 s4, v1, 0", 1),
    "readfirstlane": _Hazard("v_mov_b32 v1, 0", "v_readfirstlane_b32 s4, v1", 1),
    "permlane": _Hazard(
        "v_mov_b32 v2, 0", "v_permlane32_swap_b32 v1, v2", 2, _V, chips=("gfx950",)
    ),
    "mfma_a": _Hazard("v_mov_b32 v3, 0", _XDL_16, 2, _V),
    "mfma_c": _Hazard(
        "v_mov_b32 v8, 0", "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[8:11]", 2, _V
    ),
    "trans": _Hazard("v_exp_f32 v1, v2", "v_add_f32 v3, v1, v1", 1, _V),
    "sdwa": _Hazard(_SDWA, "v_mov_b32 v4, v1", 1, _V),
    "dot_to_valu": _Hazard("v_dot2c_f32_f16 v1, v2, v3", "v_mov_b32 v5, v1", 3, _V),
    "dot_to_dot": _Hazard("v_dot2c_f32_f16 v1, v2, v3", "v_dot2c_f32_f16 v5, v1, v3", 3, _V),
    "dot_overwritten": _Hazard("v_dot2c_f32_f16 v1, v2, v3", "v_mov_b32 v1, 0", 3, _V),
    "dot_stored": _Hazard("v_dot2c_f32_f16 v1, v2, v3", "global_store_dword v6, v1, s[0:1]", 3, _V),
    "store_data": _Hazard("global_store_dwordx4 v1, v[4:7], s[0:1]", "v_mov_b32 v6, 0", 2, _V),
}

_MATRIX = {
    "xdl_4_c": _Hazard(
        _XDL_4, "v_mfma_f32_4x4x4_16b_f16 v[12:15], v[2:3], v[4:5], v[10:13]", _by_chip(3, 4), _V
    ),
    "xdl_4_same_c": _Hazard(
        _XDL_4, "v_mfma_f32_4x4x4_16b_f16 v[8:11], v[2:3], v[4:5], v[8:11]", 2, _V
    ),
    "xdl_16_c": _Hazard(
        _XDL_16, "v_mfma_f32_16x16x16_f16 v[12:15], v[2:3], v[4:5], v[10:13]", _by_chip(5, 6), _V
    ),
    "xdl_32_a": _Hazard(
        _XDL_32, "v_mfma_f32_16x16x16_f16 v[24:27], v[8:9], v[4:5], 0", _by_chip(11, 12), _V
    ),
    "xdl_16_b": _Hazard(
        _XDL_16, "v_mfma_f32_16x16x16_f16 v[24:27], v[2:3], v[8:9], 0", _by_chip(7, 8), _V
    ),
    "xdl_4_to_f32": _Hazard(_XDL_4, "v_mfma_f32_4x4x1_16b_f32 v[12:15], v2, v4, v[10:13]", 3, _V),
    "xdl_16_to_valu": _Hazard(_XDL_16, "v_mov_b32 v1, v11", _by_chip(7, 8), _V),
    "xdl_32_to_valu": _Hazard(_XDL_32, "v_mov_b32 v1, v23", _by_chip(11, 12), _V),
    "xdl_32x4_to_valu": _Hazard(_XDL_32X4, "v_mov_b32 v1, v39", 19, _V),
    "xdl_16_to_memory": _Hazard(_XDL_16, "global_store_dword v1, v8, s[0:1]", _by_chip(7, 8), _V),
    "xdl_16_to_lds": _Hazard(_XDL_16, "ds_write_b32 v1, v8", _by_chip(7, 8), _V, lds_bytes=16),
    "xdl_16_overwritten": _Hazard(_XDL_16, "v_mov_b32 v8, 0", _by_chip(7, 8), _V),
    "xdl_c_overwritten": _Hazard(
        "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[12:15]", "v_mov_b32 v13, 0", 3, _V
    ),
    "f32_4_c": _Hazard(_F32_4, "v_mfma_f32_4x4x1_16b_f32 v[12:15], v2, v4, v[10:13]", 2, _V),
    "f32_16_c": _Hazard(_F32_16, "v_mfma_f32_16x16x4_f32 v[12:15], v2, v4, v[10:13]", 8, _V),
    "f32_16_to_valu": _Hazard(_F32_16, "v_mov_b32 v1, v8", 10, _V),
    "f32_16_a": _Hazard(_F32_16, "v_mfma_f32_16x16x4_f32 v[24:27], v8, v4, 0", 10, _V),
    "f64_16_to_valu": _Hazard(_F64_16, "v_mov_b32 v1, v8", _by_chip(11, 19), _V),
    "f64_16_to_memory": _Hazard(_F64_16, "global_store_dword v1, v8, s[0:1]", 18, _V),
    "f64_4_to_valu": _Hazard(_F64_4, "v_mov_b32 v1, v8", 6, _V),
    "f64_4_same_c": _Hazard(
        _F64_4, "v_mfma_f64_4x4x4_4b_f64 v[8:9], v[2:3], v[4:5], v[8:9]", 4, _V
    ),
    "f64_then_fma": _Hazard(_F64_4, "v_fma_f64 v[20:21], v[2:3], v[4:5], v[6:7]", 2, _V),
}

# What needs no wait states although it looks like one of the above.
_HARMLESS = {
    "salu_sgpr": Body("s_mov_b32 s4, 0\nv_mov_b32 v1, s4"),
    "carry_in": Body("v_cmp_eq_u32 vcc, v0, v0\nv_cndmask_b32 v1, 0, v0, vcc"),
    "scalar_unit": Body("v_readfirstlane_b32 s4, v0\ns_mov_b32 s5, s4"),
    "valu_chain": Body("v_mov_b32 v1, v0\nv_mov_b32 v2, v1"),
    "trans_chain": Body("v_exp_f32 v1, v0\nv_log_f32 v2, v1"),
    "same_accumulator": Body(
        f"{_V}\ns_nop 1\n{_XDL_16}\nv_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[8:11]"
    ),
    "accumulator_of_another_kind": Body(
        f"{_V}\ns_nop 1\n{_XDL_32}\nv_mfma_f32_32x32x2_f32 v[8:23], v2, v4, v[8:23]"
    ),
    "dot_to_matrix": Body(f"{_V}\ns_nop 1\nv_dot2c_f32_f16 v2, v4, v5\n{_XDL_16}"),
    "dot_chain": Body(f"{_V}\nv_dot2c_f32_f16 v1, v2, v3\nv_dot2c_f32_f16 v1, v2, v3"),
    "store_with_soffset": Body(
        f"{_BUFFER}{_V}\ns_mov_b32 s8, 0\nbuffer_store_dwordx4 v[4:7], v1, s[4:7], s8 offen"
        "\nv_mov_b32 v6, 0"
    ),
    "narrow_store": Body(f"{_V}\nglobal_store_dwordx2 v1, v[4:5], s[0:1]\nv_mov_b32 v4, 0"),
}


# ---- Every rule of the table ---------------------------------------------------------------------
# The numbers once more, so that one that changes is seen: for 2, 4, 8 and 16 passes of a matrix
# instruction, and for gfx942 and gfx950 where these differ.

_Columns = tuple[int, ...]
_WIDE = _zeros("v[1:79]")
_XDL_BY_PASSES = {
    2: "v_mfma_f32_4x4x4_16b_f16 v[8:11], v[2:3], v[4:5], {c}",
    4: "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], {c}",
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
_GETREG_MODE = "s_getreg_b32 s4, hwreg(HW_REG_MODE)"
_SCALAR_RULES = {
    ("setreg", "getreg"): _SCALAR["getreg"],
    ("setreg", "setreg"): _SCALAR["setreg"],
    ("setreg_vskip", "vector_operation"): _Hazard(
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 28, 1), 0", "v_mov_b32 v2, 0", 2
    ),
    ("setvskip", "getreg_mode"): _Hazard("s_setvskip 0, 0", _GETREG_MODE, 2),
    ("valu_writes_scalar", "vmem_reads_scalar"): _SCALAR["vmem_sgpr"],
    ("valu_writes_scalar", "valu_reads_scalar"): _SCALAR["constant"],
    ("valu_writes_scalar", "selects_lane"): _SCALAR["lane_select"],
    ("valu_writes_scalar", "div_fmas_reads_vcc"): _SCALAR["div_fmas"],
    ("valu_writes_scalar", "reads_vccz"): _SCALAR["vccz"],
    ("valu_writes_scalar", "reads_execz"): _SCALAR["execz"],
    ("valu_writes_scalar", "dpp_under_exec"): _SCALAR["dpp_exec"],
    ("valu_writes_scalar", "lane_access_under_exec"): _SCALAR["readlane_exec"],
    ("valu_writes_scalar", "matrix_under_exec"): _SCALAR["mfma_exec"],
    ("valu_writes_scalar", "permlane_under_exec"): _SCALAR["permlane_exec"],
    ("salu_writes_scalar", "message_reads_m0"): _Hazard(
        "s_mov_b32 m0, 0", "s_sendmsg sendmsg(MSG_INTERRUPT)", 1
    ),
    ("salu_writes_scalar", "lds_dma_reads_m0"): _SCALAR["m0_lds_dma"],
    ("salu_writes_scalar", "addtid_reads_m0"): _Hazard(
        "s_mov_b32 m0, 0", "ds_write_addtid_b32 v1", 1, _V, lds_bytes=256
    ),
    ("salu_writes_scalar", "movrel_reads_m0"): _SCALAR["m0_movrel"],
}
_VALU_RULES = {
    ("valu_writes", "dpp_reads"): _VALU["dpp"],
    ("valu_writes", "lane_access_reads"): _VALU["readlane"],
    ("valu_writes", "permlane_reads"): _VALU["permlane"],
    ("valu_writes", "matrix_reads_ab"): _VALU["mfma_a"],
    ("valu_writes", "matrix_reads_c"): _VALU["mfma_c"],
    ("trans_writes", "non_trans_reads"): _VALU["trans"],
    ("valu_writes_part", "valu_reads"): _VALU["sdwa"],
    ("dot_writes", "valu_reads"): _VALU["dot_to_valu"],
    ("dot_writes", "memory_reads"): _VALU["dot_stored"],
    ("dot_writes", "valu_writes"): _VALU["dot_overwritten"],
    ("dgemm", "f64_fma"): _MATRIX["f64_then_fma"],
    ("wide_store_reads", "valu_writes"): _VALU["store_data"],
}


def _exact_result_as_c(product: str) -> str:
    """The same product on top of its own result."""
    result = product.split(", ")[0].split(" ")[1]
    return product.format(c=result)


def _cases_of_rules(arch: str) -> Iterator[tuple[str, str, _Hazard]]:
    """(first, second, what decides about them) of every rule, passes and all."""
    for (first, second), hazard in (_SCALAR_RULES | _VALU_RULES).items():
        yield first, second, hazard
    for kind, products, rules in (
        ("xdl", _XDL_BY_PASSES, _XDL_RULES[arch]),
        ("sgemm", _F32_BY_PASSES, _F32_RULES),
    ):
        for passes, product in products.items():
            first = product.format(c="0")
            for second, columns in rules.items():
                waits = columns[_PASSES.index(passes)]
                yield f"{kind}_writes", second, _Hazard(first, _SECOND[second], waits, _WIDE)
            waits = 2 if passes == 2 else 0
            hazard = _Hazard(first, _exact_result_as_c(product), waits, _WIDE)
            yield f"{kind}_writes", "matrix_reads_same_c", hazard
    for passes, waits in zip(_PASSES, (1, 3, 7, 15), strict=True):
        registers = {8: 16, 16: 32}.get(passes, 4)
        product = _XDL_BY_PASSES[passes].format(c=f"v[40:{39 + registers}]")
        yield "xdl_reads_c", "valu_writes", _Hazard(product, "v_mov_b32 v41, 0", waits, _WIDE)
    for second, waits in _F64_16_RULES.items():
        yield "dgemm_16_writes", second, _Hazard(_F64_16, _SECOND[second], waits, _WIDE)
    for second, waits in _F64_4_RULES.items():
        yield "dgemm_4_writes", second, _Hazard(_F64_4, _SECOND[second], waits, _WIDE)


def _messages(emulator: Emulator, arch: str, hazards: dict[str, _Hazard]) -> dict[str, str]:
    """What is said of each with one state too few, the only finding; just enough has none."""
    needed = {name: each.needed(arch) for name, each in hazards.items() if arch in each.chips}
    bodies = {name: hazards[name].body(states) for name, states in needed.items()}
    few = {f"few_{name}": hazards[name].body(n - 1) for name, n in needed.items() if n}
    findings = run_checked(emulator, arch, bodies | few)
    messages = {}
    for name, states in needed.items():
        case = (name, hazards[name].first, hazards[name].second)
        assert findings[name] == [], case
        if states:
            assert kinds(findings[f"few_{name}"]) == ["wait-states"], case
            messages[name] = findings[f"few_{name}"][0].message
            assert f"needs {states} wait states after" in messages[name], case
            assert f"has {states - 1} " in messages[name], case
    return messages


def test_every_rule(check_emulator, arch):
    """One state too few is found, and named by the rule; just enough is not."""
    cases = {f"rule_{i}": case for i, case in enumerate(_cases_of_rules(arch))}
    hazards = {name: hazard for name, (*_, hazard) in cases.items()}
    for name, message in _messages(check_emulator, arch, hazards).items():
        assert f" ({', '.join(cases[name][:2])};" in message


def test_no_rule_is_left_out():
    table = (templates_dir() / "emulator/checks/wait_states.inc").read_text(encoding="utf-8")
    rules = set(re.findall(r"^RULE\((\w+), (\w+),", table, re.MULTILINE))
    cases = {(first, second) for arch in ("gfx942", "gfx950")
             for first, second, _ in _cases_of_rules(arch)}  # fmt: skip
    assert cases == rules


@pytest.mark.parametrize("hazards", [_SCALAR, _VALU, _MATRIX], ids=["scalar", "valu", "matrix"])
def test_registers(check_emulator, arch, hazards):
    for name, message in _messages(check_emulator, arch, hazards).items():
        assert f"wait states after `{hazards[name].first.split()[0]}" in message
        assert any(source in message for source in ("T11", "M;", "check")), name


def test_no_false_alarm(check_emulator, arch):
    findings = run_checked(check_emulator, arch, _HARMLESS)
    assert findings == {name: [] for name in _HARMLESS}


def test_any_instruction_is_a_wait_state(check_emulator, arch):
    lines = ["v_readfirstlane_b32 s8, v0", "s_mov_b32 s9, 0", *["v_mov_b32 v5, 0"] * 3]
    load = "buffer_load_dword v2, v0, s[4:7], s8 offen"
    code = _BUFFER + "\n".join(lines)
    bodies = {"four": Body(f"{code}\n{load}"), "five": Body(f"{code}\nv_mov_b32 v5, 0\n{load}")}
    findings = run_checked(check_emulator, arch, bodies)
    assert kinds(findings["four"]) == ["wait-states"]
    assert findings["five"] == []
