"""The sanitizer: races in LDS, loads into LDS, and divergent barriers."""

from __future__ import annotations

from checked_kernels import Body, kinds, run_checked

from jitfmha.emulator import Emulator

# Thread t of two waves writes word t, then reads word t ^ 64: the other wave's.
_EXCHANGE = """v_lshlrev_b32 v1, 2, v0
v_xor_b32 v2, 0x100, v1
ds_write_b32 v1, v0
{before}
ds_read_b32 v3, v2
{after}"""
_BARRIER = "s_waitcnt lgkmcnt(0)\ns_barrier"
# Wave 0 runs `first`, the others `second`.
_BRANCH = """v_readfirstlane_b32 s4, v0
s_cmp_eq_u32 s4, 0
s_cbranch_scc1 .L{name}_first
{second}
s_branch .L{name}_join
.L{name}_first:
{first}
.L{name}_join:"""
# One word, by way of M0, which is where the wave's 64 lanes begin.
_TO_LDS = """s_mov_b32 s4, s0
s_mov_b32 s5, s1
s_mov_b32 s6, 0x1000
s_mov_b32 s7, 0x20000
v_lshlrev_b32 v1, 2, v0
s_mov_b32 m0, 0
s_nop 0
buffer_load_dword v1, s[4:7], 0 offen lds
{wait}
ds_read_b32 v2, v1"""


def _waves(code: str) -> Body:
    return Body(code, waves=2, lds_bytes=512)


def test_races(check_emulator: Emulator, arch: str) -> None:
    overwrite = "s_waitcnt lgkmcnt(0)\n{}\nds_write_b32 v1, v0"
    findings = run_checked(
        check_emulator,
        arch,
        {
            "clean": _waves(_EXCHANGE.format(before=_BARRIER, after="")),
            "no_barrier": _waves(_EXCHANGE.format(before="s_waitcnt lgkmcnt(0)", after="")),
            "no_wait": _waves(_EXCHANGE.format(before="s_barrier", after="")),
            "clean_overwrite": _waves(
                _EXCHANGE.format(before=_BARRIER, after=overwrite.format("s_barrier"))
            ),
            "overwrite": _waves(_EXCHANGE.format(before=_BARRIER, after=overwrite.format(""))),
            "both_write": _waves("v_mov_b32 v1, 0\nds_write_b32 v1, v0"),
            "other_bytes": _waves(
                "v_lshrrev_b32 v1, 6, v0\nds_write_b8 v1, v0"  # byte 0 and byte 1
            ),
            "atomics": _waves("v_mov_b32 v1, 0\nds_add_u32 v1, v0"),
        },
    )
    assert findings["clean"] == []
    # Wave 0 reads what wave 1 writes later; wave 1 reads what wave 0 wrote.
    assert kinds(findings["no_barrier"]) == ["uninitialized", "lds-race", "lds-race"]
    written, read = (finding.message for finding in findings["no_barrier"][1:])
    assert "which wave 0 read, without a barrier between" in written
    assert "which wave 0 wrote by `ds_write_b32 v1, v0`" in read
    assert "without a barrier between" in read
    assert kinds(findings["no_wait"]) == ["lds-race"]
    assert "that comes after the s_waitcnt for it" in findings["no_wait"][0].message
    assert findings["clean_overwrite"] == []
    # Wave 1 reads too late and writes too early.
    assert kinds(findings["overwrite"]) == ["lds-race", "lds-race"]
    assert "which wave 0 wrote" in findings["overwrite"][0].message
    assert "which wave 0 read" in findings["overwrite"][1].message
    assert kinds(findings["both_write"]) == ["lds-race"]
    assert findings["other_bytes"] == []
    # Nobody set the word before; the two additions are no race.
    assert kinds(findings["atomics"]) == ["uninitialized"]


def test_loads_into_lds_need_vmcnt(check_emulator: Emulator, arch: str) -> None:
    def body(wait: str) -> Body:
        return Body(_TO_LDS.format(wait=wait), lds_bytes=256)

    findings = run_checked(
        check_emulator,
        arch,
        {"clean": body("s_waitcnt vmcnt(0)"), "faulty": body("s_waitcnt lgkmcnt(0)")},
    )
    assert findings["clean"] == []
    assert kinds(findings["faulty"]) == ["wait-count"]
    assert "before an s_waitcnt covers `buffer_load_dword" in findings["faulty"][0].message


def test_divergent_barriers(check_emulator: Emulator, arch: str) -> None:
    def body(name: str, first: str, second: str) -> Body:
        return Body(_BRANCH.format(name=name, first=first, second=second), waves=2)

    findings = run_checked(
        check_emulator,
        arch,
        {
            "together": body("together", "s_barrier", "s_nop 0\ns_barrier"),
            "first_only": body("first_only", "s_barrier\ns_barrier", "s_barrier"),
            "second_only": body("second_only", "s_nop 0", "s_barrier"),
        },
    )
    assert findings["together"] == []
    assert kinds(findings["first_only"]) == ["barrier"]
    assert findings["first_only"][0].wave == 0
    assert "barrier number 2, but wave 1 has ended after 1" in findings["first_only"][0].message
    assert kinds(findings["second_only"]) == ["barrier"]
    assert findings["second_only"][0].wave == 1
