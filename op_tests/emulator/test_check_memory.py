"""The sanitizer: accesses outside of memory, LDS and scratch, and reads of what nobody wrote."""

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
_STORE = "global_store_dword v0, v{}, s[0:1]"
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
        _STORE.format(7),
    ),
    "vgpr_in_some_lanes": Fault(
        "uninitialized",
        "reads v7, which nobody wrote in 56 of the 64 lanes",
        *_pair(f"{_EXEC_8}s_mov_b64 exec, #\n{_STORE.format(7)}", "0xff", -1),
    ),
    "second_register": _unwritten(
        "reads v9", "v_mov_b32 v9, 0", "v_mov_b32 v8, 0\nglobal_store_dwordx2 v0, v[8:9], s[0:1]"
    ),
    "address": _unwritten("reads v7", "v_mov_b32 v7, 0", "global_load_dword v1, v7, s[0:1]"),
    "lds_address": Fault(
        "uninitialized",
        "reads v7",
        *_pair("v_mov_b32 v#, 0\nds_write_b32 v7, v0", 7, 8, lds_bytes=4),
    ),
    "scalar_address": _unwritten(
        "reads s5", "s_mov_b32 s5, 0", "s_mov_b32 s4, 0\ns_load_dword s6, s[0:1], s5"
    ),
    "atomic": _unwritten(
        "reads v7", "v_mov_b32 v7, 0", "v_mov_b32 v1, 0\nglobal_atomic_add v1, v7, s[0:1]"
    ),
    "matrix_product": _unwritten(
        "reads v7",
        "v_mov_b32 v7, 0",
        "v_mov_b32 v6, 0\ns_nop 1\nv_mfma_f32_16x16x16_f16 v[8:11], v[6:7], v[6:7], 0",
    ),
    "accumulator": _unwritten(
        "reads v1",
        "v_accvgpr_write_b32 a3, 0",
        f"s_nop 1\nv_accvgpr_read_b32 v1, a3\n{_STORE.format(1)}",
    ),
    "computed": _unwritten(
        "reads v2",
        "v_mov_b32 v7, 0",
        f"v_add_u32 v1, v0, v7\nv_mul_f32 v2, v1, v1\n{_STORE.format(2)}",
    ),
    "readlane": Fault(
        "uninitialized",
        "reads s4",
        *_pair(
            "v_writelane_b32 v5, s2, 3\ns_nop 0\nv_readlane_b32 s4, v5, #\ns_mov_b32 s5, 0\n"
            "s_nop 4\ns_load_dword s6, s[0:1], s4",
            *(3, 4),
        ),
    ),
    "spilled": Fault(
        "uninitialized",
        "reads v6",
        *_pair(
            "v_writelane_b32 v5, #, 3\ns_nop 0\nv_readlane_b32 s4, v5, 3\n"
            f"s_nop 1\nv_mov_b32 v6, s4\n{_STORE.format(6)}",
            "s2",
            "s9",
        ),
    ),
    "spilled_by_a_lane": Fault(
        "uninitialized",
        "reads s9",
        *_pair("v_writelane_b32 v5, #, #", "s2", "s9"),
    ),
    "branch": _unwritten(
        "reads scc", "s_mov_b32 s9, 0", "s_cmp_eq_u32 s9, 0\ns_cbranch_scc1 1f\n1:"
    ),
    "branch_by_lanes": _unwritten(
        "reads vcc", "v_mov_b32 v7, 0", "v_cmp_eq_u32 vcc, 0, v7\ns_cbranch_vccz 1f\n1:"
    ),
    "lanes_that_run": _unwritten(
        "gives exec", "v_mov_b32 v7, 0", "v_cmp_eq_u32 vcc, 0, v7\ns_and_saveexec_b64 s[4:5], vcc"
    ),
    "sgpr": _unwritten(
        "reads v1", "s_mov_b32 s9, 0", f"s_add_u32 s4, s2, s9\nv_mov_b32 v1, s4\n{_STORE.format(1)}"
    ),
    "vcc": _unwritten(
        "reads v1", "v_cmp_eq_u32 vcc, 0, v0", f"v_cndmask_b32 v1, 0, v0, vcc\n{_STORE.format(1)}"
    ),
    "scratch_word": Fault(
        "uninitialized",
        "reads v2",
        *_pair(
            "v_mov_b32 v7, 0\nscratch_store_dword off, v#, off\nscratch_load_dword v2, off, off\n"
            f"s_waitcnt vmcnt(0)\n{_STORE.format(2)}",
            *(7, 8),
            scratch_bytes=16,
        ),
    ),
    "lds_of_undefined": Fault(
        "uninitialized",
        "reads v3",
        *_pair(
            "v_mov_b32 v7, 0\nv_lshlrev_b32 v1, 3, v0\nds_write2_b32 v1, v0, v# offset1:1\n"
            "ds_read_b64 v[2:3], v1\ns_waitcnt lgkmcnt(0)\n"
            "global_store_dwordx2 v1, v[2:3], s[0:1]",
            *(7, 8),
            lds_bytes=512,
        ),
    ),
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


