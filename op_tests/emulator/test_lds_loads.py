"""When loads into LDS land: in the order of issue of all waves, some time after issue.

And when atomic operations take effect: at once, but in random order late and in any order.
"""

from dataclasses import replace

import numpy as np
import pytest
from checked_kernels import Body, memory_after, two_waves

from jitfmha.emulator import Emulator

pytestmark = pytest.mark.usefixtures("default_options")

_LANES = 64
_LOADED = np.arange(1, 2 * _LANES + 1, dtype=np.uint32)
_FIRST_RESULT, _SECOND_RESULT = 1024 // 4, 1280 // 4
# s[4:7] is a buffer of the memory; v1 is 4 times the lane.
_ADDRESSES = """s_mov_b64 s[4:5], s[0:1]
s_mov_b32 s6, 0x1000
s_mov_b32 s7, 0x20000
v_and_b32 v1, 63, v0
v_lshlrev_b32 v1, 2, v1
s_mov_b32 m0, 0"""
_STORE = ["global_store_dword v1, v10, s[0:1] offset:1024"]
_STORE_BOTH = [*_STORE, "global_store_dword v1, v11, s[0:1] offset:1280"]
_LOAD = "buffer_load_dword v1, s[4:7], 0 offen lds"
_LOAD_MORE = "buffer_load_dword v1, s[4:7], 0 offen offset:256 lds"
_READ = "ds_read_b32 {}, v1"
_READ_MORE = "ds_read_b32 {}, v1 offset:256"
_WAIT_FOR_LDS = "s_waitcnt lgkmcnt(0)"


def _spin(label: str, instructions: int) -> str:
    return f"""s_movk_i32 s9, {instructions // 3}
.L{label}:
s_sub_u32 s9, s9, 1
s_cmp_lg_u32 s9, 0
s_cbranch_scc1 .L{label}"""


def _body(first: list[str], second: list[str]) -> Body:
    """Wave 1 reads into v10 and v11."""
    waves = "\n".join(first), "\n".join([*second, *_STORE_BOTH])
    return two_waves(*waves, before=_ADDRESSES, lds_bytes=512)


def _results(emulator: Emulator, arch: str, body: Body) -> tuple[np.ndarray, np.ndarray]:
    """What wave 1 read first and second."""
    memory = memory_after(emulator, arch, body, _LOADED)
    return (
        memory[_FIRST_RESULT : _FIRST_RESULT + _LANES],
        memory[_SECOND_RESULT : _SECOND_RESULT + _LANES],
    )


# Wave 0 does not wait for its load before wave 1 has read; both have a barrier after the load.
_LATER = [_LOAD, "s_barrier", _spin("later", 1200), "s_waitcnt vmcnt(0)"]


def test_a_load_lands_some_time_after_issue(emulator, arch):
    """Not at once, and without any wait of its wave."""
    read = [_READ.format("v10"), _spin("between", 600), _READ.format("v11"), _WAIT_FOR_LDS]
    at_once, later = _results(emulator, arch, _body(_LATER, ["s_barrier", *read]))
    np.testing.assert_array_equal(at_once, np.zeros(_LANES))
    np.testing.assert_array_equal(later, _LOADED[:_LANES])


def test_a_wait_lands_what_other_waves_issued_before(emulator, arch):
    wait = ["s_barrier", _LOAD_MORE, "s_waitcnt vmcnt(0)"]
    read = [_READ.format("v10"), _READ_MORE.format("v11"), _WAIT_FOR_LDS]
    others, own = _results(emulator, arch, _body(_LATER, wait + read))
    np.testing.assert_array_equal(others, _LOADED[:_LANES])
    np.testing.assert_array_equal(own, _LOADED[_LANES:])


def test_a_wait_for_all_but_one_lands_the_older(emulator, arch):
    loads = [_LOAD, _LOAD_MORE, "s_waitcnt vmcnt(1)"]
    read = [_READ.format("v10"), _READ_MORE.format("v11"), _WAIT_FOR_LDS]
    older, newer = _results(emulator, arch, _body([], [*loads, *read]))
    np.testing.assert_array_equal(older, _LOADED[:_LANES])
    np.testing.assert_array_equal(newer, np.zeros(_LANES))


