"""The sanitizer: results that are used before the s_waitcnt that covers them."""

from __future__ import annotations

import pytest
from checked_kernels import Body, kinds, run_checked

from jitfmha.emulator import Emulator

_LDS = {"lds_bytes": 1024}
_ADDRESS = "v_lshlrev_b32 v1, 2, v0\n"
_FLAT_ADDRESS = "v_mov_b32 v2, s0\nv_mov_b32 v3, s1\n"
_FILLED_LDS = _ADDRESS + "ds_write_b32 v1, v0\nds_write_b32 v1, v0 offset:256\n"
_TWO_READS = _FILLED_LDS + "ds_read_b32 v2, v1\nds_read_b32 v3, v1 offset:256\n"
_TWO_SCALARS = "s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\n"
_MIXED = _FILLED_LDS + "ds_read_b32 v2, v1\ns_load_dword s4, s[0:1], 0x0\n"
_TWO_LOADS = _ADDRESS + (
    "global_load_dword v2, v1, s[0:1]\nglobal_load_dword v3, v1, s[0:1] offset:256\n"
)

# name: (what the message names, clean, faulty)
_FAULTS = {
    "load": (
        "uses v2",
        Body(_TWO_LOADS + "s_waitcnt vmcnt(1)\nv_mov_b32 v4, v2"),
        Body(_TWO_LOADS + "v_mov_b32 v4, v2"),
    ),
    "loads_come_in_order": (
        "uses v3",
        Body(_TWO_LOADS + "s_waitcnt vmcnt(0)\nv_mov_b32 v4, v3"),
        Body(_TWO_LOADS + "s_waitcnt vmcnt(1)\nv_mov_b32 v4, v3"),
    ),
    "stores_count": (
        "uses v2",
        Body(
            _TWO_LOADS + "global_store_dword v1, v0, s[0:1]\ns_waitcnt vmcnt(2)\nv_mov_b32 v4, v2"
        ),
        Body(
            _TWO_LOADS + "global_store_dword v1, v0, s[0:1]\ns_waitcnt vmcnt(3)\nv_mov_b32 v4, v2"
        ),
    ),
    "invalidation_does_not_count": (
        "uses v2",
        Body(_TWO_LOADS + "buffer_inv sc1\ns_waitcnt vmcnt(1)\nv_mov_b32 v4, v2"),
        Body(_TWO_LOADS + "buffer_inv sc1\ns_waitcnt vmcnt(2)\nv_mov_b32 v4, v2"),
    ),
    "as_an_address": (
        "uses v2",
        Body(_TWO_LOADS + "s_waitcnt vmcnt(1)\nglobal_load_dword v4, v2, s[0:1]"),
        Body(_TWO_LOADS + "global_load_dword v4, v2, s[0:1]"),
    ),
    "overwritten": (
        "overwrites v2",
        # A later load into the same register is in order.
        Body(
            _TWO_LOADS
            + "global_load_dword v2, v1, s[0:1] offset:512\ns_waitcnt vmcnt(0)\nv_mov_b32 v2, 0"
        ),
        Body(_TWO_LOADS + "v_mov_b32 v2, 0"),
    ),
    "overwritten_by_lds": (
        "overwrites v2",
        Body(
            _FILLED_LDS
            + "global_load_dword v2, v1, s[0:1]\ns_waitcnt vmcnt(0)\nds_read_b32 v2, v1",
            **_LDS,
        ),
        Body(_FILLED_LDS + "global_load_dword v2, v1, s[0:1]\nds_read_b32 v2, v1", **_LDS),
    ),
    "lds": (
        "uses v2",
        Body(_TWO_READS + "s_waitcnt lgkmcnt(1)\nv_mov_b32 v4, v2", **_LDS),
        Body(_TWO_READS + "s_waitcnt lgkmcnt(2)\nv_mov_b32 v4, v2", **_LDS),
    ),
    "lds_is_not_vmcnt": (
        "uses v2",
        Body(_FILLED_LDS + "ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v4, v2", **_LDS),
        Body(_FILLED_LDS + "ds_read_b32 v2, v1\ns_waitcnt vmcnt(0)\nv_mov_b32 v4, v2", **_LDS),
    ),
    "scalar": (
        "uses s4",
        Body("s_load_dword s4, s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\ns_mov_b32 s6, s4"),
        Body("s_load_dword s4, s[0:1], 0x0\ns_mov_b32 s6, s4"),
    ),
    "scalar_comes_in_any_order": (
        "uses s4",
        Body(_TWO_SCALARS + "s_waitcnt lgkmcnt(0)\ns_mov_b32 s6, s4"),
        Body(_TWO_SCALARS + "s_waitcnt lgkmcnt(1)\ns_mov_b32 s6, s4"),
    ),
    "scalar_as_vector_source": (
        "uses s5",
        Body("s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v1, s5"),
        Body("s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_mov_b32 v1, s5"),
    ),
    "scalar_does_not_delay_lds": (
        "uses v2",
        Body(_MIXED + "s_waitcnt lgkmcnt(0)\nv_mov_b32 v4, v2", **_LDS),
        # The scalar load may come first: one outstanding says nothing about the LDS.
        Body(_MIXED + "s_waitcnt lgkmcnt(1)\nv_mov_b32 v4, v2", **_LDS),
    ),
    "flat_needs_both": (
        "uses v4",
        Body(
            _FLAT_ADDRESS
            + "flat_load_dword v4, v[2:3]\ns_waitcnt vmcnt(0) lgkmcnt(0)\nv_mov_b32 v5, v4"
        ),
        Body(_FLAT_ADDRESS + "flat_load_dword v4, v[2:3]\ns_waitcnt vmcnt(0)\nv_mov_b32 v5, v4"),
    ),
    "accumulator": (
        "uses a2",
        Body(
            _ADDRESS
            + "global_load_dword a2, v1, s[0:1]\ns_waitcnt vmcnt(0)\nv_accvgpr_read_b32 v4, a2"
        ),
        Body(_ADDRESS + "global_load_dword a2, v1, s[0:1]\nv_accvgpr_read_b32 v4, a2"),
    ),
}


def test_faults_are_found_and_nothing_else(check_emulator: Emulator, arch: str) -> None:
    bodies = {}
    for name, (_, clean, faulty) in _FAULTS.items():
        bodies |= {f"{name}_clean": clean, f"{name}_faulty": faulty}
    findings = run_checked(check_emulator, arch, bodies)
    for name, (text, _, _) in _FAULTS.items():
        assert findings[f"{name}_clean"] == [], name
        found = findings[f"{name}_faulty"]
        assert kinds(found) == ["wait-count"], name
        assert text in found[0].message, name


@pytest.mark.parametrize("outstanding", [0, 1])
def test_the_message_names_the_load(check_emulator: Emulator, arch: str, outstanding: int) -> None:
    code = f"{_TWO_LOADS}s_waitcnt vmcnt({outstanding + 1})\nv_mov_b32 v4, v{3 - outstanding}"
    (finding,) = run_checked(check_emulator, arch, {"kernel": Body(code)})["kernel"]
    assert f"`global_load_dword v{3 - outstanding}, v1" in finding.message
    assert "at kernel+0x" in finding.message
    assert "vmcnt" in finding.message
