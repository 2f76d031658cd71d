"""The cost model: exact counts, the costs of accesses, and what the timing must satisfy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.profile import cache_lines, lds_cycles
from programs import LANES, Segment, run

from jitfmha.amd.device_compiler import compile_hip
from jitfmha.cli import main
from jitfmha.emulator import DEVICES, Emulator
from jitfmha.emulator.profile import (
    LaunchProfile,
    Loop,
    set_profile_options,
    take_profiles,
)

Profile = Callable[..., LaunchProfile]

_LDS_BYTES = 65536


@pytest.fixture(scope="module")
def profiler() -> Emulator:
    return Emulator("profile")


@pytest.fixture
def profile(profiler: Emulator, device: int) -> Profile:
    def of_segments(code: str, inputs: Mapping[str, Any] | None = None) -> LaunchProfile:
        take_profiles(profiler.library)
        segment = Segment(code, inputs or {}, [])
        run(profiler, device, [segment], lds_bytes=_LDS_BYTES)
        (taken,) = take_profiles(profiler.library)
        return taken

    return of_segments


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


def test_counts_of_a_loop_are_exact(profile: Profile, arch: str) -> None:
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


def test_nested_loops_have_their_own_counts(profile: Profile) -> None:
    inner = _loop("v_add_f32 v0, v1, v2", 3, counter="s5", label="inner")
    taken = profile(_loop(f"v_mul_f32 v0, v1, v2\n{inner}", 5))
    outer, within = taken.loops
    assert (outer.iterations, within.iterations) == (5, 15)
    assert (outer.depth, within.depth, within.outer) == (1, 2, 0)
    assert outer.work.valu == 5
    assert within.work.valu == 15
    assert outer.code.valu == 2


def test_a_branch_that_is_not_taken_back_is_no_loop(profile: Profile) -> None:
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
    import struct

    # From the beginning of a cache line.
    x = np.ones(256 * workgroups + 32, np.float32)
    x = x[-x.ctypes.data % 128 // 4 :][: 256 * workgroups]
    module = profiler.load_module(compile_hip(_SUM, arch), DEVICES[arch])
    profiler.set_allowed_memory([(x.ctypes.data, x.nbytes)])
    take_profiles(profiler.library)
    try:
        kernarg = struct.pack("<Qfi", x.ctypes.data, 0.5, 10)
        function = profiler.function(module, "scale")
        profiler.launch(function, (workgroups, 1, 1), (256, 1, 1), kernarg)
    finally:
        profiler.set_allowed_memory(None)
        profiler.unload_module(module)
    (taken,) = take_profiles(profiler.library)
    return taken


def test_waves_and_workgroups_add_up(profiler: Emulator, arch: str) -> None:
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


def test_another_workgroup_can_be_looked_at(profiler: Emulator) -> None:
    first = _launch_sum(profiler, "gfx942", 4)
    set_profile_options(profiler.library, looked_at=3, assumed_workgroups=10_000)
    try:
        last = _launch_sum(profiler, "gfx942", 4)
    finally:
        set_profile_options(profiler.library)
    assert last.looked_at == 3
    assert last.workgroups == 10_000
    assert first.work == last.work
    assert last.work_of_waves[0].valu > first.work_of_waves[0].valu
    estimate = last.estimate()
    assert estimate is not None
    assert last.timing is not None
    assert estimate.rounds == -(-10_000 // (304 * last.timing.workgroups))


def test_too_many_instructions_are_not_timed(profiler: Emulator) -> None:
    set_profile_options(profiler.library, most_steps=8)
    try:
        taken = _launch_sum(profiler, "gfx942", 1)
    finally:
        set_profile_options(profiler.library)
    assert taken.timing is None
    assert taken.estimate() is None
    assert "more than 8 instructions" in str(taken)


def test_the_plain_variant_does_not_profile(emulator: Emulator) -> None:
    with pytest.raises(RuntimeError, match="load 'profile'"):
        take_profiles(emulator.library)
    with pytest.raises(RuntimeError, match="load 'profile'"):
        set_profile_options(emulator.library)


# ---- Costs of accesses ---------------------------------------------------------------------------

_WIDTHS = {"b32": 4, "b64": 8, "b128": 16}


def test_bank_conflicts(profile: Profile, arch: str, seed: int) -> None:
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
        banks = 32 if arch == "gfx942" else 64
        least = max(1, LANES * width // (4 * banks))
        assert loop.work.lds_conflict_cycles == 2 * (cycles - least), line
    assert taken.conflicts[0].lds_conflict_cycles == max(
        loop.work.lds_conflict_cycles for loop in taken.loops
    )


def test_two_addresses_are_two_accesses(profile: Profile, arch: str) -> None:
    lanes = np.arange(LANES, dtype=np.uint32)
    body = "ds_read2_b32 v[8:9], v20 offset1:64"
    work = _only_loop(profile(_loop(body, 2), {"v20": lanes * 4})).work
    assert work.lds_bytes == 2 * 8 * LANES
    assert work.lds_cycles == 2 * 2 * lds_cycles(arch, (lanes * 4).tolist(), 4, is_read=True)
    assert work.lds_conflict_cycles == 0


def test_cache_lines(profile: Profile, profiler: Emulator, device: int, seed: int) -> None:
    memory = np.zeros(1 << 14, np.uint32)
    random = np.random.default_rng(seed)
    base = memory.ctypes.data
    code, inputs, expected = [], {"s[8:9]": base}, []
    for width, name in ((4, "dword"), (8, "dwordx2"), (16, "dwordx4")):
        data = "v8" if width == 4 else f"v[8:{7 + width // 4}]"
        for stride in (width, 64, 256):
            offsets = np.arange(LANES) * stride + 4 * random.integers(0, 8)
            register = f"v{20 + len(inputs)}"
            inputs[register] = offsets.astype(np.uint32)
            code.append(f"global_load_{name} {data}, {register}, s[8:9]")
            expected.append((width, cache_lines((base + offsets).tolist(), width)))
    loops = [_loop(line, 2, label=f"loop{i}") for i, line in enumerate(code)]
    take_profiles(profiler.library)
    run(profiler, device, [Segment(_lines(*loops), inputs)], memory=[memory])
    (taken,) = take_profiles(profiler.library)
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
_OTHER_MFMA = "v_mfma_f32_32x32x8_f16 a[16:31], v[0:1], v[2:3], a[16:31]"
_VALU = "v_add_f32 v10, v11, v12"


# The model's numbers once more, as the ISA documents, published measurements and the fit have them.
_RATES = {
    "issue": 4, "valu": 4, "transcendental": 16, "matrix_pass": 4, "matrix_result": 12,
    "lds_banks": 32, "lds_latency": 96, "global_latency": 600, "scalar_latency": 200,
    "line_bytes": 128, "cycles_of_line": 2, "queue": 64, "barrier": 192, "branch": 16,
}  # fmt: skip
_RATES_OF_GFX950 = _RATES | {"transcendental": 8, "matrix_result": 16, "lds_banks": 64}


def test_rates(profile: Profile, arch: str) -> None:
    expected = _RATES if arch == "gfx942" else _RATES_OF_GFX950
    rates = profile("s_nop 0").rates
    assert {name: rates[name] for name in expected} == expected
    assert rates.keys() == expected.keys()


def test_rates_of_one_wave(profile: Profile, arch: str) -> None:
    """What is measured, against numbers that do not come from the profile."""
    transcendental, matrix_result, lds_cycles_of_read = (
        (8, 16, 1) if arch == "gfx950" else (16, 12, 2)
    )
    lines = np.arange(LANES, dtype=np.uint32)
    cases = [
        (_VALU, 4),
        ("v_exp_f32 v10, v11", transcendental),
        (_MFMA, 32),
        (_lines(_MFMA, *[_VALU] * 7), 32),  # VALU work of seven slots is hidden
        (_lines(_MFMA, *[_VALU] * 20), 84),  # the VALU is the longer one
        (_lines(_MFMA, "v_accvgpr_read_b32 v10, a16"), 32),
        (_lines(_MFMA, "v_accvgpr_read_b32 v10, a0"), 36 + matrix_result),
        ("s_nop 7", 32),
        ("s_barrier", 192),
        (_lines("ds_read_b32 v10, v20", "s_waitcnt lgkmcnt(0)"), 96 + lds_cycles_of_read + 4),
        (_lines("s_load_dword s10, s[84:85], 0x0", "s_waitcnt lgkmcnt(0)"), 200 + 4),
    ]
    for body, expected in cases:
        # The model runs in steps of an issue slot.
        assert _cycles(profile, body, {"v20": lines * 4}) == pytest.approx(expected, abs=4), body


def test_global_latency_is_paid_once_when_loads_are_in_flight_together(
    profile: Profile, profiler: Emulator, device: int
) -> None:
    memory = np.zeros(1024, np.uint32)
    inputs = {"s[8:9]": memory.ctypes.data, "v20": np.arange(LANES, dtype=np.uint32) * 4}

    def cycles(*code: str) -> int:
        take_profiles(profiler.library)
        run(profiler, device, [Segment(_lines(*code), inputs)], memory=[memory])
        (taken,) = take_profiles(profiler.library)
        assert taken.timing is not None
        return taken.timing.cycles

    load, wait = "global_load_dword v8, v20, s[8:9]", "s_waitcnt vmcnt(0)"
    nothing = cycles()
    one_by_one = cycles(*[load, wait] * 8) - nothing
    together = cycles(*[load] * 8, wait) - nothing
    assert one_by_one == pytest.approx(8 * 600, rel=0.05)
    assert together == pytest.approx(600, rel=0.15)


def test_waves_of_one_simd_overlap_matrix_and_vector_work(profiler: Emulator) -> None:
    source = """
    .amdgcn_target "amdgcn-amd-amdhsa--gfx942"
    .amdhsa_code_object_version 5
    .text
    .globl phases
    .p2align 8
    .type phases,@function
    phases:
      v_readfirstlane_b32 s4, v0
      s_cmp_lt_u32 s4, 256
      s_cbranch_scc0 .Lvector
      {matrix}
      s_endpgm
    .Lvector:
      {vector}
      s_endpgm
    .rodata
    .p2align 6
    .amdhsa_kernel phases
      .amdhsa_next_free_vgpr 64
      .amdhsa_accum_offset 32
      .amdhsa_next_free_sgpr 16
    .end_amdhsa_kernel
    """.format(matrix="\n".join([_MFMA] * 100), vector="\n".join([_VALU] * 600))
    from jitfmha.amd.device_compiler import assemble

    module = profiler.load_module(assemble(source, "gfx942"), DEVICES["gfx942"])
    take_profiles(profiler.library)
    profiler.launch(profiler.function(module, "phases"), (1, 1, 1), (512, 1, 1), b"")
    (taken,) = take_profiles(profiler.library)
    profiler.unload_module(module)
    timing = taken.timing
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


def test_occupancy(profiler: Emulator, arch: str) -> None:
    import struct

    x = np.ones(256, np.float32)
    module = profiler.load_module(compile_hip(_ROOM, arch), DEVICES[arch])
    take_profiles(profiler.library)
    kernarg = struct.pack("<Q", x.ctypes.data)
    profiler.launch(profiler.function(module, "room"), (1, 1, 1), (256, 1, 1), kernarg)
    (taken,) = take_profiles(profiler.library)
    profiler.unload_module(module)
    room = taken.occupancy
    assert 40_000 <= room.lds_bytes < 41_600
    assert room.waves_of_workgroup == 4
    assert room.by_waves == 8
    assert room.by_lds == (1 if arch == "gfx942" else 4)
    assert room.workgroups == room.by_lds
    # Compilers allocate registers beyond need where LDS limits the waves.
    assert "LDS" in room.limits
    assert room.waves_of_simd == room.by_lds


# ---- What people see -----------------------------------------------------------------------------


def test_the_report_states_its_assumptions(profiler: Emulator, arch: str) -> None:
    taken = _launch_sum(profiler, arch, 2)
    text = str(taken)
    clock = "2.4 GHz" if arch == "gfx950" else "2.1 GHz"
    measured = ("14.69, 13.80, 12.63", "11.67, 11.48, 11.39")
    for words in ("assumptions:", clock, "fitted", *measured, "caches and HBM"):
        assert words in text, text
    facts = json.loads(json.dumps(taken.to_dict()))
    assert facts["work"]["instructions"]["vmem_load"] == 8
    assert facts["estimate"]["rounds"] == 1
    assert len(facts["assumptions"]) == len(taken.assumptions())


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "scale.hip"
    source.write_text(_SUM)
    flags = ("profile", "--kernel", "scale", "--arch", "gfx942-mi308", "--block", "256")
    assert main([*flags, "--hip", str(source), "--args", "buf:1024,f32:0.5,i32:3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"] == "AMD Instinct MI308X"
    assert facts["loops"][0]["iterations_of_waves"] == [3, 3, 3, 3]

    code_object = tmp_path / "scale.co"
    code_object.write_bytes(compile_hip(_SUM, "gfx942"))
    packed = "{0}0000003f03000000"
    code = ("--code-object", str(code_object), "--kernarg-hex", packed, "--buffer", "1024")
    assert main([*flags, *code, "--assume-workgroups", "800"]) == 0
    assert "800 workgroups in" in capsys.readouterr().out

    large = ("--grid", "200", "--args", "buf:204800,f32:0.5,i32:3", "--sample", "8")
    assert main([*flags, "--hip", str(source), *large]) == 0
    printed = capsys.readouterr().out
    assert "Only a sample of 8 workgroups ran" in printed
    assert "busy over the whole launch: matrix units 0.0%" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--arch", "gfx90a"), "--arch gfx90a"),
        (("--grid", "0"), "--grid 0"),
        (("--sample", "0"), "--sample 0"),
        (("--args", "u8:1"), "not one of buf"),
        (("--args", "i32:5000000000"), "--args i32"),
        (("--kernarg-hex", "{0}"), "--kernarg-hex"),
        (("--buffer", "16"), "--buffer needs"),
        ((), "No such file"),
    ],
)
def test_usage_errors(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("profile", "--code-object", "missing.co", "--kernel", "k", "--arch", "gfx942")
    assert main([*base, *flags]) == 2
    assert message in capsys.readouterr().err
