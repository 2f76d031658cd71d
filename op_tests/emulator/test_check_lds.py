"""The sanitizer: races in LDS, loads into LDS, and divergent barriers."""

from checked_kernels import Body, check_findings, kinds, run_checked, two_waves

# Thread t of two waves writes word t, then reads word t ^ 64: the other wave's.
_EXCHANGE = """v_lshlrev_b32 v1, 2, v0
v_xor_b32 v2, 0x100, v1
ds_write_b32 v1, v0
{before}
ds_read_b32 v3, v2
{after}"""
_BARRIER = "s_waitcnt lgkmcnt(0)\ns_barrier"
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


_UNWRITTEN = ("uninitialized", "which nobody wrote")
_READ = ("lds-race", "which wave 0 read, without a barrier between")
_WRITTEN = ("lds-race", "which wave 0 wrote by `ds_write_b32 v1, v0`")
_TOO_EARLY = ("lds-race", "that comes after the s_waitcnt for it")


def test_races(check_emulator, arch):
    wait, overwrite = "s_waitcnt lgkmcnt(0)", "s_waitcnt lgkmcnt(0)\n{}\nds_write_b32 v1, v0"
    exchanges = {
        "clean": (_BARRIER, "", []),
        # Wave 0 reads what wave 1 writes later; wave 1 reads what wave 0 wrote.
        "no_barrier": (wait, "", [_UNWRITTEN, _READ, _WRITTEN]),
        "no_wait": ("s_barrier", "", [_TOO_EARLY]),
        "clean_overwrite": (_BARRIER, overwrite.format("s_barrier"), []),
        # Wave 1 reads too late and writes too early.
        "overwrite": (_BARRIER, overwrite.format(""), [_WRITTEN, _READ]),
    }
    others = {
        "both_write": ("v_mov_b32 v1, 0\nds_write_b32 v1, v0", [_WRITTEN]),
        # Byte 0 and byte 1.
        "other_bytes": ("v_lshrrev_b32 v1, 6, v0\nds_write_b8 v1, v0", []),
        # Nobody set the word before; the two additions are no race.
        "atomics": ("v_mov_b32 v1, 0\nds_add_u32 v1, v0", [_UNWRITTEN]),
    }
    # Both waves write what the thread's place in its wave says, and may read their own.
    equal = "v_and_b32 v2, 63, v0\nv_lshlrev_b32 v1, 2, v2\nds_write_b32 v1, v2\n{}"
    read = "s_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1"
    others |= {
        "equal": (equal.format(f"{_BARRIER}\n{read}"), []),
        "equal_of_its_own": (equal.format(read), []),
        "equal_again": (equal.format(f"{_BARRIER}\n{read}\n{_BARRIER}\nds_write_b32 v1, v2"), []),
        "equal_halves": (
            "v_and_b32 v2, 63, v0\nv_lshlrev_b32 v1, 1, v2\nds_write_b16 v1, v2",
            [],
        ),
        # The second wave adds 1 to one of the words.
        "one_is_different": (
            equal.format("").replace(
                "ds_write",
                "v_lshrrev_b32 v3, 6, v0\nv_cmp_eq_u32 vcc, 5, v2\n"
                "v_cndmask_b32 v3, 0, v3, vcc\nv_add_u32 v2, v2, v3\nds_write",
            ),
            [("lds-race", "writes LDS at 0x14, which wave 0 wrote")],
        ),
    }
    cases = {
        name: (_waves(_EXCHANGE.format(before=before, after=after)), found)
        for name, (before, after, found) in exchanges.items()
    }
    cases |= {name: (_waves(code), found) for name, (code, found) in others.items()}
    # Both waves have read what the first one writes.
    read = "ds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\n"
    first = f"ds_write_b32 v1, v1\n{_BARRIER}\n{read}" + "s_nop 0\n" * 16 + "ds_write_b32 v1, v1"
    body = two_waves(first, f"s_barrier\n{read}", before="v_mov_b32 v1, 0", lds_bytes=512)
    cases["second_reader"] = (body, [("lds-race", "which wave 1 read")])
    # The first wave reads its own when the second one has written the same.
    first = "ds_write_b32 v1, v1\n" + "s_nop 0\n" * 16 + read
    body = two_waves(first, "ds_write_b32 v1, v1", before="v_mov_b32 v1, 0", lds_bytes=512)
    cases["equal_before_its_own"] = (body, [])
    body = two_waves(
        "ds_write_b32 v1, v1", "ds_add_u32 v1, v1", before="v_mov_b32 v1, 0", lds_bytes=512
    )
    cases["one_atomic"] = (body, [("lds-race", "which wave 0 wrote")])
    check_findings(check_emulator, arch, cases)


