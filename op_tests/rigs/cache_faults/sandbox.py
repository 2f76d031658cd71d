"""A sandbox for scenarios with many processes: a fresh interpreter that forks the others.

It has torch imported and nothing loaded, one thread, a session, an empty cache and a temporary
directory of its own. So nothing of the program that runs the scenario leaks in, nothing leaks out,
and whatever is still running afterwards was left over by the package.
"""

import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from jitfmha.bench.report import Progress, Row
from jitfmha.jit.cache.directory import CacheDirectory
from jitfmha.jit.fresh_process import fresh_python
from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .outcome import Extent, Outcome, reported_seed
from .processes import Ending, Worker, end_with_parent, live_processes, wait_until
from .watched_compiler import WatchedCompiler

_CODE = "import sys; from rigs.cache_faults.sandbox import main; main(*sys.argv[1:])"
_UNSET = ("JITFMHA_VERBOSE", "JITFMHA_CACHE_LIMIT", "JITFMHA_EMULATE", "JITFMHA_EMULATE_CHECK")
# A process gets this long to report that it is stuck before others do it.
_GRACE_SECONDS = 20.0


class Sandbox:
    """The scratch directory of a scenario, its cache and its processes."""

    def __init__(self, root: Path, compiler: WatchedCompiler, rng: random.Random) -> None:
        self.root = root
        self.compiler = compiler
        self.rng = rng
        self.progress: Progress = print
        self._workers = 0

    @property
    def cache(self) -> CacheDirectory:
        """The folders of the cache."""
        return CacheDirectory(self.root / "cache")

    @property
    def temporary(self) -> Path:
        """The temporary directory of all processes."""
        return self.root / "tmp"

    def start(
        self, work: Callable[[], Mapping[str, object]], environment: Mapping[str, str] | None = None
    ) -> Worker:
        """Fork a process that does ``work``."""
        self._workers += 1
        return Worker(self.root / "workers" / str(self._workers), work, environment or {})

    def run(self, work: Callable[[], Mapping[str, object]], limit_seconds: float) -> Ending:
        """Fork a process and wait for its end."""
        return self.start(work).end(limit_seconds)

    def empty_cache(self) -> None:
        """As if nobody had ever called anything."""
        shutil.rmtree(self.root / "cache", ignore_errors=True)
        self.compiler.forget()

    def counts(self) -> dict[str, int]:
        """How many files and directories lie in each folder of the cache, and in ``tmp``."""
        folders = {folder.name: folder for folder in (*self.cache.folders, self.temporary)}
        return {
            name: len(os.listdir(folder)) if folder.is_dir() else 0
            for name, folder in folders.items()
        }

    def still_running(self, grace_seconds: float, beside: Worker | None = None) -> list[str]:
        """Commands that still run when nothing should but one, given some time to end."""
        expected = {os.getpid(), beside.pid if beside else 0}

        found: list[str] = []

        def is_quiet() -> bool:
            live = live_processes(os.getsid(0), self.root)
            found[:] = [f"pid {pid}: {live[pid]}" for pid in live.keys() - expected]
            return not found

        wait_until(is_quiet, grace_seconds)
        return found


def run_in_sandbox(
    scenario: str,
    limits: Mapping[Extent, float],
    extent: Extent,
    progress: Progress,
    seed: int | None = None,
) -> Outcome:
    """Run ``run_inside(sandbox, extent)`` of a scenario's module in a fresh interpreter.

    Args:
        scenario: the full name of the module.
        limits: after so many seconds it has failed, and all of its processes are ended.
        extent: how much of it.
        progress: gets a line now and then, the seed among them.
        seed: of everything random; by default a fresh one.
    """
    limit_seconds = limits[extent]
    seed = reported_seed(scenario, progress, seed)
    with tempfile.TemporaryDirectory(prefix="jitfmha-sandbox-") as folder:
        root = Path(folder).resolve()
        (root / "tmp").mkdir()
        WatchedCompiler.install(root, list(find_host_cpp().command))
        with (root / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                fresh_python(
                    *(_CODE, scenario, extent.value, str(seed), str(root), str(limit_seconds))
                ),
                env=_environment(root),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        try:
            outcome = _listen(process, progress, limit_seconds + _GRACE_SECONDS)
            if outcome is None:
                output = (root / "stderr").read_text(errors="replace")
                return Outcome(1, [f"no result after {limit_seconds:.0f} s, or a crash: {output}"])
            left = _end_session(process.pid, root)
            outcome.expect(not left, f"still running after the end: {left}")
            return outcome
        finally:
            _end_session(process.pid, root)
            process.wait()


def main(scenario: str, extent: str, seed: str, root: str, limit_seconds: str) -> None:
    """The fresh interpreter: runs the scenario, and writes its progress and outcome to stdout."""
    import torch

    end_with_parent()
    faulthandler.dump_traceback_later(float(limit_seconds), exit=True)
    # The pool of threads that torch may start does not survive a fork (torch's own operators hang
    # in the child as well), so it is never started here.
    torch.set_num_threads(1)
    channel = os.dup(1)
    os.dup2(2, 1)
    # The one who listens must not wait for a process that is left over.
    os.register_at_fork(after_in_child=lambda: os.close(channel))

    def send(kind: str, value: object) -> None:
        os.write(channel, json.dumps({kind: value}).encode() + b"\n")

    sandbox = Sandbox(Path(root), WatchedCompiler.below(Path(root)), random.Random(int(seed)))
    sandbox.progress = lambda line: send("progress", line)
    outcome: Outcome = import_module(scenario).run_inside(sandbox, Extent(extent))
    send("outcome", asdict(outcome))


def _environment(root: Path) -> dict[str, str]:
    changes = {
        "JITFMHA_CACHE_DIR": str(root / "cache"),
        "TMPDIR": str(root / "tmp"),
        "CXX": str(root / "watched-c++"),
    }
    kept = {name: value for name, value in os.environ.items() if name not in _UNSET}
    return kept | changes


def _listen(
    process: subprocess.Popen[str], progress: Progress, limit_seconds: float
) -> Outcome | None:
    watchdog = threading.Timer(limit_seconds, process.kill)
    watchdog.daemon = True
    watchdog.start()
    assert process.stdout is not None
    with process.stdout:
        try:
            for line in process.stdout:
                message = json.loads(line)
                if "progress" in message:
                    progress(message["progress"])
                else:
                    fields = message["outcome"]
                    figures = [Row(**figure) for figure in fields.pop("figures")]
                    return Outcome(**fields, figures=figures)
        finally:
            watchdog.cancel()
    return None


def _end_session(session: int, root: Path) -> list[str]:
    """End what still runs; returns the commands."""
    running: dict[int, str] = {}
    # Its first process has told everything and is on its way out.
    for _ in range(100):
        running = live_processes(session, root)
        if not running:
            return []
        time.sleep(0.05)
    for pid in running:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return list(running.values())
