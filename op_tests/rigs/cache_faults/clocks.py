"""Clocks that jump, clocks that disagree, and files with times of another age.

Neither the time of day nor a modification time may decide whether an entry is valid, whether a
build works, or whether a builder is taken for dead.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from jitfmha.jit.toolchain.host_cpp import find_host_cpp

from .callers import Call, Scratch, Trial, new_scratch
from .faulty_system import wrong_clock
from .outcome import Extent
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


def run(trial: Trial) -> None:
    """Entries of all ages, builds under all clocks, and a builder that others see in the past."""
    _old_and_future_entries(trial)
    for jumps in _JUMPS if trial.is_long else trial.rng.sample(_JUMPS, 2):
        _wrong_clock(trial, jumps, "tiny1")
        _builder_at_work(trial, jumps)
    if trial.is_long:
        _wrong_clock(trial, _JUMPS[-1], "attention")
    for stamp in _STAMPS if trial.is_long else trial.rng.sample(_STAMPS, 1):
        _odd_sources(trial, stamp)


def _old_and_future_entries(trial: Trial) -> None:
    def clocks() -> Sequence[_Jumps]:
        return (_RIGHT, *_JUMPS) if trial.is_long else [trial.rng.choice((_RIGHT, *_JUMPS))]

    with new_scratch() as scratch:
        trial.builds(Call(scratch.environment), "a call at the right time")
        for age in _AGES:
            for path in _everything(scratch):
                os.utime(path, (age, age), follow_symlinks=False)
            _expect_no_build(trial, scratch, clocks(), f"everything has the time {age}")
        for attempt in range(_RANDOM_TIMES[trial.extent]):
            for path in _everything(scratch):
                age = trial.rng.randrange(_LATEST)
                os.utime(path, (age, age), follow_symlinks=False)
            _expect_no_build(trial, scratch, clocks(), f"random times, {attempt}")


def _expect_no_build(trial: Trial, scratch: Scratch, clocks: Sequence[_Jumps], what: str) -> None:
    for jumps in clocks:
        trial.loads(
            Call({**scratch.environment, **wrong_clock(*jumps)}),
            f"{what}, the clock is off by {jumps}",
        )


def _everything(scratch: Scratch) -> list[Path]:
    return [scratch.cache, *scratch.cache.rglob("*")]


def _wrong_clock(trial: Trial, jumps: _Jumps, kernel: str) -> None:
    with new_scratch() as scratch:
        what = f"{kernel} with a clock that is off by {jumps}"
        call = Call({**scratch.environment, **wrong_clock(*jumps)}, kernel)
        trial.builds(call, what)
        trial.expect_clean(scratch, what)
        trial.loads(call, f"{what}, again")
        trial.loads(Call(scratch.environment, kernel), f"{what}, then the right one")


def _builder_at_work(trial: Trial, jumps: _Jumps) -> None:
    """Others may see it years ago, but not take it for dead."""
    what = f"a builder, seen by clocks that are off by {jumps}"
    with new_scratch() as scratch:
        compiler = WatchedCompiler.install(scratch.root, list(find_host_cpp().command))
        environment = {**scratch.environment, "CXX": str(compiler.path)}
        compiler.hold.touch()
        builder = trial.callers.start(Call(environment))
        trial.expect(_has_started(compiler), f"{what}: did not start")
        other = Call({**environment, **wrong_clock(*jumps), "CXX": None}, "tiny2")
        # It builds something else, and sweeps what it takes for abandoned.
        trial.builds(other, f"{what}: another")
        waiting = trial.callers.start(Call({**environment, **wrong_clock(*jumps)}))
        compiler.hold.unlink()
        trial.expect_right(builder.finish(), f"{what}: itself", how="built")
        trial.expect_right(waiting.finish(), f"{what}: one who waits", how="loaded")
        trial.expect(compiler.runs().count("link") == 1, f"{what}: {compiler.runs()}")
        trial.expect_clean(scratch, what)


def _has_started(compiler: WatchedCompiler) -> bool:
    return wait_until(lambda: "compile" in compiler.runs(), limit_seconds=300.0)


def _odd_sources(trial: Trial, stamp: str) -> None:
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
        trial.builds(Call(environment), what)
        trial.loads(Call(environment), f"{what}, again")
        trial.expect_clean(scratch, what)
