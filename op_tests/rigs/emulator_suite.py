"""The emulator suite: how fast it executes, what checks cost, and how long its build takes."""

import os
import platform
import tempfile
import time

import torch

from jitfmha.bench.report import Progress, Report
from jitfmha.bench.timing import alternate
from jitfmha.call.interface import fmha_fwd
from jitfmha.emulator import DEVICES, Emulator, emulate
from jitfmha.jit.toolchain.device_compiler import assemble
from jitfmha.problem.float64_reference import attention

from .fresh_run import run_fresh

_ARCH = "gfx942"
_THREADS = 2
_HEADS = 8
_HDIM = 128
_SEED = 20260101
# bfloat16 rounds weights and the output to 8 bits; values are up to about 1.
_TOLERANCE = 2e-2
_LOOP_OVERHEAD = 3  # instructions around the body of a loop
_BUILD_TIMEOUT_SECONDS = 600.0
_BUILD = """
import time
start = time.perf_counter()
from jitfmha.emulator import Emulator
Emulator()
print(time.perf_counter() - start)
"""
_LOOP = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.amdhsa_code_object_version 5
.text
.globl loop
.p2align 8
.type loop,@function
loop:
  s_mov_b32 s4, {times}
.Lagain:
{body}
  s_sub_u32 s4, s4, 1
  s_cmp_lg_u32 s4, 0
  s_cbranch_scc1 .Lagain
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel loop
  .amdhsa_next_free_vgpr 128
  .amdhsa_accum_offset 64
  .amdhsa_next_free_sgpr 16
.end_amdhsa_kernel
"""
# What softmax and addresses are made of, without a dependency from one to the next.
_VALU_BODY = tuple(
    line.format(i=i)
    for i in range(8)
    for line in (
        "v_fma_f32 v{i}, v{i}, v30, v31",
        "v_mul_f32 v{i}, v{i}, v32",
        "v_add_f32 v{i}, v33, v{i}",
        "v_max_f32 v{i}, v34, v{i}",
        "v_add_u32 v4{i}, v35, v4{i}",
        "v_lshlrev_b32 v5{i}, 3, v4{i}",
        "v_and_b32 v5{i}, v36, v5{i}",
        "v_cndmask_b32 v5{i}, v5{i}, v4{i}, vcc",
    )
)
_MFMA_BODY = tuple(
    f"v_mfma_f32_32x32x8_bf16 a[{16 * i}:{16 * i + 15}], v[{4 * i}:{4 * i + 1}], "
    f"v[{4 * i + 2}:{4 * i + 3}], a[{16 * i}:{16 * i + 15}]"
    for i in range(4)
)


def run(quick: bool, progress: Progress) -> Report:
    """Measure; ``quick`` leaves out the cold build and uses shorter problems."""
    report = Report("emulator", _machine(quick))
    _instructions(report, quick, progress)
    _forward(report, quick, progress)
    if not quick:
        _cold_build(report, progress)
    report.machine["load"] = f"{os.getloadavg()[0]:.1f} (1 minute average at the end)"
    return report


def _machine(quick: bool) -> dict[str, str]:
    return {
        "emulates": _ARCH,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "extent": "quick: shorter problems than the bars mean, no cold build" if quick else "full",
    }


def _instructions(report: Report, quick: bool, progress: Progress) -> None:
    emulator, times = Emulator(), 20_000 if quick else 100_000
    seconds = _seconds_of_loop(emulator, _VALU_BODY, times)
    executed = (len(_VALU_BODY) + _LOOP_OVERHEAD) * times
    progress(f"VALU code, one core: {executed / seconds / 1e6:.0f} M wave instructions/s")
    report.at_least("VALU-heavy code, one core", executed / seconds / 1e6, 20.0, "M instructions/s")
    seconds = _seconds_of_loop(emulator, _MFMA_BODY, times) / (len(_MFMA_BODY) * times)
    progress(f"one 32x32x8 bf16 MFMA: {seconds * 1e6:.2f} us")
    report.at_most("one 32x32x8 bf16 MFMA", seconds * 1e6, 1.5, "us")


def _seconds_of_loop(emulator: Emulator, body: tuple[str, ...], times: int) -> float:
    """The best of three runs of one wave."""
    lines = "\n".join(f"  {line}" for line in body)
    code_object = assemble(_LOOP.format(arch=_ARCH, times=times, body=lines), _ARCH)
    module = emulator.load_module(code_object, DEVICES[_ARCH])
    function = emulator.function(module, "loop")
    try:
        return alternate(
            [lambda: emulator.launch(function, (1, 1, 1), (64, 1, 1), b"")], min_seconds=0.0
        ).best(0)
    finally:
        emulator.unload_module(module)


def _forward(report: Report, quick: bool, progress: Progress) -> None:
    """A kernel that comes ready, with and without the sanitizer."""
    seqlen = 512 if quick else 1024
    generator = torch.Generator().manual_seed(_SEED)
    q, k, v = (
        torch.randn(1, seqlen, _HEADS, _HDIM, generator=generator).bfloat16() for _ in range(3)
    )
    exact, _ = attention(q, k, v)
    errors = []

    def step(check: bool) -> None:
        with emulate(_ARCH, check=check, threads=_THREADS) as run:
            out = fmha_fwd(q, k, v)
            if check and (findings := run.findings()):
                raise RuntimeError(f"the sanitizer finds faults in a correct kernel: {findings[0]}")
        errors.append((out - exact).abs().max().item())
        if not errors[-1] <= _TOLERANCE:
            raise RuntimeError(f"the forward kernel is off by {errors[-1]}, over {_TOLERANCE}")

    times = alternate([lambda: step(check=False), lambda: step(check=True)], min_seconds=0.0)
    what = f"forward, {_HEADS} heads {seqlen} x {seqlen}, hdim {_HDIM}, {_THREADS} cores"
    seconds = f"{times.best(0):.2f} s, checked {times.best(1):.2f} s"
    progress(f"{what}: {seconds} (error {max(errors):.1e})")
    report.at_most(f"{what}, checks off", times.best(0), 10.0, "s")
    report.at_most("checks on, over checks off", times.ratio(1, 0), 8.0, "x")


def _cold_build(report: Report, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="jitfmha-bench-") as cache_dir:
        start = time.perf_counter()
        process = run_fresh(
            _BUILD,
            failure="the emulator did not build",
            timeout=_BUILD_TIMEOUT_SECONDS,
            cwd=cache_dir,
            environment={"JITFMHA_CACHE_DIR": cache_dir},
        )
        elapsed = time.perf_counter() - start
    lines = process.stderr.strip().splitlines()
    if not lines:
        raise RuntimeError("the emulator was built without a word of progress")
    progress(f"cold build: {elapsed:.1f} s; its first words: {lines[0]}")
    report.at_most("first use, emulator built cold", float(process.stdout), 60.0, "s")
