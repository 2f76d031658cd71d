"""The sanitizer: results that are used before the s_waitcnt that covers them."""

import pytest
from checked_kernels import Body, Fault, check_faults, run_checked

_LDS = {"lds_bytes": 1024}
_ADDRESS = "v_lshlrev_b32 v1, 2, v0\n"
_FLAT_ADDRESS = "v_mov_b32 v2, s0\nv_mov_b32 v3, s1\n"
_FILLED_LDS = _ADDRESS + "ds_write_b32 v1, v0\nds_write_b32 v1, v0 offset:256\n"
_TWO_READS = _FILLED_LDS + "ds_read_b32 v2, v1\nds_read_b32 v3, v1 offset:256\n"
_SCALAR = "s_load_dword s4, s[0:1], 0x0"
_TWO_SCALARS = f"{_SCALAR}\ns_load_dword s5, s[0:1], 0x4\n"
_MIXED = f"{_FILLED_LDS}ds_read_b32 v2, v1\n{_SCALAR}\n"
_TWO_LOADS = _ADDRESS + (
    "global_load_dword v2, v1, s[0:1]\nglobal_load_dword v3, v1, s[0:1] offset:256\n"
)


def _fault(text: str, before: str, wait: str, too_little: str, use: str, **more: int) -> Fault:
    """A use behind a wait, and behind one that is none for it."""
    bodies = (
        Body("\n".join([before, *filter(None, [wait]), use]), **more)
        for wait in (f"s_waitcnt {wait}", too_little and f"s_waitcnt {too_little}")
    )
    return Fault("wait-count", text, *bodies)


_STORE = "global_store_dword v1, v0, s[0:1]"
_LOAD_V2 = "global_load_dword v2, v1, s[0:1]"
_USE_V2 = "v_mov_b32 v4, v2"
_READ_V2 = f"{_FILLED_LDS}ds_read_b32 v2, v1"
_FLAT_LOAD = f"{_FLAT_ADDRESS}flat_load_dword v4, v[2:3]"
_FAULTS = {
    "load": _fault("uses v2", _TWO_LOADS, "vmcnt(1)", "", _USE_V2),
    "loads_come_in_order": _fault(
        "uses v3", _TWO_LOADS, "vmcnt(0)", "vmcnt(1)", "v_mov_b32 v4, v3"
    ),
    "stores_count": _fault("uses v2", _TWO_LOADS + _STORE, "vmcnt(2)", "vmcnt(3)", _USE_V2),
    # vmcnt holds no more than 63: behind so many the first has returned.
    "vmcnt_is_full": Fault(
        "wait-count",
        "uses v2",
        *(
            Body("\n".join([_ADDRESS + _LOAD_V2, *[_STORE] * behind, _USE_V2]))
            for behind in (63, 62)
        ),
    ),
    "invalidation_does_not_count": _fault(
        "uses v2", f"{_TWO_LOADS}buffer_inv sc1", "vmcnt(1)", "vmcnt(2)", _USE_V2
    ),
    "as_an_address": _fault(
        "uses v2", _TWO_LOADS, "vmcnt(1)", "", "global_load_dword v4, v2, s[0:1]"
    ),
    # A later load into the same register is in order.
    "overwritten": Fault(
        "wait-count",
        "overwrites v2",
        Body(f"{_TWO_LOADS}{_LOAD_V2} offset:512\ns_waitcnt vmcnt(0)\nv_mov_b32 v2, 0"),
        Body(f"{_TWO_LOADS}v_mov_b32 v2, 0"),
    ),
    "overwritten_by_lds": _fault(
        "overwrites v2", _FILLED_LDS + _LOAD_V2, "vmcnt(0)", "", "ds_read_b32 v2, v1", **_LDS
    ),
    "overwritten_in_any_order": _fault(
        "overwrites s4", _SCALAR, "lgkmcnt(0)", "", "s_load_dword s4, s[0:1], 0x4"
    ),
    "lds": _fault("uses v2", _TWO_READS, "lgkmcnt(1)", "lgkmcnt(2)", _USE_V2, **_LDS),
    "lds_is_not_vmcnt": _fault("uses v2", _READ_V2, "lgkmcnt(0)", "vmcnt(0)", _USE_V2, **_LDS),
    "scalar": _fault("uses s4", _SCALAR, "lgkmcnt(0)", "", "s_mov_b32 s6, s4"),
    "scalar_comes_in_any_order": _fault(
        "uses s4", _TWO_SCALARS, "lgkmcnt(0)", "lgkmcnt(1)", "s_mov_b32 s6, s4"
    ),
    "scalar_as_vector_source": _fault(
        "uses s5", "s_load_dwordx2 s[4:5], s[0:1], 0x0", "lgkmcnt(0)", "", "v_mov_b32 v1, s5"
    ),
    # The scalar load may come first: one outstanding says nothing about the LDS.
    "scalar_does_not_delay_lds": _fault(
        "uses v2", _MIXED, "lgkmcnt(0)", "lgkmcnt(1)", _USE_V2, **_LDS
    ),
    "flat_needs_both": _fault(
        "uses v4", _FLAT_LOAD, "vmcnt(0) lgkmcnt(0)", "vmcnt(0)", "v_mov_b32 v5, v4"
    ),
    "accumulator": _fault(
        "uses a2",
        f"{_ADDRESS}global_load_dword a2, v1, s[0:1]",
        "vmcnt(0)",
        "",
        "v_accvgpr_read_b32 v4, a2",
    ),
}


def test_faults_are_found_and_nothing_else(check_emulator, arch):
    check_faults(check_emulator, arch, _FAULTS)


@pytest.mark.parametrize("outstanding", [0, 1])
def test_the_message_names_the_load(check_emulator, arch, outstanding):
    code = f"{_TWO_LOADS}s_waitcnt vmcnt({outstanding + 1})\nv_mov_b32 v4, v{3 - outstanding}"
    (finding,) = run_checked(check_emulator, arch, {"kernel": Body(code)})["kernel"]
    assert f"`global_load_dword v{3 - outstanding}, v1" in finding.message
    assert "at kernel+0x" in finding.message
    assert "vmcnt" in finding.message
