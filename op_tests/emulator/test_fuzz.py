"""Damaged code objects and random instructions end in an error, never in a crash or a hang."""

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jitfmha import jit
from jitfmha.emulator.library import build_spec

_WORKER = Path(__file__).with_name("fuzz_worker.py")
_KINDS = ("code_objects", "instructions")
_SECONDS, _LONG_SECONDS = 4.0, 90.0
_CALLS, _LONG_CALLS, _CALLS_OF_PROCESS = 60, 10_000, 500
# Beyond the time that it is given: loading, compiling what it damages, one slow case.
_PATIENCE = 300.0


def _fuzz(
    kind: str,
    seed: int,
    seconds: float,
    folder: Path,
    *,
    cases: range | None = None,
    library: Path | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    progress = folder / "progress"
    command = [sys.executable, str(_WORKER), "--kind", kind, "--seed", str(seed)]
    if library is not None:
        command += ["--library", str(library)]
    full = [*command, "--seconds", str(seconds), "--progress", str(progress)]
    if cases is not None:
        full += ["--first", str(cases.start), "--cases", str(len(cases))]
    try:
        done = subprocess.run(
            full,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + _PATIENCE,
            check=False,
        )
        how, output = f"exit status {done.returncode}", done.stdout + done.stderr
        if done.returncode == 0:
            return
    except subprocess.TimeoutExpired:
        how, output = "it hangs", ""
    case = struct.unpack("<q", progress.read_bytes())[0] if progress.exists() else "none yet"
    repeat = " ".join([*command, "--case", str(case)])
    pytest.fail(f"case {case}: {how}\n{output[-4000:]}\nrepeat with: {repeat}")


@pytest.mark.parametrize("kind", _KINDS)
def test_errors_but_no_crash(kind, seed, tmp_path, request, emulator):
    # `emulator` has built the library that the worker finds in the cache.
    is_long = request.config.getoption("--exhaustive")
    _fuzz(kind, seed, _LONG_SECONDS if is_long else _SECONDS, tmp_path)


def test_calls_with_damaged_code_objects(seed, tmp_path, request, emulator):
    """What a user's call meets: the checks of Python, the launcher, and a kernel that may run."""
    number = _LONG_CALLS if request.config.getoption("--exhaustive") else _CALLS
    for first in range(0, number, _CALLS_OF_PROCESS):
        cases = range(first, min(first + _CALLS_OF_PROCESS, number))
        _fuzz("calls", seed, 0.5 * len(cases), tmp_path, cases=cases)


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A build with AddressSanitizer and UBSan, and the environment that it needs; else skips."""
    # AddressSanitizer looks for the C++ runtime when it starts, before the emulator brings it.
    runtimes = [_library_of_compiler(name) for name in ("libasan.so", "libstdc++.so.6")]
    if not all(runtimes):
        pytest.skip("there is no C++ compiler with sanitizers")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    spec = build_spec("plain")
    cflags = ["-O1" if flag == "-O2" else flag for flag in spec.cflags]
    cflags += [*flags, "-g", "-fno-omit-frame-pointer"]
    spec = replace(
        spec,
        name="emulator_sanitized",
        cflags=tuple(cflags),
        ldflags=(*spec.ldflags, *flags),
        objects=tuple(replace(each, cflags=tuple(cflags)) for each in spec.objects),
    )
    library = tmp_path_factory.mktemp("sanitized") / "emulator.so"
    library.write_bytes(jit.read(spec))
    # The interpreter's own leaks are none of ours.
    return library, {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _library_of_compiler(name: str) -> str:
    """Its path; empty where the compiler has none."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return ""
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return path if Path(path).is_absolute() else ""


@pytest.mark.parametrize("kind", _KINDS)
def test_no_undefined_behaviour(kind, seed, tmp_path, request):
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive builds the emulator with AddressSanitizer and UBSan")
    library, environment = request.getfixturevalue("sanitized")
    _fuzz(kind, seed, _LONG_SECONDS, tmp_path, library=library, environment=environment)
