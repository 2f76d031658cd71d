"""The sanitizer: accesses outside of memory, LDS and scratch, and reads of what nobody wrote."""

import pytest
from checked_kernels import BYTES, Body, Fault, check_faults, kinds, run_checked


def _pair(code: str, clean: object, faulty: object, **more: int) -> tuple[Body, Body]:
    """Bodies that differ in the fault alone, in the place of `#`."""
    return Body(code.replace("#", str(clean)), **more), Body(code.replace("#", str(faulty)), **more)


def _unwritten(text: str, first: str, code: str) -> Fault:
    """Bodies with and without the first line, which writes what the others read."""
    return Fault("uninitialized", text, Body(f"{first}\n{code}"), Body(code))


_EXEC_8 = "s_mov_b64 exec, 0xff\nv_mov_b32 v7, 0\n"
_READ_LDS_8 = "v_mov_b32 v1, 0x100\nds_read_b64 v[2:3], v1"
_WRITTEN_LDS_8 = "v_mov_b32 v1, 0x100\nv_mov_b32 v2, 0\nv_mov_b32 v3, 0\nds_write_b64 v1, v[2:3]\n"
_FAULTS = {
    "global_load": Fault(
        "global-bounds",
        "load of 4 bytes",
        *_pair("v_mov_b32 v1, #\nglobal_load_dword v2, v1, s[0:1]", BYTES - 4, BYTES - 3),
    ),
    "global_store": Fault(
        "global-bounds",
        "store of 8 bytes",
        *_pair("v_mov_b32 v1, #\nglobal_store_dwordx2 v1, v[0:1], s[0:1]", BYTES - 8, -4),
    ),
    "scalar_load": Fault(
        "global-bounds",
        "load of 8 bytes",
        *_pair("s_load_dwordx2 s[4:5], s[0:1], #", "0x10", hex(BYTES - 4)),
    ),
    "scratch": Fault(
        "scratch-bounds",
        "private memory",
        *_pair("v_mov_b32 v1, #\nscratch_store_dword v1, v0, off", 12, 16, scratch_bytes=16),
    ),
    # The faulty one is inside of the granule that the hardware allocates.
    "lds_static": Fault(
        "lds-bounds",
        "the workgroup has 0x104 bytes",
        *_pair("v_mov_b32 v1, #\nds_write_b32 v1, v0", "0x100", "0x104", lds_bytes=0x104),
    ),
    "lds_dynamic": Fault(
        "lds-bounds",
        "reads 8 bytes",
        Body(f"{_WRITTEN_LDS_8}ds_read_b64 v[2:3], v1", lds_bytes=0x100, dynamic_lds=8),
        Body(_READ_LDS_8, lds_bytes=0x100, dynamic_lds=4),
    ),
    "vgpr": _unwritten(
        "reads v7, which nobody wrote in 64 of the 64 lanes",
        "v_mov_b32 v7, 0",
        "v_add_u32 v1, v0, v7",
    ),
    "vgpr_in_some_lanes": Fault(
        "uninitialized",
        "reads v7, which nobody wrote in 56 of the 64 lanes",
        *_pair(f"{_EXEC_8}s_mov_b64 exec, #\nv_add_u32 v1, v0, v7", "0xff", -1),
    ),
    "stored_vgpr": _unwritten(
        "reads v5", "v_mov_b32 v5, 0", "v_mov_b32 v1, 0\nglobal_store_dword v1, v5, s[0:1]"
    ),
    "accumulator": _unwritten(
        "reads v1", "v_accvgpr_write_b32 a3, 0", "v_accvgpr_read_b32 v1, a3\nv_add_u32 v2, v0, v1"
    ),
    "moved_to_an_accumulator": _unwritten(
        "reads v1",
        "v_mov_b32 v5, 0",
        "v_accvgpr_write_b32 a3, v5\ns_nop 1\nv_accvgpr_read_b32 v1, a3\nv_add_u32 v2, v0, v1",
    ),
    "readlane": Fault(
        "uninitialized",
        "reads s4",
        *_pair(
            "v_writelane_b32 v5, s2, 3\ns_nop 0\nv_readlane_b32 s4, v5, #\ns_not_b32 s5, s4", 3, 4
        ),
    ),
    "spilled": Fault(
        "uninitialized",
        "reads s4",
        *_pair(
            "v_writelane_b32 v5, #, 3\ns_nop 0\nv_readlane_b32 s4, v5, 3\ns_not_b32 s5, s4",
            "s2",
            "s9",
        ),
    ),
    "spilled_by_a_lane": Fault(
        "uninitialized",
        "reads s9",
        *_pair("v_writelane_b32 v5, #, #", "s2", "s9"),
    ),
    "sgpr": _unwritten("reads s9", "s_mov_b32 s9, 0", "s_add_u32 s4, s2, s9"),
    "vcc": _unwritten("reads vcc", "v_cmp_eq_u32 vcc, 0, v0", "v_cndmask_b32 v1, 0, v0, vcc"),
    "lds_word": Fault(
        "uninitialized",
        "reads LDS at 0x8, which nobody wrote",
        *_pair(
            "v_mov_b32 v2, 8\nv_mov_b32 v1, #\nds_write_b32 v1, v0\nds_read_b32 v2, v2",
            *(8, 4),
            lds_bytes=16,
        ),
    ),
}


