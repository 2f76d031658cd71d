"""The emulator suite: how fast it executes, what checks cost, and how long its build takes."""

from __future__ import annotations

import os
import platform
import struct
import tempfile
import time

import torch

from jitfmha.bench.fresh_process import run_fresh
from jitfmha.bench.report import Progress, Report
from jitfmha.bench.timing import alternate
from jitfmha.emulator import DEVICES, Emulator, take_findings
from jitfmha.jit.toolchain.device_compiler import assemble, compile_hip

from .emulator_kernels import (
    FORWARD_KERNEL,
    FORWARD_SOURCE,
    LOOP_KERNEL,
    MFMA_BODY,
    QUERIES_OF_WORKGROUP,
    THREADS_OF_WORKGROUP,
    VALU_BODY,
    loop_source,
)

_ARCH = "gfx942"
_THREADS = 2
_HEADS = 8
_HDIM = 128
_SEED = 20260101
_LOG2_E = 1.4426950408889634
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


def run(quick: bool, progress: Progress) -> Report:
    """Measure; ``quick`` leaves out the cold build and uses shorter problems."""
    report = Report("emulator", _machine(quick))
    plain, checking = Emulator(), Emulator("check")
    _instructions(report, plain, quick, progress)
    _forward(report, plain, checking, quick, progress)
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


def _instructions(report: Report, emulator: Emulator, quick: bool, progress: Progress) -> None:
    times = 20_000 if quick else 100_000
    seconds = _seconds_of_loop(emulator, VALU_BODY, times)
    executed = (len(VALU_BODY) + _LOOP_OVERHEAD) * times
    progress(f"VALU code, one core: {executed / seconds / 1e6:.0f} M wave instructions/s")
    report.at_least("VALU-heavy code, one core", executed / seconds / 1e6, 20.0, "M instructions/s")
    seconds = _seconds_of_loop(emulator, MFMA_BODY, times) / (len(MFMA_BODY) * times)
    progress(f"one 32x32x8 bf16 MFMA: {seconds * 1e6:.2f} us")
    report.at_most("one 32x32x8 bf16 MFMA", seconds * 1e6, 1.5, "us")


def _seconds_of_loop(emulator: Emulator, body: tuple[str, ...], times: int) -> float:
    """The best of three runs of one wave."""
    code_object = assemble(loop_source(body, times, _ARCH), _ARCH)
    module = emulator.load_module(code_object, DEVICES[_ARCH])
    function = emulator.function(module, LOOP_KERNEL)
    try:
        return alternate(
            [lambda: emulator.launch(function, (1, 1, 1), (64, 1, 1), b"")], min_seconds=0.0
        ).best(0)
    finally:
        emulator.unload_module(module)


class _Forward:
    """The plain forward kernel on one problem, ready to be launched."""

    def __init__(self, emulator: Emulator, code_object: bytes, seqlen: int) -> None:
        self._emulator = emulator
        self._module = emulator.load_module(code_object, DEVICES[_ARCH])
        self._function = emulator.function(self._module, FORWARD_KERNEL)
        generator = torch.Generator().manual_seed(_SEED)
        shape = (_HEADS, seqlen, _HDIM)
        self.q, self.k, self.v = (
            torch.randn(shape, generator=generator).bfloat16() for _ in range(3)
        )
        self.out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        tensors = (self.q, self.k, self.v, self.out)
        self._memory = [(x.data_ptr(), x.nbytes) for x in tensors]
        self._kernarg = struct.pack(
            "<4Qif", *(x.data_ptr() for x in tensors), seqlen, _HDIM**-0.5 * _LOG2_E
        )
        self._grid = (seqlen // QUERIES_OF_WORKGROUP, _HEADS, 1)

    def __call__(self) -> None:
        with self._emulator.keep_options():
            self._emulator.set_options(threads=_THREADS)
            self._emulator.set_allowed_memory(self._memory)
            try:
                block = (THREADS_OF_WORKGROUP, 1, 1)
                self._emulator.launch(self._function, self._grid, block, self._kernarg)
            finally:
                self._emulator.set_allowed_memory(None)

    def verify(self) -> float:
        """The largest error of the last launch. Raises ``RuntimeError`` for a wrong result."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        scores = q @ k.transpose(1, 2) * _HDIM**-0.5
        error = (self.out.double() - torch.softmax(scores, -1) @ v).abs().max().item()
        if not error <= _TOLERANCE:
            raise RuntimeError(f"the forward kernel is off by {error}, over {_TOLERANCE}")
        return error


def _forward(
    report: Report, plain: Emulator, checking: Emulator, quick: bool, progress: Progress
) -> None:
    seqlen = 512 if quick else 1024
    code_object = compile_hip(FORWARD_SOURCE, _ARCH)
    unchecked = _Forward(plain, code_object, seqlen)
    checked = _Forward(checking, code_object, seqlen)
    times = alternate([unchecked, checked], min_seconds=0.0)
    error = unchecked.verify()
    checked.verify()
    if findings := take_findings(checking.library):
        raise RuntimeError(f"the sanitizer finds faults in a correct kernel: {findings[0]}")
    what = f"forward, {_HEADS} heads {seqlen} x {seqlen}, hdim {_HDIM}, {_THREADS} cores"
    progress(f"{what}: {times.best(0):.2f} s, checked {times.best(1):.2f} s (error {error:.1e})")
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