def test_loads_into_lds_need_vmcnt(check_emulator, arch):
    def body(wait: str) -> Body:
        return Body(_TO_LDS.format(wait=wait), lds_bytes=256)

    fault = ("wait-count", "before an s_waitcnt covers `buffer_load_dword")
    cases = {
        "clean": (body("s_waitcnt vmcnt(0)"), []),
        "faulty": (body("s_waitcnt lgkmcnt(0)"), [fault]),
    }
    check_findings(check_emulator, arch, cases)


# Both waves load the same 256 bytes to the same place; `offset` moves what the second wave loads.
_BOTH_LOAD = """s_mov_b64 s[4:5], s[0:1]
s_mov_b32 s6, 0x1000
s_mov_b32 s7, 0x20000
v_and_b32 v1, 63, v0
v_lshlrev_b32 v1, 2, v1
v_mov_b32 v2, v1
v_lshrrev_b32 v3, 6, v0
v_mad_u32_u24 v2, v3, {offset}, v2
s_mov_b32 m0, 0
s_nop 0
buffer_load_dword v2, s[4:7], 0 offen lds
{after}"""
_READ_LOADED = "ds_read_b32 v4, v1\ns_waitcnt lgkmcnt(0)\n"


def test_waves_may_load_the_same_bytes(check_emulator, arch):
    def body(after: str, offset: int = 0) -> Body:
        return Body(_BOTH_LOAD.format(offset=offset, after=after), waves=2, lds_bytes=256)

    wait, barrier = "s_waitcnt vmcnt(0)\n", "s_barrier\n"
    again = "buffer_load_dword v2, s[4:7], 0 offen lds\n"
    race = ("lds-race", "which wave 0 wrote by `buffer_load_dword")
    cases = {
        "same": (body(wait + barrier + _READ_LOADED), []),
        # Each wave reads what it loaded itself.
        "same_read_without_a_barrier": (body(wait + _READ_LOADED), []),
        "same_again": (body(wait + barrier + _READ_LOADED + again + wait), []),
        "other_bytes": (body(wait + barrier + _READ_LOADED, offset=4), [race]),
    }
    check_findings(check_emulator, arch, cases)
    too_early = body(barrier + _READ_LOADED + wait)
    bodies = {"read": too_early, "written": body(wait + "ds_write_b32 v1, v0")}
    findings = run_checked(check_emulator, arch, bodies)
    assert "wait-count" in kinds(findings["read"])
    assert "lds-race" in kinds(findings["written"])


# The other wave's word by way of a generic address, where the aperture of LDS begins with a
# register's upper half.
_FLAT_EXCHANGE = """s_mov_b64 s[4:5], src_shared_base
v_lshlrev_b32 v1, 2, v0
v_xor_b32 v6, 0x100, v1
v_mov_b32 v2, v1
v_mov_b32 v3, s5
flat_store_dword v[2:3], v0
{wait}
s_barrier
ds_read_b32 v4, v6
s_waitcnt vmcnt(0) lgkmcnt(0)"""


def test_a_barrier_publishes_flat_stores_to_lds(check_emulator, arch):
    """They are in LDS when lgkmcnt says so; vmcnt says nothing about LDS."""

    def body(wait: str) -> Body:
        return _waves(_FLAT_EXCHANGE.format(wait=wait))

    cases = {
        "both": (body("s_waitcnt vmcnt(0) lgkmcnt(0)"), []),
        "lds_only": (body("s_waitcnt lgkmcnt(0)"), []),
        "memory_only": (body("s_waitcnt vmcnt(0)"), [_TOO_EARLY]),
        "none": (body(""), [_TOO_EARLY]),
    }
    check_findings(check_emulator, arch, cases)


def test_divergent_barriers(check_emulator, arch):
    bodies = {
        "together": two_waves("s_barrier", "s_nop 0\ns_barrier"),
        "first_only": two_waves("s_barrier\ns_barrier", "s_barrier"),
        "second_only": two_waves("s_nop 0", "s_barrier"),
    }
    findings = run_checked(check_emulator, arch, bodies)
    found = {name: [(each.kind, each.wave) for each in findings[name]] for name in bodies}
    expected = {"together": [], "first_only": [("barrier", 0)], "second_only": [("barrier", 1)]}
    assert found == expected
    assert "barrier number 2, but wave 1 has ended after 1" in findings["first_only"][0].message
