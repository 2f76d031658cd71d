"""The sanitizer: accesses outside of memory, LDS and scratch, and reads of what nobody wrote."""

from __future__ import annotations

import pytest
from checked_kernels import BYTES, Body, kinds, run_checked

from jitfmha.emulator import Emulator

# Each pair differs in the fault alone.
_FAULTS = {
    # name: (kind, register or text of the message, clean, faulty)
    "global_load": (
        "global-bounds",
        "load of 4 bytes",
        Body(f"v_mov_b32 v1, {BYTES - 4}\nglobal_load_dword v2, v1, s[0:1]"),
        Body(f"v_mov_b32 v1, {BYTES - 3}\nglobal_load_dword v2, v1, s[0:1]"),
    ),
    "global_store": (
        "global-bounds",
        "store of 8 bytes",
        Body(f"v_mov_b32 v1, {BYTES - 8}\nglobal_store_dwordx2 v1, v[0:1], s[0:1]"),
        Body("v_mov_b32 v1, -4\nglobal_store_dwordx2 v1, v[0:1], s[0:1]"),
    ),
    "scalar_load": (
        "global-bounds",
        "load of 8 bytes",
        Body("s_load_dwordx2 s[4:5], s[0:1], 0x10"),
        Body(f"s_load_dwordx2 s[4:5], s[0:1], 0x{BYTES - 4:x}"),
    ),
    "scratch": (
        "scratch-bounds",
        "private memory",
        Body("v_mov_b32 v1, 12\nscratch_store_dword v1, v0, off", scratch_bytes=16),
        Body("v_mov_b32 v1, 16\nscratch_store_dword v1, v0, off", scratch_bytes=16),
    ),
    "lds_static": (
        "lds-bounds",
        "the workgroup has 0x104 bytes",
        Body("v_mov_b32 v1, 0x100\nds_write_b32 v1, v0", lds_bytes=0x104),
        # Inside of the granule that the hardware allocates.
        Body("v_mov_b32 v1, 0x104\nds_write_b32 v1, v0", lds_bytes=0x104),
    ),
    "lds_dynamic": (
        "lds-bounds",
        "reads 8 bytes",
        Body(
            "v_mov_b32 v1, 0x100\nv_mov_b32 v2, 0\nv_mov_b32 v3, 0\nds_write_b64 v1, v[2:3]\n"
            "ds_read_b64 v[2:3], v1",
            lds_bytes=0x100,
            dynamic_lds=8,
        ),
        Body("v_mov_b32 v1, 0x100\nds_read_b64 v[2:3], v1", lds_bytes=0x100, dynamic_lds=4),
    ),
    "vgpr": (
        "uninitialized",
        "reads v7, which nobody wrote in 64 of the 64 lanes",
        Body("v_mov_b32 v7, 0\nv_add_u32 v1, v0, v7"),
        Body("v_add_u32 v1, v0, v7"),
    ),
    "vgpr_in_some_lanes": (
        "uninitialized",
        "reads v7, which nobody wrote in 56 of the 64 lanes",
        Body("s_mov_b64 exec, 0xff\nv_mov_b32 v7, 0\nv_add_u32 v1, v0, v7"),
        Body("s_mov_b64 exec, 0xff\nv_mov_b32 v7, 0\ns_mov_b64 exec, -1\nv_add_u32 v1, v0, v7"),
    ),
    "stored_vgpr": (
        "uninitialized",
        "reads v5",
        Body("v_mov_b32 v1, 0\nv_mov_b32 v5, 0\nglobal_store_dword v1, v5, s[0:1]"),
        Body("v_mov_b32 v1, 0\nglobal_store_dword v1, v5, s[0:1]"),
    ),
    "accumulator": (
        "uninitialized",
        "reads a3",
        Body("v_accvgpr_write_b32 a3, 0\nv_accvgpr_read_b32 v1, a3"),
        Body("v_accvgpr_read_b32 v1, a3"),
    ),
    "readlane": (
        "uninitialized",
        "reads v5",
        Body("v_writelane_b32 v5, s2, 3\ns_nop 0\nv_readlane_b32 s4, v5, 3"),
        Body("v_writelane_b32 v5, s2, 3\ns_nop 0\nv_readlane_b32 s4, v5, 4"),
    ),
    "sgpr": (
        "uninitialized",
        "reads s9",
        Body("s_mov_b32 s9, 0\ns_add_u32 s4, s2, s9"),
        Body("s_add_u32 s4, s2, s9"),
    ),
    "vcc": (
        "uninitialized",
        "reads vcc",
        Body("v_cmp_eq_u32 vcc, 0, v0\nv_cndmask_b32 v1, 0, v0, vcc"),
        Body("v_cndmask_b32 v1, 0, v0, vcc"),
    ),
    "lds_word": (
        "uninitialized",
        "reads LDS at 0x8, which nobody wrote",
        Body("v_mov_b32 v1, 8\nds_write_b32 v1, v0\nds_read_b32 v2, v1", lds_bytes=16),
        Body("v_mov_b32 v1, 4\nds_write_b32 v1, v0\nds_read_b32 v2, v1 offset:4", lds_bytes=16),
    ),
}


