"""Readers load again and again while others publish, rebuild, clear and evict.

Each load takes place in a process of its own, which maps the library and calls it. A part of the
readers hold on to what they loaded until its entry is gone, and only then call it: its pages have
to come from a file that has lost its name. The launchers are small, but their answers depend on
every page of the library.
"""

import os
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from jitfmha import jit
from jitfmha.jit.cache.directory import CacheDirectory, cache_dir
from jitfmha.jit.cache.entry import open_entry
from jitfmha.jit.cache.eviction import discard
from jitfmha.jit.cache.key import EntryKey, entry_key
from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .outcome import Extent, Outcome
from .processes import Worker, wait_for_exit, wait_until
from .sandbox import Sandbox

# At least; it goes on until everybody has met, which on a busy machine takes longer.
_SECONDS = {Extent.SHORT: 3.0, Extent.LONG: 60.0}
_READERS = 3
_LAUNCHERS = 3
_TABLE_BYTES = 1 << 17
LIMIT_SECONDS = {Extent.SHORT: 180.0, Extent.LONG: 400.0}
_LOAD_LIMIT_SECONDS = 60.0
_HOLD_SECONDS = 1.0
_WATCH_SECONDS = 0.5
_END = "end"

_SOURCE = """\
// A table of many pages, and the sum of all of it.
static const char table[] = "{letters}";
extern "C" long answer() {{
  long sum = {number};
  for (char letter : table) sum += letter;
  return sum;
}}
"""


class _Step(IntEnum):
    """How one step of a process ended, as its exit code."""

    FOUND = 0
    FAILED = 1
    BUILT = 10
    EVICTED_WHILE_LOADED = 11
    CLEARED = 12
    SAW_NOTHING_PARTIAL = 13


_MEETING = (_Step.BUILT, _Step.EVICTED_WHILE_LOADED, _Step.CLEARED)


def run_inside(sandbox: Sandbox, extent: Extent) -> Outcome:
    """All processes, for a time."""
    # Whoever builds would import it, and the time is for builds.
    import torch.utils.cpp_extension  # noqa: F401

    outcome = Outcome()
    specs = [_spec(f"shared{number}", number) for number in range(_LAUNCHERS)]
    steps_seen = sandbox.root / "steps"
    steps_seen.mkdir()
    tiny = {"JITFMHA_CACHE_LIMIT": "1"}

    def start(
        step: Callable[[random.Random], _Step], limit: dict[str, str] | None = None
    ) -> Worker:
        rng = random.Random(sandbox.rng.randrange(2**31))
        return sandbox.start(lambda: _repeat(step, rng, steps_seen), limit)

    workers = {f"reader {i}": start(lambda rng: _read(rng, specs)) for i in range(_READERS)}
    workers["publisher"] = start(lambda rng: _rebuild(rng, specs))
    workers["watcher"] = start(_watch)
    workers["clearer"] = start(_clear)
    workers["evictor"] = start(_evict, tiny)
    time.sleep(_SECONDS[extent])
    wait_until(
        lambda: all((steps_seen / step.name).exists() for step in _MEETING), _LOAD_LIMIT_SECONDS
    )
    (steps_seen / _END).touch()
    steps: Counter[str] = Counter()
    for name, worker in workers.items():
        ending = worker.end(2 * _LOAD_LIMIT_SECONDS)
        outcome.expect(ending.status == 0, f"{name}: {ending}")
        counts, failures = ending.report.get("counts", {}), ending.report.get("failures", [])
        assert isinstance(counts, dict)
        assert isinstance(failures, list)
        outcome.attempts += sum(counts.values())
        outcome.failures += [f"{name}: {failure}: {ending.output[-2000:]}" for failure in failures]
        steps.update(counts)
    _check_that_they_met(outcome, steps)
    _check_what_is_left(sandbox, outcome, specs)
    listed = ", ".join(f"{count} {name.lower().replace('_', ' ')}" for name, count in steps.items())
    sandbox.progress(f"{_SECONDS[extent]:.0f} s with {len(workers)} processes: {listed}")
    return outcome


def _spec(name: str, number: int) -> jit.BuildSpec:
    source = _SOURCE.format(letters="a" * _TABLE_BYTES, number=number)
    return jit.BuildSpec(name, {"table.cpp": source})


