"""Builds several specs at once: code objects in threads, libraries in processes of their own.

`torch.utils.cpp_extension` takes compiler and ninja from the environment, of which a process has
one; so a process builds one library at a time. Compilers of device code are told everything.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from queue import SimpleQueue

from .errors import BuildError
from .fresh_process import NUMPY_IS_MISSING, fresh_python
from .loader import load, read
from .spec import BuildSpec
from .status import building, is_verbose
from .toolchain.environment import user_environment

_PROGRAM = f"""
import warnings
warnings.filterwarnings("ignore", "{NUMPY_IS_MISSING}")
from jitfmha.jit.build_processes import work
work()
"""


def build_all(specs: Sequence[BuildSpec], jobs: int) -> Iterator[tuple[BuildSpec, float]]:
    """Build what is not in the cache, ``jobs`` at a time; yields each with the seconds it took.

    What is built is loaded, too, which shows that it can be. Raises as `load` and `read` do, for
    the first one that fails, when those that were begun have ended.
    """
    jobs = min(jobs, len(specs))
    if jobs < 2:
        for spec in specs:
            yield spec, _build(spec)
        return
    idle: SimpleQueue[_Builder] = SimpleQueue()

    def build(spec: BuildSpec) -> float:
        if spec.toolchain != "host_cpp":
            return _build(spec)
        builder = idle.get()
        try:
            with building(spec.name, spec.why):
                return builder.build(spec)
        finally:
            idle.put(builder)

    with ExitStack() as started:
        for _ in range(min(jobs, sum(spec.toolchain == "host_cpp" for spec in specs))):
            builder = _Builder()
            started.callback(builder.end)
            idle.put(builder)
        pool = ThreadPoolExecutor(jobs)
        futures = {pool.submit(build, spec): spec for spec in specs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _build(spec: BuildSpec) -> float:
    start = time.perf_counter()
    (load if spec.toolchain == "host_cpp" else read)(spec)
    return time.perf_counter() - start


class _Builder:
    """A process that builds one spec after the other."""

    def __init__(self) -> None:
        # Who started it says what is built.
        environment = user_environment() | {"JITFMHA_VERBOSE": "1" if is_verbose() else "quiet"}
        self._process = subprocess.Popen(
            fresh_python(_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def build(self, spec: BuildSpec) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(spec, self._process.stdin)
            self._process.stdin.flush()
            result: float | Exception = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            raise BuildError(
                f"the process that built {spec.name} ended with exit status {code}"
            ) from error
        if isinstance(result, Exception):
            raise result
        return result

    def end(self) -> None:
        """End it, and what it builds."""
        self._process.terminate()
        self._process.communicate()


def work() -> None:
    """Build what stdin asks for, and answer on stdout: with seconds, or the error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers say belongs to stderr
    while True:
        try:
            spec: BuildSpec = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: float | Exception
        try:
            answer = _build(spec)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()