def test_faults_are_found_and_nothing_else(check_emulator: Emulator, arch: str) -> None:
    bodies = {}
    for name, (_, _, clean, faulty) in _FAULTS.items():
        bodies |= {f"{name}_clean": clean, f"{name}_faulty": faulty}
    findings = run_checked(check_emulator, arch, bodies)
    for name, (kind, text, _, _) in _FAULTS.items():
        assert findings[f"{name}_clean"] == [], name
        found = findings[f"{name}_faulty"]
        assert kinds(found) == [kind], name
        assert text in found[0].message, name


def test_a_finding_says_where(check_emulator: Emulator, arch: str) -> None:
    body = Body("v_lshlrev_b32 v1, 6, v0\nglobal_load_dword v2, v1, s[0:1] offset:64", waves=2)
    (finding,) = run_checked(check_emulator, arch, {"far": body})["far"]
    # 64 bytes a thread: thread 63 is the first to leave the 4096 bytes.
    assert finding.kernel == "far"
    assert finding.address.startswith("far+0x")
    assert finding.instruction.startswith("global_load_dword v2, v1, s[0:1]")
    assert (finding.workgroup, finding.wave, finding.lane) == ((0, 0, 0), 0, 63)
    assert finding.count == 65
    assert "workgroup (0, 0, 0), wave 0, lane 63" in str(finding)


def test_a_kernel_goes_on_after_a_fault(check_emulator: Emulator, arch: str) -> None:
    load = "v_mov_b32 v1, -4\nglobal_load_dword v2, v1, s[0:1]\ns_waitcnt vmcnt(0)"
    code = f"{load}\nv_add_u32 v2, v2, v9"
    found = run_checked(check_emulator, arch, {"two": Body(code)})["two"]
    assert kinds(found) == ["global-bounds", "uninitialized"]


def test_a_loop_gives_one_finding_with_a_count(check_emulator: Emulator, arch: str) -> None:
    code = """s_mov_b32 s4, 10
.Lagain:
v_add_u32 v1, v0, v9
s_sub_u32 s4, s4, 1
s_cmp_lg_u32 s4, 0
s_cbranch_scc1 .Lagain"""
    (finding,) = run_checked(check_emulator, arch, {"loop": Body(code, waves=2)})["loop"]
    assert finding.count == 20


@pytest.mark.parametrize("half", [0, 1])
def test_an_undefined_half_is_no_fault_until_it_is_used(
    check_emulator: Emulator, arch: str, half: int
) -> None:
    # What compilers make of an odd number of floats.
    code = f"v_mov_b32 v{2 + half}, 1.0\nv_pk_add_f32 v[4:5], v[2:3], v[2:3]\nv_mov_b32 v8, v{{}}"
    bodies = {"used": Body(code.format(4 + half)), "undefined": Body(code.format(5 - half))}
    findings = run_checked(check_emulator, arch, bodies)
    assert findings["used"] == []
    assert kinds(findings["undefined"]) == ["uninitialized"]


@pytest.mark.parametrize("half", [0, 1])
def test_an_undefined_pair_is_no_fault_until_it_is_used(
    check_emulator: Emulator, arch: str, half: int
) -> None:
    # What compilers make of a vector of which some elements are undefined.
    code = f"s_mov_b32 s{4 + half}, s2\nv_mov_b64 v[2:3], s[4:5]\nv_mov_b64 v[4:5], v[2:3]\n"
    bodies = {
        "used": Body(f"{code}v_mov_b32 v8, v{4 + half}"),
        "undefined": Body(f"{code}v_mov_b32 v8, v{5 - half}"),
        "nothing_is_defined": Body("v_mov_b64 v[2:3], s[6:7]\nv_mov_b64 v[4:5], v[2:3]"),
        "stored": Body("v_mov_b64 v[4:5], s[6:7]\nglobal_store_dwordx2 v0, v[4:5], s[0:1]"),
    }
    findings = run_checked(check_emulator, arch, bodies)
    assert findings["used"] == findings["nothing_is_defined"] == []
    assert kinds(findings["undefined"]) == kinds(findings["stored"]) == ["uninitialized"]
    assert f"reads v{5 - half}" in findings["undefined"][0].message
