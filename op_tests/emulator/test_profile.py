"""The cost model: exact counts, the costs of accesses, and what the timing must satisfy."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launches import assembled, kernel_text, launch_code
from models.profile import banks_of, cache_lines, lds_cycles
from programs import LANES, Segment, run

from jitfmha.cli import main
from jitfmha.emulator import Emulator
from jitfmha.emulator.profile import LaunchProfile, Loop, set_profile_options, take_profiles
from jitfmha.jit.toolchain.device_compiler import compile_hip

Profile = Callable[..., LaunchProfile]

_LDS_BYTES = 65536


def _taken(profiler: Emulator, launch: Callable[..., object], *what: Any, **more: Any) -> Any:
    """The profile of a launch."""
    take_profiles(profiler.library)
    launch(profiler, *what, **more)
    (taken,) = take_profiles(profiler.library)
    return taken


@pytest.fixture
def profile(profiler: Emulator, device: int) -> Profile:
    def of_segment(code: str, inputs: Mapping[str, Any] | None = None, **more: Any) -> Any:
        segment = Segment(code, inputs or {}, [])
        return _taken(profiler, run, device, [segment], lds_bytes=_LDS_BYTES, **more)

    return of_segment


def _loop(body: str, times: int, *, counter: str = "s4", label: str = "loop") -> str:
    return f"""
        s_mov_b32 {counter}, {times}
        .L{label}:
        {body}
        s_sub_u32 {counter}, {counter}, 1
        s_cmp_lg_u32 {counter}, 0
        s_cbranch_scc1 .L{label}
    """


def _lines(*lines: str) -> str:
    return "\n".join(lines)


def _only_loop(profile: LaunchProfile) -> Loop:
    (loop,) = profile.loops
    return loop


# ---- Counts --------------------------------------------------------------------------------------


def test_counts_of_a_loop_are_exact(profile, arch):
    body = _lines(
        "v_add_f32 v0, v1, v2",
        "v_pk_mul_f32 v[4:5], v[6:7], v[8:9]",
        "v_exp_f32 v3, v1",
        "v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]",
        "v_mfma_f32_16x16x16_f16 a[16:19], v[0:1], v[2:3], a[16:19]",
        "ds_read_b32 v10, v20",
        "s_waitcnt lgkmcnt(0)",
        "s_barrier",
    )
    taken = profile(_loop(body, 7), {"v20": np.zeros(LANES, np.uint32)})
    loop = _only_loop(taken)
    assert loop.iterations == 7
    assert loop.iterations_of_waves == (7,)
    assert (loop.depth, loop.outer) == (1, None)
    transcendental = 8 if arch == "gfx950" else 16
    for work, times in ((loop.work, 7), (loop.work_of_waves[0], 7), (loop.code, 1)):
        assert work.matrix == 2 * times
        assert work.valu == 3 * times
        assert work.count("transcendental") == times
        assert work.count("lds") == times
        assert work.count("barrier") == times
        assert work.count("waitcnt") == times
        assert work.count("salu") == 2 * times
        assert work.count("branch") == times
        assert work.count() == 11 * times
        assert work.matrix_cycles == (32 + 16) * times
        assert work.valu_cycles == (4 + 4 + transcendental) * times
    # Every lane reads the same dword.
    assert loop.work.lds_bytes == 7 * 4 * LANES
    assert loop.work.lds_conflict_cycles == 0


def test_nested_loops_have_their_own_counts(profile):
    inner = _loop("v_add_f32 v0, v1, v2", 3, counter="s5", label="inner")
    taken = profile(_loop(f"v_mul_f32 v0, v1, v2\n{inner}", 5))
    outer, within = taken.loops
    assert (outer.iterations, within.iterations) == (5, 15)
    assert (outer.depth, within.depth, within.outer) == (1, 2, 0)
    assert outer.work.valu == 5
    assert within.work.valu == 15
    assert outer.code.valu == 2


def test_a_branch_that_is_not_taken_back_is_no_loop(profile):
    assert profile(_loop("v_add_f32 v0, v1, v2", 1)).loops == ()


_SUM = """
extern "C" __global__ void scale(float* x, float factor, int turns) {
  const int i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
  float value = x[i];
  for (int turn = 0; turn < turns * ((int)__builtin_amdgcn_workgroup_id_x() + 1); ++turn)
    value = value * factor + 1.0f;
  x[i] = value;
}
"""


def _launch_sum(profiler: Emulator, arch: str, workgroups: int) -> LaunchProfile:
    # From the beginning of a cache line.
    x = np.ones(256 * workgroups + 32, np.float32)
    x = x[-x.ctypes.data % 128 // 4 :][: 256 * workgroups]
    code = compile_hip(_SUM, arch)
    return _taken(profiler, launch_code, arch, code, "scale", workgroups, 256, x, 0.5, 10)


@contextmanager
def _options(profiler: Emulator, **options: int) -> Iterator[None]:
    set_profile_options(profiler.library, **options)
    try:
        yield
    finally:
        set_profile_options(profiler.library)


def test_waves_and_workgroups_add_up(profiler, arch):
    one = _launch_sum(profiler, arch, 1)
    many = _launch_sum(profiler, arch, 6)
    assert len(one.work_of_waves) == len(many.work_of_waves) == 4
    assert one.work.count() == sum(work.count() for work in one.work_of_waves)
    # Workgroup 0 does the same in both; the others have longer loops.
    assert one.work_of_waves == many.work_of_waves
    assert many.work.global_memory == 6 * one.work.global_memory
    assert many.work.cache_lines == 6 * one.work.cache_lines == 6 * 2 * 4 * 2
    assert many.work.global_bytes == 6 * 2 * 1024
    assert many.ended_workgroups == many.selected_workgroups == many.launched_workgroups == 6


def test_another_workgroup_can_be_looked_at(profiler):
    first = _launch_sum(profiler, "gfx942", 4)
    with _options(profiler, looked_at=3, assumed_workgroups=10_000):
        last = _launch_sum(profiler, "gfx942", 4)
    assert last.looked_at == 3
    assert last.workgroups == 10_000
    assert first.work == last.work
    assert last.work_of_waves[0].valu > first.work_of_waves[0].valu
    estimate = last.estimate()
    assert estimate is not None
    assert last.timing is not None
    assert estimate.rounds == -(-10_000 // (304 * last.timing.workgroups))


def test_too_many_instructions_are_not_timed(profiler):
    with _options(profiler, most_steps=8):
        taken = _launch_sum(profiler, "gfx942", 1)
    assert taken.timing is None
    assert taken.estimate() is None
    assert "more than 8 instructions" in str(taken)


def test_the_plain_variant_does_not_profile(emulator):
    with pytest.raises(RuntimeError, match="keeps no profiles"):
        take_profiles(emulator.library)
    with pytest.raises(RuntimeError, match="keeps no profiles"):
        set_profile_options(emulator.library)


# ---- Costs of accesses ---------------------------------------------------------------------------

_WIDTHS = {"b32": 4, "b64": 8, "b128": 16}


def test_bank_conflicts(profile, arch, seed):
    random = np.random.default_rng(seed)
    lanes = np.arange(LANES)
    patterns = {
        "consecutive": lambda width: lanes * width,
        "one": lambda width: np.zeros(LANES, int),
        "rows": lambda width: lanes * 256 % _LDS_BYTES,
        "padded": lambda width: lanes * (256 + width),
        "halves": lambda width: lanes % 32 * width + lanes // 32 * 4096,
        "random": lambda width: random.integers(0, _LDS_BYTES // width, LANES) * width,
    }
    code, inputs, expected = [], {}, []
    for name, width in _WIDTHS.items():
        last = width // 4 - 1
        data = "v8" if last == 0 else f"v[8:{8 + last}]"
        for pattern in patterns.values():
            addresses = pattern(width)
            register = f"v{20 + len(inputs)}"
            inputs[register] = addresses.astype(np.uint32)
            code += [f"ds_read_{name} {data}, {register}", f"ds_write_{name} {register}, {data}"]
            for is_read in (True, False):
                cycles = lds_cycles(arch, addresses.tolist(), width, is_read=is_read)
                expected.append((width, cycles))
    # A loop of one instruction each, because loops have counts of their own.
    loops = [_loop(line, 2, label=f"loop{i}") for i, line in enumerate(code)]
    taken = profile(_lines(*loops), inputs)
    for line, loop, (width, cycles) in zip(code, taken.loops, expected, strict=True):
        assert loop.work.lds_bytes == 2 * width * LANES, line
        assert loop.work.lds_cycles == 2 * cycles, line
        banks = banks_of(arch, is_read="read" in line)
        least = max(1, LANES * width // (4 * banks))
        assert loop.work.lds_conflict_cycles == 2 * (cycles - least), line
    assert taken.conflicts[0].lds_conflict_cycles == max(
        loop.work.lds_conflict_cycles for loop in taken.loops
    )


def test_two_addresses_are_two_accesses(profile, arch):
    lanes = np.arange(LANES, dtype=np.uint32)
    body = "ds_read2_b32 v[8:9], v20 offset1:64"
    work = _only_loop(profile(_loop(body, 2), {"v20": lanes * 4})).work
    assert work.lds_bytes == 2 * 8 * LANES
    assert work.lds_cycles == 2 * 2 * lds_cycles(arch, (lanes * 4).tolist(), 4, is_read=True)
    assert work.lds_conflict_cycles == 0


def test_cache_lines(profile, seed):
    memory = np.zeros(1 << 14, np.uint32)
    random = np.random.default_rng(seed)
    base = memory.ctypes.data
    code, inputs, expected = [], {"s[8:9]": base}, []
    for width, name in ((4, "dword"), (8, "dwordx2"), (16, "dwordx4")):
        data = "v8" if width == 4 else f"v[8:{7 + width // 4}]"
        # Lanes 64 bytes apart also end where lines do.
        begins = (4 * random.integers(0, 8), 64 - width)
        for stride, begin in itertools.product((width, 64, 256), begins):
            offsets = np.arange(LANES) * stride + begin
            register = f"v{20 + len(inputs)}"
            inputs[register] = offsets.astype(np.uint32)
            code.append(f"global_load_{name} {data}, {register}, s[8:9]")
            # What a launch may touch counts as aligned, wherever the host has it.
            expected.append((width, cache_lines(offsets.tolist(), width)))
    loops = [_loop(line, 2, label=f"loop{i}") for i, line in enumerate(code)]
    taken = profile(_lines(*loops), inputs, memory=[memory])
    for line, loop, (width, lines) in zip(code, taken.loops, expected, strict=True):
        assert loop.work.global_bytes == 2 * width * LANES, line
        assert loop.work.cache_lines == 2 * lines, line


# ---- Timing --------------------------------------------------------------------------------------


def _cycles(profile: Profile, body: str, inputs: Mapping[str, Any] | None = None) -> float:
    """Of one repetition, by the difference of 60 and 20 in a row."""
    cycles = []
    for times in (20, 60):
        timing = profile(_lines(*[body] * times), inputs).timing
        assert timing is not None
        cycles.append(timing.cycles)
    return (cycles[1] - cycles[0]) / 40


_MFMA = "v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]"
_VALU = "v_add_f32 v10, v11, v12"


# The model's numbers once more, as the ISA documents, published measurements and the fit have them.
_RATES = {
    "issue": 4, "valu": 4, "transcendental": 16, "matrix_pass": 4, "matrix_read": 8,
    "matrix_result": 12, "packed_after_matrix": 12, "lds_read_banks": 32, "lds_write_banks": 32,
    "lds_latency": 96, "scalar_latency": 200, "line_bytes": 128, "l1_bytes": 32768, "l1_ways": 64,
    "l1_line": 2, "l1_latency": 120, "global_line": 2, "global_latency": 600, "hbm_latency": 1000,
    "atomic_line": 20, "queue": 64, "barrier": 48, "branch": 16,
}  # fmt: skip
_RATES_OF_GFX950 = _RATES | {"transcendental": 8, "matrix_result": 16}
_RATES_OF_GFX950 |= {"lds_read_banks": 64}


def test_rates(profile, arch):
    expected = _RATES if arch == "gfx942" else _RATES_OF_GFX950
    assert profile("s_nop 0").rates == expected


def test_rates_of_one_wave(profile, arch):
    """What is measured, against numbers that do not come from the profile."""
    transcendental, matrix_result, lds_cycles_of_read = (
        (8, 16, 1) if arch == "gfx950" else (16, 12, 2)
    )
    lines = np.arange(LANES, dtype=np.uint32)
    packed = "v_pk_mul_f32 v[10:11], v[12:13], v[14:15]"
    short = "v_mfma_f32_4x4x4_16b_f16 a[32:35], v[0:1], v[2:3], a[32:35]"
    cases = [
        (_VALU, 4, 4),
        ("v_exp_f32 v10, v11", transcendental, 4),
        (_MFMA, 32, 4),
        (_lines(_MFMA, *[_VALU] * 6), 32, 4),  # VALU work of six slots is hidden
        (_lines(_MFMA, *[_VALU] * 20), 88, 4),  # the VALU is the longer one
        (_lines(_MFMA, "v_accvgpr_read_b32 v10, a16"), 32, 4),
        (_lines(_MFMA, "v_accvgpr_read_b32 v10, a0"), 36 + matrix_result, 4),
        ("s_nop 7", 32, 4),
        ("s_barrier", 48, 4),
        (_lines("ds_read_b32 v10, v20", "s_waitcnt lgkmcnt(0)"), 100 + lds_cycles_of_read, 4),
        (_lines("s_load_dword s10, s[84:85], 0x0", "s_waitcnt lgkmcnt(0)"), 200 + 4, 4),
        (_lines(_MFMA, *["v_mul_f32 v10, v12, v14"] * 2), 32, 1),
        # Packed float32 is behind 32 cycles of matrix work, and 12 more.
        (_lines(_MFMA, packed), 48, 1),
        (_lines(_MFMA, *[packed] * 5), 64, 1),
        # Without matrix work it does twice as much in the same time.
        (packed, 4, 0.5),
        # A matrix instruction keeps vector ones back while it reads.
        (_lines(short, _VALU), 12, 1),
        (_lines(short, "s_mov_b32 s4, 0"), 8, 1),
    ]
    for body, expected, tolerance in cases:
        # The model runs in steps of an issue slot.
        cycles = _cycles(profile, body, {"v20": lines * 4})
        assert cycles == pytest.approx(expected, abs=tolerance), body


@pytest.fixture
def cycles_with_memory(profile: Profile) -> Callable[..., int]:
    """Of code with 64 KiB of memory at s[8:9], whose lanes' dwords v20 are, without the rest."""
    memory = np.zeros(1 << 14, np.uint32)
    memory = memory[-memory.ctypes.data % 128 // 4 :]
    inputs = {"s[8:9]": memory.ctypes.data, "v20": np.arange(LANES, dtype=np.uint32) * 4}

    def cycles(*code: str) -> int:
        timings = []
        for body in ((), code):
            timing = profile(_lines(*body), inputs, memory=[memory]).timing
            assert timing is not None
            timings.append(timing.cycles)
        return timings[1] - timings[0]

    return cycles


# The lanes of each load have two lines, of their own.
_LOADS = [f"global_load_dword v8, v20, s[8:9] offset:{256 * i}" for i in range(8)]
_WAIT = "s_waitcnt vmcnt(0)"


def test_latency_is_paid_once_when_loads_are_in_flight_together(cycles_with_memory):
    one_by_one = cycles_with_memory(*[line for load in _LOADS for line in (load, _WAIT)])
    together = cycles_with_memory(*_LOADS, _WAIT)
    assert one_by_one == pytest.approx(8 * 1000, rel=0.05)
    assert together == pytest.approx(1000, rel=0.15)


def test_l1_has_what_was_loaded_before(cycles_with_memory):
    misses = cycles_with_memory(*_LOADS, _WAIT)
    again = cycles_with_memory(*_LOADS, _WAIT, _LOADS[0], _WAIT) - misses
    assert again == pytest.approx(120, abs=12)
    # A line that is on its way is waited for, not asked for twice.
    assert cycles_with_memory(_LOADS[0], _LOADS[0], _WAIT) == pytest.approx(1000, rel=0.05)


def test_l1_has_room_for_32_kib(cycles_with_memory):
    def around(kib: int) -> str:
        """One wave's loads of so much memory."""
        one = _lines(_LOADS[0], "v_add_u32 v20, 0x100, v20")
        return _lines(*[one] * (4 * kib), _WAIT, f"v_subrev_u32 v20, {1024 * kib:#x}, v20")

    one, other = (
        cycles_with_memory(around(kib), _LOADS[0], _WAIT) - cycles_with_memory(around(kib))
        for kib in (30, 34)
    )
    assert one == pytest.approx(120, abs=12)
    # HBM brought it once; now it is in L2.
    assert other == pytest.approx(600, abs=12)


# Workgroups of one wave read the memory at s[8:9] from where they begin on, 256 bytes a time, which
# are two lines.
_READERS = """
  s_load_dwordx2 s[8:9], s[0:1], 0x0
  v_lshlrev_b32 v20, 2, v0
  s_mul_i32 s3, s2, {apart}
  v_add_u32 v20, v20, s3
  s_waitcnt lgkmcnt(0)
  {loads}
  s_waitcnt vmcnt(0)
  s_endpgm"""
_READS = 600
_STREAMED = {"gfx942": 128 * 304 * 2.1e9 / 4.3e12, "gfx950": 128 * 256 * 2.4e9 / 6.91e12}


@pytest.fixture
def cycles_of_readers(profiler: Emulator, arch: str) -> Callable[..., tuple[float, float]]:
    """Of each workgroup of a launch that fills the chip, and of its loads alone."""

    def cycles(
        *, shared: bool, behind_each: str = "", before: str = "", scope: str = ""
    ) -> tuple[float, float]:
        units = 304 if arch == "gfx942" else 256
        of_one = 64 * (_READS + 1)
        memory = np.zeros(of_one * (1 if shared else units), np.uint32)
        load = f"global_load_dword v8, v20, s[8:9] {scope}"
        step = _lines(load, "v_add_u32 v20, 0x100, v20", behind_each)
        timings = []
        for reads in (_READS, 0):
            body = _READERS.format(
                apart=0 if shared else 4 * of_one, loads=_lines(before, *[step] * reads)
            )
            code = assembled(arch, kernel_text("readers", body, vgprs=64))
            taken = _taken(
                profiler, launch_code, arch, code, "readers", units, 64, memory, memory=[memory]
            )
            assert taken.timing is not None
            timings.append(taken.timing.cycles)
        return timings[0], timings[0] - timings[1]

    return cycles


def test_a_kernel_that_streams_takes_as_long_as_hbm_does(cycles_of_readers, arch):
    _, loads = cycles_of_readers(shared=False)
    streaming = 2 * _READS * _STREAMED[arch]
    assert loads == pytest.approx(streaming + 1000, rel=0.03)
    # Other work in between hides, as long as it is shorter, and else it hides the streaming.
    _, with_less = cycles_of_readers(shared=False, behind_each=_lines(*[_VALU] * 3))
    assert with_less == pytest.approx(loads, rel=0.03)
    _, with_more = cycles_of_readers(shared=False, behind_each=_lines(*[_VALU] * 20))
    assert with_more == pytest.approx(_READS * 4 * 21 + 1000, rel=0.05)


def test_loads_that_are_waited_for_one_by_one_do_not_stream(cycles_of_readers):
    _, loads = cycles_of_readers(shared=False, behind_each=_WAIT)
    assert loads == pytest.approx(_READS * 1000, rel=0.1)


def test_what_all_workgroups_read_comes_from_hbm_once(cycles_of_readers):
    _, loads = cycles_of_readers(shared=True)
    # A wave has 63 loads on their way, nearly all of which L2 has.
    assert _READS / 63 * 600 < loads < _READS / 63 * 1000


def test_what_a_launch_stores_itself_does_not_come_from_hbm(cycles_of_readers, arch):
    """To loads that see it. Whatever these see of what the launch only reads does."""
    streaming = 2 * _READS * _STREAMED[arch]
    _, reads = cycles_of_readers(shared=False, scope="sc1")
    assert reads == pytest.approx(streaming + 1000, rel=0.03)
    store = "global_store_dword v20, v20, s[8:9]"
    _, stored = cycles_of_readers(shared=False, scope="sc1", before=store)
    assert _READS / 63 * 600 < stored < _READS / 63 * 1000
    _, unseen = cycles_of_readers(shared=False, before=store)
    assert unseen > streaming


def test_lines_beside_no_matrix_work_are_counted(profile):
    memory = np.zeros(1 << 14, np.uint32)
    inputs = {"s[8:9]": memory.ctypes.data, "v20": np.arange(LANES, dtype=np.uint32) * 4}
    lines = 2  # of a load

    def at_ends(*code: str) -> float:
        timing = profile(_lines(*code), inputs, memory=[memory]).timing
        assert timing is not None
        return timing.lines_at_ends

    first, second, third, *_ = _LOADS
    without = at_ends(_MFMA)  # what the test puts around the code
    assert at_ends(first, _MFMA, second, _MFMA, third) == without + 2 * lines
    assert at_ends(first, first, _MFMA) == without + lines
    assert at_ends(_MFMA, first, second, _MFMA) == without
    # Where there is no matrix work, loads and stores are the work.
    assert at_ends(first, second) == 0


def test_atomics_wait_for_atomics(cycles_with_memory):
    def of_one(line: str) -> float:
        # Of more than 63, a wave waits for the first.
        return (cycles_with_memory(*[line] * 60) - cycles_with_memory(*[line] * 30)) / 30

    atomic = of_one("global_atomic_add_f32 v20, v8, s[8:9]")
    assert atomic == pytest.approx(2 * 20, abs=1)
    assert of_one("global_store_dword v20, v8, s[8:9]") == pytest.approx(4, abs=0.5)


def test_eight_byte_writes_find_half_of_gfx950s_banks(profile, arch):
    # Of 16 lanes together, 8 are 128 bytes behind the others: 32 banks on. 32 have 64 banks.
    lanes = np.arange(LANES)
    within = lanes % 8 * 8 + lanes // 8 % 2 * 128 + lanes // 16 % 2 * 64
    addresses = (lanes // 32 * 512 + within).astype(np.uint32)
    code = ("ds_read_b64 v[8:9], v20", "ds_write_b64 v20, v[8:9]")
    loops = [_loop(line, 2, label=f"loop{i}") for i, line in enumerate(code)]
    read, write = profile(_lines(*loops), {"v20": addresses}).loops
    assert write.work.lds_conflict_cycles == 2 * 4
    assert read.work.lds_conflict_cycles == (0 if arch == "gfx950" else 2 * 4)


_TWO_WAVES_OF_ONE_SIMD = """
  s_load_dwordx2 s[8:9], s[0:1], 0x0
  v_readfirstlane_b32 s4, v0
  v_and_b32 v20, 63, v0
  v_lshlrev_b32 v20, 2, v20
  s_waitcnt lgkmcnt(0)
  s_cmp_eq_u32 s4, 0
  s_cbranch_scc1 .Lfirst
  s_cmp_eq_u32 s4, 256
  s_cbranch_scc1 .Lfifth
  s_endpgm
.Lfirst:
  {first}
  s_endpgm
.Lfifth:
  {fifth}"""


@pytest.fixture
def cycles_of_two(profiler: Emulator) -> Callable[[str, str], int]:
    """Of what the first and the fifth wave of a workgroup do, which share a SIMD of gfx942."""
    memory = np.zeros(1024, np.uint32)

    def cycles(first: str, fifth: str) -> int:
        body = _TWO_WAVES_OF_ONE_SIMD.format(first=first, fifth=fifth)
        code_object = assembled("gfx942", kernel_text("waves", body, lds_bytes=1024, vgprs=64))
        timing = _taken(
            profiler, launch_code, "gfx942", code_object, "waves", 1, 320, memory
        ).timing
        assert timing is not None
        return timing.cycles

    return cycles


def test_lds_and_memory_share_a_port(cycles_of_two):
    cycles = cycles_of_two
    reads = _lines(*["ds_read_b32 v1, v20"] * 200)
    loads = _lines(*["global_load_dword v2, v20, s[8:9]"] * 200)
    adds = _lines(*[_VALU] * 200)
    nothing = cycles("", "")
    assert cycles(reads, adds) - nothing == pytest.approx(200 * 4, rel=0.2)
    assert cycles(reads, loads) - cycles("", loads) == pytest.approx(200 * 4, rel=0.1)


def test_packed_float32_gets_its_turn_among_matrix_instructions(cycles_of_two):
    matrix, adds = _lines(*[_MFMA] * 100), _lines(*[_VALU] * 50)
    packed = _lines(*["v_pk_mul_f32 v[10:11], v[12:13], v[14:15]"] * 50)
    nothing = cycles_of_two("", "")
    assert cycles_of_two(matrix, adds) - nothing == pytest.approx(3200, rel=0.02)
    # Each takes its four cycles from the other wave's matrix unit.
    for waves in ((matrix, packed), (packed, matrix)):
        assert cycles_of_two(*waves) - nothing == pytest.approx(3400, rel=0.02)
    # It need not wait for the last one: what follows has time beside the others.
    followed = _lines(packed, *[_VALU] * 300)
    assert cycles_of_two(matrix, followed) - nothing == pytest.approx(3400, rel=0.02)


def test_other_waves_wait_for_a_line_that_is_on_its_way(cycles_of_two):
    """Both do, and then their work is one after the other."""
    work = _lines("global_load_dword v2, v20, s[8:9]", _WAIT, *[_VALU] * 200)
    took = cycles_of_two(work, work) - cycles_of_two("", "")
    assert took == pytest.approx(1000 + 2 * 200 * 4, rel=0.05)


def test_waves_of_one_simd_overlap_matrix_and_vector_work(profiler):
    body = _lines(
        "v_readfirstlane_b32 s4, v0",
        "s_cmp_lt_u32 s4, 256",
        "s_cbranch_scc0 .Lvector",
        *[_MFMA] * 100,
        "s_endpgm",
        ".Lvector:",
        *[_VALU] * 600,
    )
    code_object = assembled("gfx942", kernel_text("phases", body, vgprs=64))
    timing = _taken(profiler, launch_code, "gfx942", code_object, "phases", 1, 512).timing
    assert timing is not None
    # 3200 cycles of matrix work; 2400 of vector work fit beside it.
    assert timing.cycles == pytest.approx(3200, rel=0.02)
    assert timing.matrix_busy > 0.97
    assert timing.vector_busy == pytest.approx(2400 / 3200, rel=0.03)


# ---- Occupancy -----------------------------------------------------------------------------------

_ROOM = """
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256))) void room(float* x) {
  __shared__ float tile[10000];
  const int i = __builtin_amdgcn_workitem_id_x();
  tile[i] = x[i];
  __builtin_amdgcn_s_barrier();
  x[i] = tile[255 - i];
}
"""


def test_occupancy(profiler, arch):
    x = np.ones(256, np.float32)
    code = compile_hip(_ROOM, arch)
    room = _taken(profiler, launch_code, arch, code, "room", 1, 256, x).occupancy
    assert 40_000 <= room.lds_bytes < 41_600
    assert room.waves_of_workgroup == 4
    assert room.by_waves == 8
    assert room.by_lds == (1 if arch == "gfx942" else 4)
    assert room.workgroups == room.by_lds
    # Compilers allocate registers beyond need where LDS limits the waves.
    assert "LDS" in room.limits
    assert room.waves_of_simd == room.by_lds


# ---- What people see -----------------------------------------------------------------------------


def test_the_report_states_its_assumptions(profiler, arch):
    taken = _launch_sum(profiler, arch, 2)
    text = " ".join(str(taken).split())  # whatever stands on which line
    clock = "2.4 GHz" if arch == "gfx950" else "2.1 GHz"
    measured = "1820 MHz at 61%" if arch == "gfx950" else "1379 MHz at 68%"
    scatter = 6 if arch == "gfx950" else 8
    uncertain = (f"give or take {scatter}%", f"uncertain by {scatter}%")
    for words in ("assumptions:", clock, "fitted", measured, *uncertain, "HBM streams for"):
        assert words in text, text
    facts = json.loads(json.dumps(taken.to_dict()))
    assert facts["work"]["instructions"]["vmem_load"] == 8
    assert facts["estimate"]["rounds"] == 1
    assert len(facts["assumptions"]) == len(taken.assumptions())


def _described(folder: Path, grid: int = 1) -> tuple[str, str]:
    """The flag for a launch that scales 256 values in each workgroup."""
    launch = {
        "arch": "gfx942-mi308",
        "grid": [grid],
        "block": [256],
        "tensors": {"x": {"dtype": "float32", "shape": [256 * grid], "random": 1}},
        "arguments": [{"tensor": "x"}, {"type": "f32", "value": 0.5}, {"type": "i32", "value": 3}],
    }
    path = folder / "args.json"
    path.write_text(json.dumps(launch), encoding="utf-8")
    return "--args", str(path)


def test_command(tmp_path, capsys):
    source = tmp_path / "scale.hip"
    source.write_text(_SUM)
    launch = _described(tmp_path)
    assert main(["profile", str(source), *launch, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"] == "AMD Instinct MI308X"
    assert facts["loops"][0]["iterations_of_waves"] == [3, 3, 3, 3]

    code_object = tmp_path / "scale.co"
    code_object.write_bytes(compile_hip(_SUM, "gfx942"))
    assert main(["profile", str(code_object), *launch, "--assume-workgroups", "800"]) == 0
    assert "800 workgroups in" in capsys.readouterr().out

    large = _described(tmp_path, grid=200)
    assert main(["profile", str(source), *large, "--sample", "8"]) == 0
    printed = capsys.readouterr().out
    assert "Only a sample of 8 workgroups ran" in printed
    assert "busy over the whole launch: matrix units 0.0%" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sample", "0"), "--sample: 0"),
        (("--workgroup", "-1"), "--workgroup: -1"),
        (("--assume-workgroups", "-1"), "--assume-workgroups: -1"),
        ((), "there is no file"),
    ],
)
def test_usage_errors(flags, message, capsys, tmp_path):
    file = str(tmp_path / "missing.co") if not flags else __file__
    assert main(["profile", file, *_described(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
