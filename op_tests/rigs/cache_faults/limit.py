"""A cache that grows past its limit: what was not used for longest goes, never what is in use."""

import os
import time
from pathlib import Path

from .callers import Call, RunningCall, Scratch, Trial, new_scratch
from .damaged_files import is_intact
from .outcome import Extent

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


def run(trial: Trial) -> None:
    """The order in which entries go, what stays, bad values, and builders that evict at once."""
    _bad_limits(trial)
    for attempt in range(_ROUNDS[trial.extent]):
        _least_recently_used_go(trial, f"attempt {attempt}")
    _in_use_stays(trial)
    _nothing_but_the_new_one(trial)
    for number in range(_ROUNDS[trial.extent]):
        _builders_at_once(trial, _BUILDERS[trial.extent], f"round {number}")
    trial.progress(
        f"{_ROUNDS[trial.extent]} rounds of {_BUILDERS[trial.extent]} builders that evict at once"
    )


def _limited(scratch: Scratch, limit: object) -> dict[str, str | None]:
    return {**scratch.environment, "JITFMHA_CACHE_LIMIT": str(limit)}


def _bad_limits(trial: Trial) -> None:
    with new_scratch() as scratch:
        for limit in _BAD_LIMITS:
            what, words = f"the limit {limit[:20]!r}", ("JITFMHA_CACHE_LIMIT", limit[:20], "500M")
            trial.refused(Call(_limited(scratch, limit)), what, *words)
        trial.expect(not scratch.cache.exists(), "a bad limit: something was built")
        for number, limit in enumerate(_GOOD_LIMITS):
            trial.builds(Call(_limited(scratch, limit), f"tiny{number}"), f"the limit {limit!r}")


def _least_recently_used_go(trial: Trial, attempt: str) -> None:
    with new_scratch() as scratch:
        kernels = [f"tiny{number}" for number in trial.rng.sample(range(100, 1000), 6)]
        paths = {kernel: _build(trial, scratch, kernel) for kernel in kernels}
        size = max(map(_size, paths.values()))
        used = trial.rng.sample(kernels, len(kernels))  # The one used last comes last.
        for age, kernel in enumerate(reversed(used)):
            then = time.time() - (2 + age) * _HOUR
            os.utime(paths[kernel], (then, then))
        # A call refreshes the oldest.
        again = used.pop(0)
        trial.loads(Call(scratch.environment, again), f"{attempt}: {again}")
        used.append(again)
        stay = trial.rng.randrange(1, 6)
        # So many and the new one fit, and half of another.
        answer = trial.builds(
            Call(_limited(scratch, int((stay + 1.5) * size)), "tiny1"),
            f"{attempt}: a call past the limit",
        )
        left = {kernel for kernel in kernels if paths[kernel].exists()}
        expected = set(used[len(used) - stay :])
        trial.expect(left == expected, f"{attempt}: {left} are left of {used}, not {expected}")
        trial.expect(Path(answer.library).exists(), f"{attempt}: the new entry is gone")
        trial.expect_clean(scratch, attempt)


def _in_use_stays(trial: Trial) -> None:
    with new_scratch() as scratch:
        oldest = _build(trial, scratch, "tiny1")
        os.utime(oldest, (1, 1))
        user = trial.callers.start(Call(scratch.environment, "tiny1", hold=True))
        trial.expect_right(user.wait_until_held(), "one who stays", how="loaded")
        os.utime(oldest, (1, 1))
        second = _build(trial, scratch, "tiny2")
        _build(trial, scratch, "tiny3", limit=1)
        trial.expect(is_intact(oldest), "an entry in use was evicted")
        trial.expect(not second.exists(), "an entry that nobody uses was not evicted")
        trial.expect_right(user.finish(), "one who stayed", how="loaded")
        _build(trial, scratch, "tiny4", limit=1)
        trial.expect(not oldest.exists(), "an entry that nobody uses any more was not evicted")
        trial.expect(len(scratch.entry_names()) == 1, f"left are {scratch.entry_names()}")
        trial.expect_clean(scratch, "entries in use")


def _nothing_but_the_new_one(trial: Trial) -> None:
    """0 is what it says: no room for anything but what was just built."""
    for limit in (0, 1):
        with new_scratch() as scratch:
            for kernel in ("tiny1", "tiny2", "tiny3"):
                path = _build(trial, scratch, kernel, limit=limit)
                names = scratch.entry_names()
                trial.expect(names == [path.name], f"limit {limit}: {names} after {kernel}")
            trial.loads(
                Call(_limited(scratch, limit), "tiny3"), f"limit {limit}: the last one again"
            )


def _builders_at_once(trial: Trial, count: int, label: str) -> None:
    with new_scratch() as scratch:
        size = _size(_build(trial, scratch, "tiny1"))
        limit = trial.rng.randrange(1, 4 * size)
        calls = [
            Call(_limited(scratch, limit), f"tiny{number}", hold=trial.rng.random() < 0.3)
            for number in trial.rng.choices(range(10, 10 + count), k=count)
        ]
        running = [trial.callers.start(call) for call in calls]
        held = [caller for caller, call in zip(running, calls, strict=True) if call.hold]
        _expect_intact_while_held(trial, held, label)
        for caller in running:
            trial.expect_right(caller.finish(), f"{label}: a builder among others")
        newest = _build(trial, scratch, "tiny2", limit=limit)
        total = sum(map(_size, scratch.entries.iterdir()))
        allowed = max(limit, _size(newest))
        trial.expect(total <= allowed, f"{label}: {total} bytes, {allowed} allowed")
        for entry in scratch.entries.iterdir():
            trial.expect(is_intact(entry), f"{label}: {entry.name} is not valid")
        trial.expect_clean(scratch, label)


def _expect_intact_while_held(trial: Trial, held: list[RunningCall], label: str) -> None:
    for caller in held:
        answer = caller.wait_until_held()
        trial.expect_right(answer, f"{label}: one who stays among others")
        library = Path(answer.library)
        trial.expect(is_intact(library.parent), f"{label}: {library} was evicted while in use")


def _build(trial: Trial, scratch: Scratch, kernel: str, limit: object = "") -> Path:
    answer = trial.builds(
        Call(_limited(scratch, limit), kernel), f"{kernel} with the limit {limit!r}"
    )
    return Path(answer.library).parent


def _size(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir())
