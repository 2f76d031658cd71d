"""The launcher suite: what the host pays for a call on an AMD GPU, with the GPU left out.

Calls go the whole way, with CPU tensors in place of a GPU's, to a HIP runtime that records and
runs nothing. Kernels are the shipped ones, or those of the tree that JITFMHA_HSA_DIR names, and in
first calls of compiled kernels those that are compiled for them.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from jitfmha.amd.chips import chip
from jitfmha.bench.report import Progress, Report
from jitfmha.bench.timing import alternate
from jitfmha.call.interface import fmha_bwd, fmha_fwd
from jitfmha.jit.toolchain.host_cpp import find_host_cpp
from jitfmha.planning.target import AmdTarget
from jitfmha.problem.arguments import AttentionOptions
from jitfmha.problem.dropout import new_rng_state

from . import decode_loop
from .fresh_run import run_fresh
from .recording_runtime import RecordingRuntime

BUILD_SECONDS = 1.0
FIRST_CALL_SECONDS, STEADY_CALL_MICROSECONDS = 3.0, 8.0
STEADY_PAIR_MICROSECONDS = 20.0
_CHIP = "MI300X"
# User and system time of what a build starts: it does not depend on what else runs.
_BUILDS = """
import json, resource, sys
from itertools import product
from typing import get_args
from jitfmha import jit
from jitfmha.kernels.launcher import Block, LauncherKind, launcher_spec
from jitfmha.problem.problem import Direction, Mode
def used():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime
seconds = {}
for parts in product(get_args(Mode), get_args(Direction), get_args(Block)):
    kind = LauncherKind(sys.argv[1], *parts)
    before = used()
    jit.load(launcher_spec(kind))
    seconds[kind.name] = used() - before
print(json.dumps(seconds))
"""
# The recording runtime is built before, in a cache of its own; the given one is set afterwards.
_FIRST_CALL = """
import json, os, sys, time
import torch
import jitfmha
from rigs import launcher_suite
from rigs.recording_runtime import RecordingRuntime
cache, chip, *what = sys.argv[1:]
runtime = RecordingRuntime()
os.environ["JITFMHA_CACHE_DIR"] = cache
call = launcher_suite.call_of(*what)
is_compiled = what[0] in ("forward", "backward")
target = runtime.target(chip)
with runtime.stands_for(launcher_suite.without_trees(target) if is_compiled else target):
    start = time.perf_counter()
    call()
    print(json.dumps(time.perf_counter() - start))
kernels = [launch.symbol.decode() for launch in runtime.launches()]
assert kernels and all(("_compiled_" in kernel) == is_compiled for kernel in kernels), kernels
"""
# Every call of compiled kernels needs a launcher, and other calls mostly have built it.
_LAUNCHER = """
from itertools import product
from jitfmha.kernels.launcher import LauncherKind, load_launcher
for arch, direction in product(("gfx942", "gfx950"), ("forward", "backward")):
    load_launcher(LauncherKind(arch, "gm0", direction, "compiled"))