# Instructions in which v7, s9 and what else nobody wrote reach one of two registers.
_HARMLESS = {
    "a_copy": """v_mov_b32 v4, v0
        v_mov_b32 v5, v7""",
    "a_product": """v_mov_b32 v4, v0
        v_mul_f32 v5, v7, v7""",
    # What compilers make of an odd number of floats.
    "half_of_a_pair": """v_mov_b32 v2, 1.0
        v_pk_add_f32 v[4:5], v[2:3], v[2:3]""",
    "other_half_of_a_pair": """v_mov_b32 v3, 1.0
        v_pk_add_f32 v[2:3], v[2:3], v[2:3]
        v_mov_b32 v4, v3
        v_mov_b32 v5, v2""",
    "half_that_is_not_read": """v_mov_b64 v[2:3], 0
        s_mov_b32 s4, 1.0
        v_pk_mul_f32 v[4:5], v[2:3], s[4:5] op_sel_hi:[1,0]
        v_pk_mul_f32 v[2:3], v[2:3], s[4:5]
        v_mov_b32 v5, v3""",
    "half_of_a_scalar_pair": """s_mov_b32 s4, s2
        v_mov_b64 v[2:3], s[4:5]
        v_mov_b64 v[4:5], v[2:3]""",
    "upper_half_of_a_sum": """v_mov_b32 v2, 0
        v_mad_u64_u32 v[4:5], vcc, v0, v0, v[2:3]""",
    "what_is_not_chosen": """v_mov_b32 v1, 0
        v_cmp_gt_u32 vcc, 64, v0
        v_cndmask_b32 v4, v7, v1, vcc
        v_cndmask_b32 v5, v1, v7, vcc""",
    "what_a_scalar_does_not_choose": """s_cmp_eq_u32 s2, s2
        s_cselect_b32 s4, s2, s9
        s_cselect_b32 s5, s9, s2
        v_mov_b32 v4, s4
        v_mov_b32 v5, s5""",
    "what_a_mask_hides": """s_and_b32 s4, s9, 0
        s_and_b32 s5, s9, 1
        v_mov_b32 v4, s4
        v_mov_b32 v5, s5""",
    "a_field_beside_it": """s_mov_b32 s8, s2
        s_bfe_i64 s[4:5], s[8:9], 0x200000
        v_mov_b32 v4, s5
        s_bfe_u64 s[4:5], s[8:9], 0x20001f
        v_mov_b32 v5, s4""",
    "private_memory": """scratch_store_dwordx2 off, v[6:7], off
        v_mov_b32 v6, 0
        scratch_store_dword off, v6, off
        scratch_load_dwordx2 v[4:5], off, off
        s_waitcnt vmcnt(0)""",
    "lds": """v_lshlrev_b32 v1, 3, v0
        v_mov_b32 v6, 0
        ds_write_b64 v1, v[6:7]
        ds_read2_b32 v[4:5], v1 offset1:1
        s_waitcnt lgkmcnt(0)""",
    "lds_in_two_stores": """v_lshlrev_b32 v1, 3, v0
        ds_write2_b32 v1, v0, v7 offset1:1
        ds_read2_b32 v[4:5], v1 offset1:1
        s_waitcnt lgkmcnt(0)""",
    "an_exchange": """v_mov_b32 v6, 0
        v_swap_b32 v6, v7
        v_mov_b32 v4, v7
        v_mov_b32 v5, v6""",
}
# The upper 32 lanes of v7 are undefined; these are the lanes of v4 that are not.
_LANES = {
    "a_rotation": (
        "s_nop 1\nv_mov_b32_dpp v4, v7 wave_ror:1 row_mask:0xf bank_mask:0xf",
        0x1FFFFFFFE,
    ),
    "a_gather": (
        """v_lshlrev_b32 v1, 2, v0
        v_add_u32 v1, 64, v1
        ds_bpermute_b32 v4, v1, v7
        s_waitcnt lgkmcnt(0)""",
        0xFFFF00000000FFFF,
    ),
    "a_swizzle": (
        "ds_swizzle_b32 v4, v7 offset:swizzle(SWAP,16)\ns_waitcnt lgkmcnt(0)",
        0xFFFFFFFF,
    ),
}


