"""First calls of kernels that are compiled for a call, with the GPU left out."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from statistics import median

import torch

from jitfmha.bench.fresh_process import run_fresh
from jitfmha.bench.report import Progress, Report
from jitfmha.call.interface import fmha_bwd, fmha_fwd
from jitfmha.planning.target import AmdTarget
from jitfmha.problem.arguments import AttentionOptions
from jitfmha.problem.dropout import new_rng_state

from .recording_runtime import RecordingRuntime

_MOST_SECONDS = 3.0
_CHIPS = ("MI300X", "MI355X")
_CALLS = (("forward", 128), ("forward", 256), ("backward", 128), ("backward", 256))
_QUICK_CALLS = _CALLS[-1:]
_TIMES = 3
# Every call needs the launcher, and other calls mostly have built it.
_LAUNCHER = """
from itertools import product
from jitfmha.kernels.launcher import LauncherKind, load_launcher
for arch, direction in product(("gfx942", "gfx950"), ("forward", "backward")):
    load_launcher(LauncherKind(arch, "gm0", direction, "compiled"))
"""
# The recording runtime is built before, in a cache of its own.
_FIRST_CALL = """
import json, os, sys, time
import torch
import jitfmha
from rigs.compiled_first_calls import call_of, target_without_trees
from rigs.recording_runtime import RecordingRuntime
chip, direction, hdim, cache = sys.argv[1:]
runtime = RecordingRuntime()
os.environ["JITFMHA_CACHE_DIR"] = cache
call = call_of(direction, int(hdim))
with runtime.stands_for(target_without_trees(runtime, chip)):
    start = time.perf_counter()
    call()
    print(json.dumps(time.perf_counter() - start))
kernels = [launch.symbol.decode() for launch in runtime.launches()]
assert kernels and all("_compiled_" in kernel for kernel in kernels), kernels
"""
_TIMEOUT_SECONDS = 120.0


def add_row(report: Report, quick: bool, progress: Progress) -> None:
    """Add the longest first call; ``quick`` makes fewer of them."""
    chips, calls, times = (_CHIPS[:1], _QUICK_CALLS, 1) if quick else (_CHIPS, _CALLS, _TIMES)
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
                seconds = [_first_call(folder, chip, direction, hdim) for _ in range(times)]
                name = f"{chip}, {direction} with all features, hdim {hdim}"
                progress(f"first call, {name}: {', '.join(f'{x:.2f}' for x in seconds)} s")
                longest = max(longest, median(seconds))
    what = (
        "first call of a compiled kernel with all features, nothing but the launcher in the cache, "
        f"median of {times}, the longest of {len(chips) * len(calls)}"
    )
    report.at_most(what, longest, _MOST_SECONDS, "s")


def call_of(direction: str, hdim: int) -> Callable[[], object]:
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


def target_without_trees(runtime: RecordingRuntime, chip_name: str) -> AmdTarget:
    """A recorded GPU without code objects: compiled kernels serve all of its calls."""
    target = runtime.target(chip_name)
    return AmdTarget(target.chip, target.device_index, target.compute_units, runtime, trees=())


def _first_call(cache_of_launcher: str, chip: str, direction: str, hdim: int) -> float:
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as cache:
        shutil.copytree(cache_of_launcher, cache, dirs_exist_ok=True)
        process = run_fresh(
            *(_FIRST_CALL, chip, direction, str(hdim), cache),
            failure="the process for a first call failed",
            timeout=_TIMEOUT_SECONDS,
        )
    seconds: float = json.loads(process.stdout)
    return seconds