"""
_CHIPS = ("MI300X", "MI355X")
_CALLS = (("forward", 128), ("forward", 256), ("backward", 128), ("backward", 256))
_TIMES = 3
_TIMEOUT_SECONDS = 120.0


def run(quick: bool, progress: Progress) -> Report:
    """Measure builds, first and steady calls in both modes, and first ones of compiled kernels."""
    report = Report(
        "launcher",
        {
            "target": f"{_CHIP}, recorded",
            "torch": torch.__version__,
            "compiler": str(find_host_cpp()),
        },
    )
    runtime = RecordingRuntime()
    for mode in ("gm0", "gm1"):
        seconds = [_first_call(_CHIP, mode) for _ in range(1 if quick else _TIMES)]
        progress(f"first call in {mode}: {', '.join(f'{x:.2f}' for x in seconds)} s")
        what = f"first call in {mode} with an empty cache, median of {len(seconds)}"
        report.at_most(what, median(seconds), FIRST_CALL_SECONDS, "s")
    _add_builds(report, progress)
    _add_compiled_calls(report, quick, progress)
    for kind, call, bar in (
        ("call of fmha_fwd", call_of, STEADY_CALL_MICROSECONDS),
        ("call of fmha_fwd and one of fmha_bwd", _pair_of, STEADY_PAIR_MICROSECONDS),
    ):
        for mode in ("gm0", "gm1"):
            with _launching(runtime):
                times = alternate([call(mode)], min_seconds=0.3 if quick else 2.0, calls=1000)
            microseconds = 1e6 * times.best(0)
            what = f"host time of a steady {kind} in {mode}"
            progress(f"{what}: {microseconds:.2f} us")
            report.at_most(what, microseconds, bar, "us")
    _decode_loop(report, runtime, quick, progress)
    return report


def _add_builds(report: Report, progress: Progress) -> None:
    """What building each kind of launcher takes, for one chip."""
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as empty_cache:
        process = run_fresh(
            *(_BUILDS, chip(_CHIP).architecture.name),
            failure="the process that builds launchers failed",
            timeout=_TIMEOUT_SECONDS,
            environment={"JITFMHA_CACHE_DIR": empty_cache},
        )
    for name, seconds in json.loads(process.stdout).items():
        progress(f"build of launcher {name}: {seconds:.2f} s of processors")
        what = f"processors' time to build launcher {name}"
        report.at_most(what, seconds, BUILD_SECONDS, "s")


def _add_compiled_calls(report: Report, quick: bool, progress: Progress) -> None:
    """Add the longest first call; ``quick`` makes fewer of them."""
    chips, calls, times = (_CHIPS[:1], _CALLS[-1:], 1) if quick else (_CHIPS, _CALLS, _TIMES)
    longest = 0.0
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as folder:
        run_fresh(
            _LAUNCHER,
            failure="the launcher was not built",
            timeout=_TIMEOUT_SECONDS,
            environment={"JITFMHA_CACHE_DIR": folder},
        )
        for chip in chips:
            for direction, hdim in calls:
                seconds = [_first_call(chip, direction, hdim, built=folder) for _ in range(times)]
                name = f"{chip}, {direction} with all features, hdim {hdim}"
                progress(f"first call, {name}: {', '.join(f'{x:.2f}' for x in seconds)} s")
                longest = max(longest, median(seconds))
    what = (
        "first call of a compiled kernel with all features, nothing but the launcher in the cache, "
        f"median of {times}, the longest of {len(chips) * len(calls)}"
    )
    report.at_most(what, longest, FIRST_CALL_SECONDS, "s")


def call_of(what: str, hdim: str = "128") -> Callable[[], object]:
    """One call in bf16: of a mode, or of compiled kernels in one direction."""
    if what in ("forward", "backward"):
        return _call_with_everything(what, int(hdim))
    rows = (2, 128) if what == "gm0" else (256,)
    q, k, v = (torch.zeros(*rows, 8, 128, dtype=torch.bfloat16) for _ in range(3))
    if what == "gm0":
        return lambda: fmha_fwd(q, k, v)
    sums = torch.tensor([0, 100, 256], dtype=torch.int32)
    return lambda: fmha_fwd(q, k, v, cu_seqlens_q=sums, cu_seqlens_k=sums, max_seqlen_q=156)


def _call_with_everything(direction: str, hdim: int) -> Callable[[], object]:
    """One call in bf16 with a window and all that happens to scores, forward or backward."""
    seqlen, heads = 128, 2
    q, k, v, dout = (torch.zeros(1, seqlen, heads, hdim).bfloat16() for _ in range(4))
    options: AttentionOptions = {
        "window_size": (100, 0),
        "sink_size": 4,
        "sink": torch.zeros(heads),
        "bias": torch.zeros(1, heads, seqlen, seqlen),
        "alibi_slopes": torch.ones(heads),
        "logit_softcap": 30.0,
        "dropout_p": 0.1,
        "rng_state": new_rng_state(),
    }
    lse = torch.zeros(1, heads, seqlen)
    if direction == "forward":
        return lambda: fmha_fwd(q, k, v, **options)
    return lambda: fmha_bwd(dout, q, k, v, torch.zeros_like(dout), lse, **options)


def without_trees(target: AmdTarget) -> AmdTarget:
    """The same GPU without code objects: compiled kernels serve all of its calls."""
    same = target.chip, target.device_index, target.compute_units, target.runtime
    return AmdTarget(*same, trees=())


@contextmanager
def _launching(runtime: RecordingRuntime) -> Iterator[None]:
    """Calls go to a GPU that counts their launches."""
    runtime.reset(keeps_launches=False)
    with runtime.stands_for(runtime.target(_CHIP)):
        yield
    if runtime.launch_count == 0:
        raise RuntimeError("no call reached the runtime")


def _pair_of(mode: str) -> Callable[[], object]:
    """Forward and backward in bf16 with hdim 128, of few rows: what is zeroed here a GPU zeroes."""
    rows = (2, 2) if mode == "gm0" else (4,)
    q, k, v, dout = (torch.zeros(*rows, 8, 128, dtype=torch.bfloat16) for _ in range(4))
    options: AttentionOptions = {}
    if mode == "gm1":
        sums = torch.tensor([0, 2, 4], dtype=torch.int32)
        options = {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
        options |= {"max_seqlen_q": 2, "max_seqlen_k": 2}

    def pair() -> object:
        out, lse = fmha_fwd(q, k, v, return_lse=True, **options)
        return fmha_bwd(dout, q, k, v, out, lse, **options)

    return pair


def _decode_loop(
    report: Report, runtime: RecordingRuntime, quick: bool, progress: Progress
) -> None:
    tensors = decode_loop.tensors(torch.bfloat16, heads=2, hdim=128)
    with _launching(runtime):
        seconds = 0.5 if quick else 3.0
        decode_loop.add_row(report, "recorded, (1,1,2,128)", tensors, seconds, progress)


def _first_call(*what: object, built: str | None = None) -> float:
    """In a cache that is empty, or has what was built before."""
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as cache:
        if built is not None:
            shutil.copytree(built, cache, dirs_exist_ok=True)
        process = run_fresh(
            *(_FIRST_CALL, cache, *map(str, what)),
            failure="the process for a first call failed",
            timeout=_TIMEOUT_SECONDS,
        )
    seconds: float = json.loads(process.stdout)
    return seconds
