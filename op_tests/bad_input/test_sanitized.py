"""The host code of the launchers, built with AddressSanitizer and UBSan, passes the same tests."""

import os
import re
from pathlib import Path

import pytest
from sanitized_launchers import OPTIMISE
from subprocesses import ROOT, run_program, run_python

from jitfmha.jit.toolchain.host_cpp import find_host_cpp

_FOLDER = Path(__file__).parent
_TESTS = ("test_functions.py", "test_gradients.py", "test_amd.py")
_SECONDS, _LONG_SECONDS = 900, 3600

# Reads one float behind a tensor's memory, through a launcher that is built like all others.
_FAULT = """
import ctypes, torch
from jitfmha import jit
from sanitized_launchers import sanitized

source = 'extern "C" float read(const float* from, int i) { return from[i]; }'
library = jit.load(sanitized(jit.BuildSpec("reads_too_far", {"read.cpp": source})))
library.read.argtypes = [ctypes.c_void_p, ctypes.c_int]
library.read.restype = ctypes.c_float
x = torch.ones(37)
assert library.read(x.data_ptr(), 36) == 1
print("so far, so good", flush=True)
library.read(x.data_ptr(), 37)
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What a process needs that loads sanitized libraries; skips where there is none."""
    compiler = list(find_host_cpp().command)
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = run_program(*compiler, f"-print-file-name={name}", code=None).stdout.strip()
        if not os.path.isabs(path):
            pytest.skip(f"{compiler[0]} has no {name}")
        found.append(path)
    return {
        # AddressSanitizer looks for the C++ runtime when it starts, before torch brings it.
        "LD_PRELOAD": " ".join(found),
        # The interpreter's own leaks are none of ours. On the stack that watches uses after a
        # return, code of GCC 13 with vectors of 64 bytes crashes.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"
        ":detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # What pytest puts there for the tests, and is needed before it does.
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(_FOLDER), str(_FOLDER.parent), os.environ.get("PYTHONPATH")))
        ),
    }


def test_a_fault_is_noticed(environment, launcher_cache):
    """Or everything else here would prove nothing."""
    done = run_python("-c", _FAULT, code=None, timeout=_SECONDS, **environment)
    assert "so far, so good" in done.stdout, done.stderr
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_bad_input(environment, launcher_cache, seed, request):
    is_long = request.config.getoption("--exhaustive")
    level = "1" if is_long else "0"
    tests = [str(_FOLDER / name) for name in _TESTS]
    # What a sanitizer says before it ends the process is not caught with it.
    plugins = ["-p", "sanitized_launchers", "-p", "no:cacheprovider", "--capture=sys"]
    is_drawn_anew = is_long or request.config.getoption("--seed") is not None  # see `sweep`
    options = ["--seed", str(seed)] if is_drawn_anew else []
    options += ["--exhaustive"] if is_long else []
    arguments = ("-m", "pytest", "-q", *plugins, *options, *tests)
    seconds = _LONG_SECONDS if is_long else _SECONDS
    environment = environment | {OPTIMISE: level}
    done = run_python(*arguments, cwd=ROOT, code=None, timeout=seconds, **environment)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    print(done.stdout[-1500:])
    calls = re.search(r"bad input: (\d+) calls", output)
    assert calls, output[-2000:]
    assert int(calls[1]) >= (20_000 if is_long else 300)
    loaded = re.search(r"loaded with sanitizers: (.*)", output)
    assert loaded, output[-2000:]
    for name in ("cpu_fwd_fp32", "cpu_fwd_bf16", "cpu_bwd_bf16", "amd_forward_"):
        assert name in loaded[1]