def test_what_is_undefined_does_no_harm_where_it_is_not_used(check_emulator, arch):
    bodies = {
        f"{name}_v{register}": Body(
            f"{code}\n{_STORE.format(register)}", lds_bytes=512, scratch_bytes=16
        )
        for name, code in _HARMLESS.items()
        for register in (4, 5)
    }
    for name, findings in run_checked(check_emulator, arch, bodies).items():
        assert kinds(findings) == ["uninitialized"] * name.endswith("v5"), name


def test_undefined_lanes_are_followed(check_emulator, arch):
    bodies = {}
    for name, (code, defined) in _LANES.items():
        before = f"s_mov_b64 exec, 0xffffffff\nv_mov_b32 v7, 0\ns_mov_b64 exec, -1\n{code}\n"
        for lanes in (defined, ~defined):
            halves = (lanes & 0xFFFFFFFF, lanes >> 32 & 0xFFFFFFFF)
            store = f"s_mov_b32 exec_lo, {halves[0]:#x}\ns_mov_b32 exec_hi, {halves[1]:#x}\n"
            bodies[f"{name}_{'un' * (lanes < 0)}defined"] = Body(before + store + _STORE.format(4))
    findings = run_checked(check_emulator, arch, bodies)
    for name in _LANES:
        assert findings[f"{name}_defined"] == [], name
        (finding,) = findings[f"{name}_undefined"]
        assert "in 32 of the 32 lanes" in finding.message, name


def test_a_finding_says_what_it_began_with(check_emulator, arch):
    code = f"v_add_u32 v1, v0, v7\nv_mul_f32 v2, v1, v1\n{_STORE.format(2)}"
    (finding,) = run_checked(check_emulator, arch, {"kernel": Body(code)})["kernel"]
    assert finding.instruction.startswith("global_store_dword")
    assert "; that began with `v_add_u32_e32 v1, v0, v7` at kernel+0x" in finding.message


def test_a_kernel_goes_on_after_a_fault(check_emulator, arch):
    load = "v_mov_b32 v1, -4\nglobal_load_dword v2, v1, s[0:1]\ns_waitcnt vmcnt(0)"
    code = f"{load}\nv_add_u32 v2, v2, v9\n{_STORE.format(2)}"
    found = run_checked(check_emulator, arch, {"two": Body(code)})["two"]
    assert kinds(found) == ["global-bounds", "uninitialized"]


def test_a_loop_gives_one_finding_with_a_count(check_emulator, arch):
    code = """s_mov_b32 s4, 10
.Lagain:
global_store_dword v0, v9, s[0:1]
s_sub_u32 s4, s4, 1
s_cmp_lg_u32 s4, 0
s_cbranch_scc1 .Lagain"""
    (finding,) = run_checked(check_emulator, arch, {"loop": Body(code, waves=2)})["loop"]
    assert finding.count == 20