def test_a_wait_lands_nothing_that_was_issued_after(emulator, arch):
    """Wave 1 waits for a load that it issued before wave 0 issued one."""
    first = ["s_barrier", _LOAD, "s_barrier", _spin("end", 1200), "s_waitcnt vmcnt(0)"]
    second = [_LOAD_MORE, "s_barrier", "s_barrier", "s_waitcnt vmcnt(0)"]
    read = [_READ.format("v10"), _READ_MORE.format("v11"), _WAIT_FOR_LDS]
    others, own = _results(emulator, arch, _body(first, second + read))
    np.testing.assert_array_equal(others, np.zeros(_LANES))
    np.testing.assert_array_equal(own, _LOADED[_LANES:])


@pytest.mark.parametrize("waves", [1, 2])
def test_a_wave_has_63_loads_on_their_way(emulator, arch, waves):
    """vmcnt cannot count more: issuing another one waits for the first."""
    for later, is_there in ((62, False), (63, True)):
        loads = [_LOAD, *[_LOAD_MORE] * later]
        first = "\n".join([*loads, _READ.format("v10"), _WAIT_FOR_LDS, *_STORE])
        body = two_waves(first, "\n".join(loads), before=_ADDRESSES, lds_bytes=512)
        loaded, _ = _results(emulator, arch, replace(body, waves=waves))
        np.testing.assert_array_equal(loaded, _LOADED[:_LANES] if is_there else np.zeros(_LANES))


def test_random_order_lands_loads_early_and_late(emulator, arch, seed):
    read = [_READ.format("v10"), _READ.format("v11"), _WAIT_FOR_LDS]
    body = _body(_LATER, ["s_barrier", *read])
    landed = []
    for order in range(seed, seed + 40):
        emulator.set_options(random_order=True, seed=order)
        landed.append(bool(_results(emulator, arch, body)[0].any()))
    # At the barrier, one load in 13 has no latency at all, and most have more than wave 1 runs.
    assert any(landed)
    assert not all(landed)


def test_random_order_keeps_the_order_of_issue(emulator, arch, seed):
    """Where the later load is there, the earlier one is as well."""
    first = [_LOAD, _spin("apart", 30), _LOAD_MORE, "s_barrier", _spin("end", 1200)]
    second = ["s_barrier", _READ_MORE.format("v10"), _READ.format("v11"), _WAIT_FOR_LDS]
    body = _body([*first, "s_waitcnt vmcnt(0)"], second)
    for order in range(seed, seed + 40):
        emulator.set_options(random_order=True, seed=order)
        later, earlier = _results(emulator, arch, body)
        assert earlier.any() or not later.any()


# ---- Atomic operations ---------------------------------------------------------------------------

_COUNTS = 2048 // 4
_ADD = "global_atomic_add v1, v3, s[0:1] offset:2048"
_READ_COUNT = ["global_load_dword v10, v1, s[0:1] offset:2048", "s_waitcnt vmcnt(0)"]


def _counted(emulator: Emulator, arch: str, first: list[str], second: list[str]) -> bool:
    """Whether v10 has what the atomic operation of wave 0 makes; in the end all memory has."""
    body = two_waves(
        "\n".join(first), "\n".join(second), before=_ADDRESSES + "\nv_mov_b32 v3, 7", lds_bytes=512
    )
    memory = memory_after(emulator, arch, body, _LOADED)
    np.testing.assert_array_equal(memory[_COUNTS : _COUNTS + _LANES], np.full(_LANES, 7))
    return bool((memory[_FIRST_RESULT : _FIRST_RESULT + _LANES] == 7).all())


def test_atomic_operations_are_late_in_random_order(emulator, arch, seed):
    """Others see what was waited for, and only sometimes what was not."""
    read = ["s_barrier", *_READ_COUNT, *_STORE]
    seen = []
    for order in range(seed, seed + 40):
        emulator.set_options(random_order=True, seed=order)
        wait = "s_waitcnt vmcnt(0)"
        assert _counted(emulator, arch, [_ADD, wait, "s_barrier"], read)
        seen.append(_counted(emulator, arch, [_ADD, "s_barrier"], read))
    assert any(seen)
    assert not all(seen)
    emulator.set_options()
    assert _counted(emulator, arch, [_ADD, "s_barrier"], read)


def test_a_wave_sees_its_own_atomic_operations(emulator, arch, seed):
    for order in range(seed, seed + 20):
        emulator.set_options(random_order=True, seed=order)
        assert _counted(emulator, arch, [_ADD, *_READ_COUNT, *_STORE], [])
        buffer = ["buffer_load_dword v10, v1, s[4:7], 0 offen offset:2048", "s_waitcnt vmcnt(0)"]
        assert _counted(emulator, arch, [_ADD, *buffer, *_STORE], [])
