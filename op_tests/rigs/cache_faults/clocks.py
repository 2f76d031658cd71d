"""Clocks that jump, clocks that disagree, and files with times of another age.

Neither the time of day nor a modification time may decide whether an entry is valid, whether a
build works, or whether a builder is taken for dead.
"""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Sequence
from pathlib import Path

from jitfmha.bench.report import Progress
from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .callers import (
    Call,
    Callers,
    Scratch,
    expect_answer,
    expect_clean,
    new_scratch,
    seeded_rng,
    shared_callers,
)
from .faulty_system import wrong_clock
from .outcome import Extent, Outcome
from .processes import wait_until
from .watched_compiler import WatchedCompiler

_DAY = 24 * 3600
_YEAR = 365 * _DAY
_AGES = (0, 1, 2**31 - 1, 2**31 + _YEAR, 2**32 + _YEAR)  # Seconds since the epoch.
_Jumps = tuple[int, ...]  # For wrong_clock.
_RIGHT: _Jumps = (0,)
_JUMPS: tuple[_Jumps, ...] = (
    (-10 * _YEAR,),
    (10 * _YEAR,),
    (-2 * _DAY, 2 * _DAY),
    (0, -_YEAR, _YEAR, -3600, 3600),
)
_STAMPS = ("197001020000", "203801190314", "209912312359")  # For touch.
_RANDOM_TIMES = {Extent.SHORT: 3, Extent.LONG: 60}
_LATEST = 2**32


def run(extent: Extent, progress: Progress, seed: int | None = None) -> Outcome:
    """Entries of all ages, builds under all clocks, and a builder that others see in the past."""
    rng = seeded_rng(__name__, progress, seed)
    outcome = Outcome()
    callers = shared_callers()
    _old_and_future_entries(callers, extent, rng, outcome)
    for jumps in _JUMPS if extent is Extent.LONG else rng.sample(_JUMPS, 2):
        _wrong_clock(callers, jumps, "tiny1", outcome)
        _builder_at_work(callers, jumps, outcome)
    if extent is Extent.LONG:
        _wrong_clock(callers, _JUMPS[-1], "attention", outcome)
    for stamp in _STAMPS if extent is Extent.LONG else rng.sample(_STAMPS, 1):
        _odd_sources(callers, stamp, outcome)
    return outcome


def _old_and_future_entries(
    callers: Callers, extent: Extent, rng: random.Random, outcome: Outcome
) -> None:
    def clocks() -> Sequence[_Jumps]:
        return (_RIGHT, *_JUMPS) if extent is Extent.LONG else [rng.choice((_RIGHT, *_JUMPS))]

    with new_scratch() as scratch:
        answer = callers.call(Call(scratch.environment))
        expect_answer(outcome, answer, "a call at the right time", how="built")
        for age in _AGES:
            for path in _everything(scratch):
                os.utime(path, (age, age), follow_symlinks=False)
            _expect_no_build(callers, scratch, clocks(), f"everything has the time {age}", outcome)
        for attempt in range(_RANDOM_TIMES[extent]):
            for path in _everything(scratch):
                age = rng.randrange(_LATEST)
                os.utime(path, (age, age), follow_symlinks=False)
            _expect_no_build(callers, scratch, clocks(), f"random times, {attempt}", outcome)


def _expect_no_build(
    callers: Callers, scratch: Scratch, clocks: Sequence[_Jumps], what: str, outcome: Outcome
) -> None:
    for jumps in clocks:
        answer = callers.call(Call({**scratch.environment, **wrong_clock(*jumps)}))
        expect_answer(outcome, answer, f"{what}, the clock is off by {jumps}", how="loaded")


def _everything(scratch: Scratch) -> list[Path]:
    return [scratch.cache, *scratch.cache.rglob("*")]


def _wrong_clock(callers: Callers, jumps: _Jumps, kernel: str, outcome: Outcome) -> None:
    with new_scratch() as scratch:
        what = f"{kernel} with a clock that is off by {jumps}"
        call = Call({**scratch.environment, **wrong_clock(*jumps)}, kernel)
        expect_answer(outcome, callers.call(call), what, how="built")
        expect_clean(outcome, scratch, what)
        expect_answer(outcome, callers.call(call), f"{what}, again", how="loaded")
        answer = callers.call(Call(scratch.environment, kernel))
        expect_answer(outcome, answer, f"{what}, then the right one", how="loaded")


def _builder_at_work(callers: Callers, jumps: _Jumps, outcome: Outcome) -> None:
    """Others may see it years ago, but not take it for dead."""
    what = f"a builder, seen by clocks that are off by {jumps}"
    with new_scratch() as scratch:
        compiler = WatchedCompiler.install(scratch.root, list(find_host_cpp().command))
        environment = {**scratch.environment, "CXX": str(compiler.path)}
        compiler.hold.touch()
        builder = callers.start(Call(environment))
        outcome.expect(_has_started(compiler), f"{what}: did not start")
        other = Call({**environment, **wrong_clock(*jumps), "CXX": None}, "tiny2")
        # It builds something else, and sweeps what it takes for abandoned.
        expect_answer(outcome, callers.call(other), f"{what}: another", how="built")
        waiting = callers.start(Call({**environment, **wrong_clock(*jumps)}))
        compiler.hold.unlink()
        expect_answer(outcome, builder.finish(), f"{what}: itself", how="built")
        expect_answer(outcome, waiting.finish(), f"{what}: one who waits", how="loaded")
        outcome.expect(compiler.runs().count("compile") == 1, f"{what}: {compiler.runs()}")
        expect_clean(outcome, scratch, what)


def _has_started(compiler: WatchedCompiler) -> bool:
    return wait_until(lambda: "compile" in compiler.runs(), limit_seconds=300.0)


def _odd_sources(callers: Callers, stamp: str, outcome: Outcome) -> None:
    """The files of a build get their times late, or from a server with another clock."""
    with new_scratch() as scratch:
        real = find_host_cpp().command
        compiler = scratch.root / "late-c++"
        compiler.write_text(
            "#!/bin/sh\n"
            f'case " $* " in *" -c "*) find .. -type f -exec touch -t {stamp} {{}} + ;; esac\n'
            f'{shlex.join(real)} "$@" || exit\n'
            f'case " $* " in *" -o "*) find .. -type f -exec touch -t {stamp} {{}} + ;; esac\n',
            encoding="utf-8",
        )
        compiler.chmod(0o700)
        environment = {**scratch.environment, "CXX": str(compiler)}
        what = f"a build whose files are from {stamp}"
        expect_answer(outcome, callers.call(Call(environment)), what, how="built")
        answer = callers.call(Call(environment))
        expect_answer(outcome, answer, f"{what}, again", how="loaded")
        expect_clean(outcome, scratch, what)
