"""A pytest plugin: every launcher of this process is built with AddressSanitizer and UBSan.

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) python -m pytest -p sanitized_launchers ...

The first fault ends the process, with a report on standard error. `test_sanitized.py` runs the
other tests of this folder in this way.
"""

import dataclasses
import os
from collections.abc import Callable
from functools import lru_cache

import pytest

from jitfmha import jit
from jitfmha.kernels import cpu
from jitfmha.kernels import launcher as amd_launcher

OPTIMISE = "JITFMHA_TEST_SANITIZED_OPTIMISE"
"""The level in the environment: 0 compiles three times as fast as 1."""

SANITIZERS = "-fsanitize=address,undefined"
_CFLAGS = (SANITIZERS, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")

_plain = (cpu.launcher_spec, amd_launcher.launcher_spec)


def sanitized(spec: jit.BuildSpec) -> jit.BuildSpec:
    """The same sources with other flags; another entry of the cache."""
    level = f"-O{os.environ.get(OPTIMISE, '0')}"
    cflags = [level if flag in ("-O2", "-O3") else flag for flag in spec.cflags]
    return dataclasses.replace(
        spec, cflags=(*cflags, *_CFLAGS), ldflags=(*spec.ldflags, SANITIZERS)
    )


def _replacement(plain: Callable[..., jit.BuildSpec]) -> Callable[..., jit.BuildSpec]:
    @lru_cache(maxsize=256)
    def launcher_spec(*traits: object) -> jit.BuildSpec:
        return sanitized(plain(*traits))

    return launcher_spec


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("LD_PRELOAD")  # compilers would have the sanitizer, too, and be slow
    cpu.launcher_spec, amd_launcher.launcher_spec = map(_replacement, _plain)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    loaded = [event.name for event in jit.build_log()]
    terminalreporter.write_line(f"loaded with sanitizers: {', '.join(loaded)}")
