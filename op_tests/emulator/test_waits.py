"""Workgroups that wait for each other, by the cost model: until the store and a round trip.

How often a workgroup polls here depends on how workgroups take turns, and so on the workers. What a
launch is estimated to take must not.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from launches import assembled, kernel_text, launch_code

from jitfmha.emulator import Emulator, emulate
from jitfmha.emulator.estimate import Estimate, Event, TimedWorkgroup, Timing, estimate_launch
from jitfmha.emulator.profile import LaunchProfile, set_profile_options, take_profiles
from jitfmha.emulator.rates import rates_of, rates_of_chip

_WORKERS = (1, 2, 4)
_LOAD = "global_load_dword v4, v1, s[4:5] sc1"
# How a workgroup looks at the flag, whose address is s[4:5]; v1 is 0 and v2 is 1.
_LOOKS = {
    "load": _LOAD,
    "sleep": f"s_sleep 1\n{_LOAD}",
    "add": "v_mov_b32 v3, 0\nglobal_atomic_add v4, v1, v3, s[4:5] sc0",
    "swap": "v_mov_b32 v6, 1\nv_mov_b32 v7, 1\nglobal_atomic_cmpswap v4, v1, v[6:7], s[4:5] sc0",
    "barrier": f"{_LOAD}\ns_waitcnt vmcnt(0)\ns_barrier",
}
_STORE = "global_store_dword v1, v2, s[4:5] sc1"
_ADD = "global_atomic_add v1, v2, s[4:5]"


def _kernel(work: Mapping[int, int], store: str, look: str, wanted: int) -> str:
    """Those of `work` add up so often and store; others wait for the flag to be `wanted`."""
    lines = ["s_load_dwordx2 s[4:5], s[0:1], 0", "v_mov_b32 v1, 0", "v_mov_b32 v2, 1"]
    lines += ["s_mov_b64 exec, 1", "s_waitcnt lgkmcnt(0)"]
    lines += [f"s_cmp_eq_u32 s2, {place}\ns_cbranch_scc1 .Lproduce{place}" for place in work]
    lines += [".Lconsume:", look, "s_waitcnt vmcnt(0)", "v_readfirstlane_b32 s6, v4"]
    lines += [f"s_cmp_lg_u32 s6, {wanted}", "s_cbranch_scc1 .Lconsume", "s_endpgm"]
    for place, times in work.items():
        lines += [f".Lproduce{place}:", *["v_add_f32 v3, v3, v3"] * times, store, "s_endpgm"]
    return kernel_text("waits", "\n".join(lines), vgprs=16)


# Of a wave that would wait for ever: minutes, so that a busy machine does not get there.
_BUDGET = 200_000_000


def _profile(
    profiler: Emulator,
    arch: str,
    text: str,
    workgroups: int,
    flag: np.ndarray | None = None,
    **options: int,
) -> LaunchProfile:
    flag = np.zeros(64, np.uint32) if flag is None else flag
    with profiler.keep_options():
        profiler.set_options(**{"instruction_budget": _BUDGET, **options})
        take_profiles(profiler.library)
        launch_code(profiler, arch, assembled(arch, text), "waits", workgroups, 64, flag)
        (profile,) = take_profiles(profiler.library)
    return profile


def _same_with_all_workers(profiler: Emulator, arch: str, text: str, workgroups: int) -> Estimate:
    profiles = [_profile(profiler, arch, text, workgroups, threads=n) for n in _WORKERS]
    estimates = [profile.estimate() for profile in profiles]
    assert estimates[0] is not None
    assert estimates == estimates[:1] * len(_WORKERS)
    assert len({str(profile.work) for profile in profiles}) == 1
    return estimates[0]


@pytest.mark.parametrize("look", _LOOKS)
def test_a_wait_lasts_until_the_store_and_a_round_trip(profiler, arch, look, seed):
    draw = random.Random(seed)
    rates = rates_of(arch)
    latency = rates["global_latency"]
    # Producers' places decide whether it has stored here when the others look for the first time.
    works, cycles = [draw.randrange(1000, 5000) for _ in range(3)], []
    for place, work in zip((0, draw.randrange(1, 5), 5), works, strict=True):
        text = _kernel({place: work}, _STORE, _LOOKS[look], 1)
        estimate = _same_with_all_workers(profiler, arch, text, 6)
        cycles.append(estimate.cycles)
        assert 0 < estimate.waiting < 1
    # Every addition counts, and what is left is the same: beginning, store, load, end. All of these
    # have 20 instructions at most, of which one is a scalar load, one sleeps, one is a barrier and
    # two branch; memory is asked for the flag once, which takes a line of L1, L2 or the atomics.
    rest = {c - rates["valu"] * work for c, work in zip(cycles, works, strict=True)}
    assert len(rest) == 1
    least = latency + rates["scalar_latency"]
    most = 20 * rates["issue"] + 64 + rates["barrier"] + 2 * rates["branch"]
    most += rates["l1_line"] + rates["global_line"] + rates["atomic_line"]
    assert least < rest.pop() <= least + most


def test_a_counter_is_waited_for_until_all_have_added(profiler, arch, seed):
    """Whoever is the last one here, on the chip it is the one that works longest."""
    draw = random.Random(seed)
    rates = rates_of(arch)
    work = {place: draw.randrange(100, 1000) for place in draw.sample(range(8), 5)}
    cycles = []
    for longest in work:
        text = _kernel(work | {longest: 2000}, _ADD, _LOAD, len(work))
        cycles.append(_same_with_all_workers(profiler, arch, text, 8).cycles)
    # The launch does not end with the longest one: others look for its addition afterwards.
    latencies = rates["global_latency"] + rates["scalar_latency"]
    assert min(cycles) > 2000 * rates["valu"] + latencies


# How one that counts does it, with v2 as the count.
_COUNTS = {"store": _STORE, "add": "v_mov_b32 v6, 1\nglobal_atomic_add v1, v6, s[4:5]"}


def _counting(count: str, place: int, each: int, counts: int, wait: str, works: int) -> str:
    """The workgroup at `place` counts while it works; the other one waits for a count, and works.

    With one worker all counts are there before the other one looks, or none of them.
    """
    lines = ["s_load_dwordx2 s[4:5], s[0:1], 0", "v_mov_b32 v1, 0", "s_mov_b64 exec, 1"]
    lines += ["s_waitcnt lgkmcnt(0)", f"s_cmp_eq_u32 s2, {place}", "s_cbranch_scc1 .Lcount", wait]
    lines += [*["v_add_f32 v3, v3, v3"] * works, "s_endpgm", ".Lcount:"]
    for n in range(1, counts + 1):
        lines += [*["v_add_f32 v3, v3, v3"] * each, f"v_mov_b32 v2, {n}", _COUNTS[count]]
    return kernel_text("waits", "\n".join(lines), vgprs=16)


@pytest.mark.sample("place", [0, 1], 1)
@pytest.mark.parametrize("count", _COUNTS)
def test_of_a_count_that_goes_on_the_first_one_that_is_enough_is_waited_for(
    profiler, arch, count, place, seed
):
    draw = random.Random(seed)
    rates = rates_of(arch)
    counts, each = 12, 300
    works = (counts + 2) * each  # so that it ends last, whatever it waits for
    cycles = {}
    for wanted in draw.sample(range(1, counts + 1), 3):
        wait = f"""
            .Lwait:
            {_LOAD}
            s_waitcnt vmcnt(0)
            v_readfirstlane_b32 s6, v4
            s_cmp_lt_u32 s6, {wanted}
            s_cbranch_scc1 .Lwait
        """
        text = _counting(count, place, each, counts, wait, works)
        cycles[wanted] = _same_with_all_workers(profiler, arch, text, 2).cycles
    for wanted, taken in cycles.items():
        rest = taken - rates["valu"] * (wanted * each + works)
        # As in the test of a round trip, and two instructions at most for each count.
        least = rates["global_latency"] + rates["scalar_latency"]
        most = (20 + 2 * wanted) * rates["issue"] + 2 * rates["branch"]
        most += rates["l1_line"] + rates["global_line"] + rates["atomic_line"]
        assert least < rest <= least + most


def test_a_kernel_computes_the_same_whatever_is_tried_for_its_waits(profiler, arch, seed):
    """The one that waits finds the last count, and would have gone on after an earlier one."""
    counts = 12
    wanted = random.Random(seed).randrange(1, counts)
    wait = f"""
        s_mov_b32 s7, 0
        .Lwait:
        {_LOAD}
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s6, v4
        s_cmp_lt_u32 s6, {wanted}
        s_cbranch_scc1 .Lwait
        s_add_u32 s7, s7, 1
        v_mov_b32 v5, s6
        v_mov_b32 v6, s7
        global_store_dwordx3 v1, v[4:6], s[4:5] offset:4
    """
    flag = np.zeros(64, np.uint32)
    _profile(profiler, arch, _counting("store", 0, 1, counts, wait, 0), 2, flag, threads=1)
    # As polled, as read from there, and how often the instruction behind the loop ran.
    assert flag[:4].tolist() == [counts, counts, counts, 1]


@pytest.mark.sample("place", [0, 1], 1)
@pytest.mark.parametrize("count", _COUNTS)
def test_a_look_before_the_loop_spares_a_wait_where_it_comes_late_enough(
    profiler, arch, count, place, seed
):
    """Whether it did here depends on the workers; what counts is when it looks on the chip."""
    draw = random.Random(seed)
    rates = rates_of(arch)
    counts, each = 12, 300
    works, wanted = (counts + 2) * each, draw.randrange(2, counts - 1)
    cycles = []
    # The look begins half of the work of a count before the count is there, or behind it.
    for before in (0, wanted * each - each // 2, wanted * each + each // 2):
        wait = f"""
            {"v_add_f32 v3, v3, v3;" * before}
            {_LOAD}
            s_waitcnt vmcnt(0)
            v_mov_b32 v5, v4
            .Lwait:
            v_readfirstlane_b32 s6, v5
            s_cmp_ge_u32 s6, {wanted}
            s_cbranch_scc1 .Lgoes_on
            global_load_dword v5, v1, s[4:5] sc1
            s_waitcnt vmcnt(0)
            s_branch .Lwait
            .Lgoes_on:
        """.replace(";", "\n")
        text = _counting(count, place, each, counts, wait, works)
        taken = _same_with_all_workers(profiler, arch, text, 2).cycles
        cycles.append(taken - rates["valu"] * works)
    latency, issue = rates["global_latency"], rates["issue"]
    least = rates["scalar_latency"] + latency
    most = (30 + 2 * wanted) * issue + 3 * rates["branch"]
    most += rates["l1_line"] + rates["global_line"] + rates["atomic_line"]
    early, in_vain, in_time = cycles
    stored = rates["valu"] * wanted * each
    assert least < early - stored <= least + most
    # Who looks in vain comes to the loop when the count is there, and looks again.
    half = rates["valu"] * (each // 2)
    assert least < in_vain - max(stored, stored - half + latency) <= least + most
    assert least < in_time - (stored + half) <= least + most


def test_a_flag_that_is_reset_is_waited_for_after_the_own_reset(profiler, arch, seed):
    """It was set before, too, which is not what the second wait is for."""
    draw = random.Random(seed)
    rates = rates_of(arch)
    works = [draw.randrange(1000, 3000) for _ in range(3)]
    wait = """
        .Lwait{0}:
        global_load_dword v4, v1, s[4:5] sc1
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s6, v4
        s_cmp_lg_u32 s6, {1}
        s_cbranch_scc1 .Lwait{0}
    """
    work = ["v_add_f32 v3, v3, v3\n" * times for times in works]
    text = kernel_text(
        "waits",
        f"""
        s_load_dwordx2 s[4:5], s[0:1], 0
        v_mov_b32 v1, 0
        v_mov_b32 v2, 1
        s_mov_b64 exec, 1
        s_waitcnt lgkmcnt(0)
        s_cmp_eq_u32 s2, 0
        s_cbranch_scc1 .Lsets
        {wait.format(0, 1)}
        global_store_dword v1, v1, s[4:5] sc1
        {wait.format(1, 1)}
        {work[2]}
        s_endpgm
        .Lsets:
        {work[0]}
        {_STORE}
        {wait.format(2, 0)}
        {work[1]}
        {_STORE}
        """,
        vgprs=16,
    )
    taken = _same_with_all_workers(profiler, arch, text, 2).cycles
    rest = taken - rates["valu"] * sum(works)
    # Three waits, one after the other.
    assert rest > 3 * rates["global_latency"] + rates["scalar_latency"]


def test_a_lock_is_waited_for_until_its_last_owner_has_left(profiler, arch, seed):
    """Whoever takes it first, the others work one after the other.

    An owner sleeps for longer than its turn, so that others ask in vain here with one worker, too.
    """
    work, count = random.Random(seed).randrange(5000, 6000), 4
    text = kernel_text(
        "waits",
        f"""
        s_load_dwordx2 s[4:5], s[0:1], 0
        v_mov_b32 v1, 0
        v_mov_b32 v6, 1
        v_mov_b32 v7, 0
        s_mov_b64 exec, 1
        s_waitcnt lgkmcnt(0)
        .Lwait:
        global_atomic_cmpswap v4, v1, v[6:7], s[4:5] sc0
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s6, v4
        s_cmp_lg_u32 s6, 0
        s_cbranch_scc1 .Lwait
        {"s_sleep 0;" * work}
        global_store_dword v1, v1, s[4:5] sc1
        """.replace(";", "\n"),
        vgprs=16,
    )
    rates = rates_of(arch)
    taken = _same_with_all_workers(profiler, arch, text, count).cycles
    rest = taken - rates["scalar_latency"] - count * rates["issue"] * work
    # Each asks for the lock once, and what it does besides takes less than another time would.
    assert count * rates["global_latency"] < rest < 2 * count * rates["global_latency"]


def test_a_flag_is_waited_for_where_others_share_its_line(profiler, arch):
    """The second flag of a cache line is in L2 when it is polled, as the first one was."""
    look = """
    .Lfirst:
      global_load_dword v4, v1, s[4:5] offset:4 sc1
      s_waitcnt vmcnt(0)
      v_readfirstlane_b32 s6, v4
      s_cmp_lg_u32 s6, 1
      s_cbranch_scc1 .Lfirst
    """
    store = "global_store_dword v1, v2, s[4:5] offset:4 sc1\n" + _STORE
    plain = _kernel({0: 3000}, store, _LOAD, 1)
    twice = plain.replace(".Lconsume:", f"{look}.Lconsume:")
    one, two = (_same_with_all_workers(profiler, arch, text, 2).cycles for text in (plain, twice))
    rates = rates_of(arch)
    assert rates["global_latency"] < two - one < rates["global_latency"] + rates["l1_latency"]


def test_a_chain_of_waits(profiler, arch):
    """Workgroup n works, waits for n + 1 and stores: they work at once, and then wait in turn."""
    count, work = 12, 500
    text = kernel_text(
        "waits",
        f"""
        s_load_dwordx2 s[4:5], s[0:1], 0
        v_mov_b32 v2, 1
        s_mov_b64 exec, 1
        s_lshl_b32 s7, s2, 2
        v_mov_b32 v1, s7
        s_waitcnt lgkmcnt(0)
        {"v_add_f32 v3, v3, v3;" * work}
        s_cmp_eq_u32 s2, {count - 1}
        s_cbranch_scc1 .Lstore
        .Lwait:
        global_load_dword v4, v1, s[4:5] offset:4 sc1
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s6, v4
        s_cmp_lg_u32 s6, 1
        s_cbranch_scc1 .Lwait
        .Lstore:
        {_STORE}
        """.replace(";", "\n"),
        vgprs=16,
    )
    rates = rates_of(arch)
    estimate = _same_with_all_workers(profiler, arch, text, count)
    hops = (estimate.cycles - rates["valu"] * work - rates["scalar_latency"]) / count
    # A hop is a load, and up to eight instructions until the store; the last one ends with its own.
    most = 8 * rates["issue"] + 2 * rates["branch"] + rates["l1_line"] + rates["global_line"]
    assert rates["global_latency"] < hops <= rates["global_latency"] + most


def test_a_loop_that_waits_for_nobody_keeps_its_iterations(profiler, arch):
    """What it polls no other workgroup has stored; it ends by its counter."""
    times = 37
    body = f"""
        s_load_dwordx2 s[4:5], s[0:1], 0
        v_mov_b32 v1, 0
        s_mov_b32 s6, {times}
        s_waitcnt lgkmcnt(0)
        .Lloop:
        {_LOAD}
        s_waitcnt vmcnt(0)
        s_sub_u32 s6, s6, 1
        s_cmp_lg_u32 s6, 0
        s_cbranch_scc1 .Lloop
    """
    profile = _profile(profiler, arch, kernel_text("waits", body, vgprs=16), 2)
    estimate = profile.estimate()
    assert estimate is not None
    assert estimate.waiting == 0
    assert profile.work.global_memory == 2 * times
    (loop,) = profile.loops
    assert loop.iterations == 2 * times
    assert estimate.cycles > times * rates_of(arch)["global_latency"] / 10
    few = _profile(profiler, arch, kernel_text("waits", body.replace("37", "36"), vgprs=16), 2)
    assert few.work.count() == profile.work.count() - 2 * 5


def test_all_workgroups_run_where_some_wait_for_others(profiler):
    """A sample without the workgroup that stores would never end."""
    text = _kernel({90: 10}, _STORE, _LOAD, 1)
    take_profiles(profiler.library)
    set_profile_options(profiler.library, sample=4, run_sample_only=True)
    try:
        profile = _profile(profiler, "gfx942", text, 100, instruction_budget=1_000_000)
    finally:
        set_profile_options(profiler.library)
    assert len(profile.timed) == profile.ended_workgroups == 100


def test_a_fault_at_a_flag_ends_the_launch(profiler):
    text = _kernel({0: 10}, "global_store_dword v1, v2, s[4:5] offset:1024 sc1", _LOAD, 1)
    for _ in range(2):  # the second time there has been a run
        with pytest.raises(RuntimeError, match="outside of all memory"):
            _profile(profiler, "gfx942", text, 4, instruction_budget=1_000_000)
        with emulate("gfx942", profile=True) as run:
            assert run.profiles() == (), "a run has those of launches before it"


# ---- On the chip ---------------------------------------------------------------------------------


def _scheduled(
    workgroups: Sequence[tuple[int, Sequence[Event]]], units: int, launched: int = 0
) -> Estimate | None:
    timed = [
        TimedWorkgroup(
            n, (n, 0, 0), 1, Timing(1, cycles, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {}), "", tuple(events)
        )
        for n, (cycles, events) in enumerate(workgroups)
    ]
    return estimate_launch(
        timed,
        grid=(len(timed), 1, 1),
        workgroups=launched or len(timed),
        compute_units=units,
        xcds=1,
        xcd_engines=1,
        workgroups_per_unit=1,
        chip=rates_of_chip("MI300X"),
        line_bytes=128,
    )


_STORES = (1000, [Event(900, 7, ())])
_WAITS = (500, [Event(100, -1, (7,))])
_WAITS_BEHIND_IT = Event(950, -1, (7,), look=3, poll_cycles=70)


def _look_at(cycles: int) -> Event:
    return Event(cycles, -1, (), look=3)


@pytest.mark.parametrize(
    ("workgroups", "units", "cycles"),
    [
        ([_STORES, _WAITS], 2, 1300),
        ([_WAITS, _STORES], 2, 1300),
        # Whoever comes late does not wait.
        ([_STORES, _WAITS], 1, 1500),
        # Others have to wait for the unit, too.
        ([_STORES, _WAITS, (400, [])], 2, 1400),
        ([_STORES, _WAITS, (400, []), (400, [])], 2, 1700),
        # The last of the stores counts, and each wait begins where the one before has ended.
        ([_STORES, (300, [Event(200, 8, ())]), (500, [Event(100, -1, (7, 8))])], 3, 1300),
        (
            [_STORES, (500, [Event(100, -1, (7,)), Event(200, 8, ())]), (50, [Event(0, -1, (8,))])],
            3,
            1300,
        ),
        # A look at 890 is too early, one at 910 is not, whenever the wait itself comes.
        ([_STORES, (1200, [_look_at(890), _WAITS_BEHIND_IT])], 2, 1200 + 70),
        ([_STORES, (1200, [_look_at(910), _WAITS_BEHIND_IT])], 2, 1200),
        # It is there when the workgroup gets to it, which waits elsewhere before.
        (
            [
                _STORES,
                (300, [Event(250, 8, ())]),
                (1000, [Event(100, -1, (8,)), _look_at(740), _WAITS_BEHIND_IT]),
            ],
            3,
            1220,
        ),
    ],
)
def test_where_workgroups_wait_on_the_chip(workgroups, units, cycles):
    estimate = _scheduled(workgroups, units)
    assert estimate is not None
    assert estimate.cycles == cycles


def test_waiting_is_a_share_of_the_time_of_workgroups():
    estimate = _scheduled([_STORES, _WAITS], 2)
    assert estimate is not None
    assert estimate.waiting == pytest.approx(800 / (1000 + 500 + 800))


def test_whom_nobody_makes_room_for_is_waited_for_in_vain():
    assert _scheduled([_WAITS, _STORES], 1) is None


def test_assumed_workgroups_wait_for_those_launched_with_them():
    estimate = _scheduled([_STORES, _WAITS], 2, launched=6)
    assert estimate is not None
    # Each store comes 900 cycles after its workgroup's begin, whoever has stored before.
    assert estimate.cycles == 3300