def _repeat(
    step: Callable[[random.Random], _Step], rng: random.Random, steps_seen: Path
) -> dict[str, object]:
    """One child process after the other, each of which takes one step, until the end is there."""
    counts: Counter[str] = Counter()
    failures = []
    while not (steps_seen / _END).exists():
        seed = rng.randrange(2**31)
        child = os.fork()
        if child == 0:
            _take(step, random.Random(seed))
        code = wait_for_exit(child, _LOAD_LIMIT_SECONDS)
        if code in set(_Step) - {_Step.FAILED}:
            counts[_Step(code).name] += 1
            (steps_seen / _Step(code).name).touch()
        else:
            failures.append("stuck" if code is None else f"exit code {code}")
    return {"counts": counts, "failures": failures}


def _take(step: Callable[[random.Random], _Step], rng: random.Random) -> None:
    code = int(_Step.FAILED)
    try:
        # An entry that is seen half written or half removed would be built again, with a warning.
        warnings.simplefilter("error", RuntimeWarning)
        code = int(step(rng))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _read(rng: random.Random, specs: list[jit.BuildSpec]) -> _Step:
    number = rng.randrange(len(specs))
    holds = rng.random() < 0.5
    library = jit.load(specs[number])
    path = jit.build_log()[0].path
    until = time.monotonic() + (_HOLD_SECONDS if holds else 0.0)
    while _is_mapped_from(path) and time.monotonic() < until:
        time.sleep(0.002)
    is_gone = not _is_mapped_from(path)
    _check(int(library.answer()), number)
    if is_gone:
        return _Step.EVICTED_WHILE_LOADED
    return _Step.BUILT if jit.build_log()[0].how == "built" else _Step.FOUND


def _watch(_rng: random.Random) -> _Step:
    """Open every entry over and over: what is there under its name is whole."""
    entries = CacheDirectory(cache_dir()).entries
    until = time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < until:
        for path in entries.glob("*"):
            key = EntryKey.parse(path.name)
            entry = open_entry(path, key) if key else None
            if entry is not None:
                entry.close()
        time.sleep(0.001)  # Its locks keep eviction away.
    return _Step.SAW_NOTHING_PARTIAL


def _rebuild(rng: random.Random, specs: list[jit.BuildSpec]) -> _Step:
    """Take an entry away, as for one that is damaged, and publish it again."""
    number = rng.randrange(len(specs))
    directory = CacheDirectory(cache_dir())
    name = entry_key(specs[number], find_host_cpp()).directory_name
    discard(directory.entries / name, directory.trash)
    return _load(specs[number], number)


def _clear(rng: random.Random) -> _Step:
    time.sleep(rng.uniform(0.0, 0.8))
    jit.cache_clear()
    return _Step.CLEARED


def _evict(rng: random.Random) -> _Step:
    """A build in a cache that has no room for any other."""
    number = rng.randrange(1000)
    time.sleep(rng.uniform(0.0, 0.5))
    return _load(_spec(f"other{number % 4}", number), number)


def _load(spec: jit.BuildSpec, number: int) -> _Step:
    _check(int(jit.load(spec).answer()), number)
    return _Step.BUILT if jit.build_log()[0].how == "built" else _Step.FOUND


def _check(answer: int, number: int) -> None:
    expected = number + _TABLE_BYTES * ord("a")
    if answer != expected:
        raise RuntimeError(f"the library answers {answer} instead of {expected}")


def _is_mapped_from(path: Path) -> bool:
    """Whether the file at ``path`` is the one that this process has mapped."""
    try:
        number = os.stat(path).st_ino
    except FileNotFoundError:
        return False
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return f" {number} " in maps


def _check_that_they_met(outcome: Outcome, steps: Counter[str]) -> None:
    for step in _MEETING:
        outcome.expect(steps[step.name] > 0, f"nothing was {step.name.lower()} in all that time")


def _check_what_is_left(sandbox: Sandbox, outcome: Outcome, specs: list[jit.BuildSpec]) -> None:
    def look() -> dict[str, object]:
        _load(specs[0], 0)
        return {"invalid": [str(entry.path) for entry in jit.cache_entries() if not entry.valid]}

    ending = sandbox.run(look, _LOAD_LIMIT_SECONDS)
    outcome.expect(ending.report.get("invalid") == [], f"invalid entries are left: {ending}")
    ending = sandbox.run(lambda: {"cleared": jit.cache_clear()}, _LOAD_LIMIT_SECONDS)
    outcome.expect(ending.status == 0, f"the cache cannot be cleared: {ending}")
    counts = sandbox.counts()
    left = {name: count for name, count in counts.items() if count and name != "locks"}
    outcome.expect(not left, f"left behind after clearing: {left}")
    running = sandbox.still_running(grace_seconds=1.0)
    outcome.expect(not running, f"still running: {running}")
