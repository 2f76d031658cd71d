"""A cache that grows past its limit: what was not used for longest goes, never what is in use."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from jitfmha.bench.report import Progress

from .callers import (
    Call,
    Callers,
    RunningCall,
    Scratch,
    expect_answer,
    expect_clean,
    expect_refused,
    new_scratch,
    seeded_rng,
    shared_callers,
)
from .damaged_files import is_intact
from .outcome import Extent, Outcome

_HOUR = 3600.0
_BAD_LIMITS = (
    "lots",
    "-1",
    "1e9",
    "10Q",
    "500 MB or so",
    "nan",
    "inf",
    "0x10",
    "9" * 400,
    "9" * 5000,
)
_GOOD_LIMITS = ("0", "1", "500M", "1.5 gib", " 2G ", "20000T", "")
_BUILDERS = {Extent.SHORT: 4, Extent.LONG: 12}
_ROUNDS = {Extent.SHORT: 1, Extent.LONG: 15}


def run(extent: Extent, progress: Progress, seed: int | None = None) -> Outcome:
    """The order in which entries go, what stays, bad values, and builders that evict at once."""
    rng = seeded_rng(__name__, progress, seed)
    outcome = Outcome()
    callers = shared_callers()
    _bad_limits(callers, outcome)
    for attempt in range(_ROUNDS[extent]):
        _least_recently_used_go(callers, rng, f"attempt {attempt}", outcome)
    _in_use_stays(callers, outcome)
    _nothing_but_the_new_one(callers, outcome)
    for number in range(_ROUNDS[extent]):
        _builders_at_once(callers, rng, _BUILDERS[extent], f"round {number}", outcome)
    progress(f"{_ROUNDS[extent]} rounds of {_BUILDERS[extent]} builders that evict at once")
    return outcome


def _limited(scratch: Scratch, limit: object) -> dict[str, str | None]:
    return {**scratch.environment, "JITFMHA_CACHE_LIMIT": str(limit)}


def _bad_limits(callers: Callers, outcome: Outcome) -> None:
    with new_scratch() as scratch:
        for limit in _BAD_LIMITS:
            answer = callers.call(Call(_limited(scratch, limit)))
            what = f"the limit {limit[:20]!r}"
            expect_refused(outcome, answer, what, "JITFMHA_CACHE_LIMIT", limit[:20], "500M")
        outcome.expect(not scratch.cache.exists(), "a bad limit: something was built")
        for number, limit in enumerate(_GOOD_LIMITS):
            answer = callers.call(Call(_limited(scratch, limit), f"tiny{number}"))
            expect_answer(outcome, answer, f"the limit {limit!r}", how="built")


def _least_recently_used_go(
    callers: Callers, rng: random.Random, attempt: str, outcome: Outcome
) -> None:
    with new_scratch() as scratch:
        kernels = [f"tiny{number}" for number in rng.sample(range(100, 1000), 6)]
        paths = {kernel: _build(callers, scratch, kernel, outcome) for kernel in kernels}
        size = max(map(_size, paths.values()))
        used = rng.sample(kernels, len(kernels))  # The one used last comes last.
        for age, kernel in enumerate(reversed(used)):
            then = time.time() - (2 + age) * _HOUR
            os.utime(paths[kernel], (then, then))
        # A call refreshes the oldest.
        again = used.pop(0)
        answer = callers.call(Call(scratch.environment, again))
        expect_answer(outcome, answer, f"{attempt}: {again}", how="loaded")
        used.append(again)
        stay = rng.randrange(1, 6)
        # So many and the new one fit, and half of another.
        answer = callers.call(Call(_limited(scratch, int((stay + 1.5) * size)), "tiny1"))
        expect_answer(outcome, answer, f"{attempt}: a call past the limit", how="built")
        left = {kernel for kernel in kernels if paths[kernel].exists()}
        expected = set(used[len(used) - stay :])
        outcome.expect(left == expected, f"{attempt}: {left} are left of {used}, not {expected}")
        outcome.expect(Path(answer.library).exists(), f"{attempt}: the new entry is gone")
        expect_clean(outcome, scratch, attempt)


def _in_use_stays(callers: Callers, outcome: Outcome) -> None:
    with new_scratch() as scratch:
        oldest = _build(callers, scratch, "tiny1", outcome)
        os.utime(oldest, (1, 1))
        user = callers.start(Call(scratch.environment, "tiny1", hold=True))
        expect_answer(outcome, user.wait_until_held(), "one who stays", how="loaded")
        os.utime(oldest, (1, 1))
        second = _build(callers, scratch, "tiny2", outcome)
        _build(callers, scratch, "tiny3", outcome, limit=1)
        outcome.expect(is_intact(oldest), "an entry in use was evicted")
        outcome.expect(not second.exists(), "an entry that nobody uses was not evicted")
        expect_answer(outcome, user.finish(), "one who stayed", how="loaded")
        _build(callers, scratch, "tiny4", outcome, limit=1)
        outcome.expect(not oldest.exists(), "an entry that nobody uses any more was not evicted")
        outcome.expect(len(scratch.entry_names()) == 1, f"left are {scratch.entry_names()}")
        expect_clean(outcome, scratch, "entries in use")


def _nothing_but_the_new_one(callers: Callers, outcome: Outcome) -> None:
    """0 is what it says: no room for anything but what was just built."""
    for limit in (0, 1):
        with new_scratch() as scratch:
            for kernel in ("tiny1", "tiny2", "tiny3"):
                path = _build(callers, scratch, kernel, outcome, limit=limit)
                names = scratch.entry_names()
                outcome.expect(names == [path.name], f"limit {limit}: {names} after {kernel}")
            answer = callers.call(Call(_limited(scratch, limit), "tiny3"))
            expect_answer(outcome, answer, f"limit {limit}: the last one again", how="loaded")


def _builders_at_once(
    callers: Callers, rng: random.Random, count: int, label: str, outcome: Outcome
) -> None:
    with new_scratch() as scratch:
        size = _size(_build(callers, scratch, "tiny1", outcome))
        limit = rng.randrange(1, 4 * size)
        calls = [
            Call(_limited(scratch, limit), f"tiny{number}", hold=rng.random() < 0.3)
            for number in rng.choices(range(10, 10 + count), k=count)
        ]
        running = [callers.start(call) for call in calls]
        held = [caller for caller, call in zip(running, calls, strict=True) if call.hold]
        _expect_intact_while_held(held, label, outcome)
        for caller in running:
            expect_answer(outcome, caller.finish(), f"{label}: a builder among others")
        newest = _build(callers, scratch, "tiny2", outcome, limit=limit)
        total = sum(map(_size, scratch.entries.iterdir()))
        allowed = max(limit, _size(newest))
        outcome.expect(total <= allowed, f"{label}: {total} bytes, {allowed} allowed")
        for entry in scratch.entries.iterdir():
            outcome.expect(is_intact(entry), f"{label}: {entry.name} is not valid")
        expect_clean(outcome, scratch, label)


def _expect_intact_while_held(held: list[RunningCall], label: str, outcome: Outcome) -> None:
    for caller in held:
        answer = caller.wait_until_held()
        expect_answer(outcome, answer, f"{label}: one who stays among others")
        library = Path(answer.library)
        outcome.expect(is_intact(library.parent), f"{label}: {library} was evicted while in use")


def _build(
    callers: Callers, scratch: Scratch, kernel: str, outcome: Outcome, limit: object = ""
) -> Path:
    answer = callers.call(Call(_limited(scratch, limit), kernel))
    expect_answer(outcome, answer, f"{kernel} with the limit {limit!r}", how="built")
    return Path(answer.library).parent


def _size(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir())