def test_faults_are_found_and_nothing_else(check_emulator, arch):
    check_faults(check_emulator, arch, _FAULTS)


def test_a_finding_says_where(check_emulator, arch):
    body = Body("v_lshlrev_b32 v1, 6, v0\nglobal_load_dword v2, v1, s[0:1] offset:64", waves=2)
    (finding,) = run_checked(check_emulator, arch, {"far": body})["far"]
    # 64 bytes a thread: thread 63 is the first to leave the 4096 bytes.
    assert finding.kernel == "far"
    assert finding.address.startswith("far+0x")
    assert finding.instruction.startswith("global_load_dword v2, v1, s[0:1]")
    assert (finding.workgroup, finding.wave, finding.lane) == ((0, 0, 0), 0, 63)
    assert finding.count == 65
    assert "workgroup (0, 0, 0), wave 0, lane 63" in str(finding)


def test_a_kernel_goes_on_after_a_fault(check_emulator, arch):
    load = "v_mov_b32 v1, -4\nglobal_load_dword v2, v1, s[0:1]\ns_waitcnt vmcnt(0)"
    code = f"{load}\nv_add_u32 v2, v2, v9"
    found = run_checked(check_emulator, arch, {"two": Body(code)})["two"]
    assert kinds(found) == ["global-bounds", "uninitialized"]


def test_a_loop_gives_one_finding_with_a_count(check_emulator, arch):
    code = """s_mov_b32 s4, 10
.Lagain:
v_add_u32 v1, v0, v9
s_sub_u32 s4, s4, 1
s_cmp_lg_u32 s4, 0
s_cbranch_scc1 .Lagain"""
    (finding,) = run_checked(check_emulator, arch, {"loop": Body(code, waves=2)})["loop"]
    assert finding.count == 20


@pytest.mark.parametrize("half", [0, 1])
def test_an_undefined_half_is_no_fault_until_it_is_used(check_emulator, arch, half):
    # What compilers make of an odd number of floats.
    code = f"v_mov_b32 v{2 + half}, 1.0\nv_pk_add_f32 v[4:5], v[2:3], v[2:3]\nv_mov_b32 v8, v{{}}"
    bodies = {"used": Body(code.format(4 + half)), "undefined": Body(code.format(5 - half))}
    findings = run_checked(check_emulator, arch, bodies)
    assert findings["used"] == []
    assert kinds(findings["undefined"]) == ["uninitialized"]


@pytest.mark.parametrize("half", [0, 1])
def test_an_undefined_pair_is_no_fault_until_it_is_used(check_emulator, arch, half):
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
