"""Places that cannot be written to: a full disk, a quota, a read-only or missing home, no /tmp.

Where a place fails, the call must still be right, with one warning and a temporary directory that
goes at exit; without any place it must fail with the path and the reason. The cache must never
hold half of an entry.

The disk fills up at every file operation of a first call in turn, in the caller as well as in the
compiler, by a library that is preloaded (:mod:`.faulty_system`); where this process may mount, also
on memory file systems that are too small.
"""

from __future__ import annotations

import errno
import math
import os
import random
from pathlib import Path

from jitfmha.bench.report import Progress

from .callers import (
    Answer,
    Call,
    Callers,
    Scratch,
    expect_answer,
    expect_clean,
    expect_refused,
    new_scratch,
    seeded_rng,
    shared_callers,
)
from .damaged_files import is_intact
from .faulty_system import FileFault
from .outcome import Extent, Outcome

# Which operations, the error, whether all later ones fail too, and the share of them that is tried
# in the long form. Network file systems may report a full disk only when a file is synced or
# closed.
_LATE = ("fsync", "close")
_SWEEPS: tuple[tuple[tuple[str, ...], int, bool, float], ...] = (
    (("rename",), errno.ENOSPC, False, 1.0),
    ((), errno.ENOSPC, False, 1.0),
    ((), errno.ENOSPC, True, 0.5),
    ((), errno.EDQUOT, False, 0.25),
    (_LATE, errno.EDQUOT, False, 1.0),
    (_LATE, errno.EDQUOT, True, 1.0),
    (_LATE, errno.ENOSPC, True, 1.0),
)
_FULL_EVERYWHERE = {Extent.SHORT: 2, Extent.LONG: 60}
_SIZES = {Extent.SHORT: ("4k", "24k"), Extent.LONG: tuple(f"{4 * n}k" for n in range(1, 31, 2))}
_TEMPORARY_FOLDERS = tuple(map(Path, ("/tmp", "/var/tmp", "/usr/tmp", "/dev/shm")))


def run(extent: Extent, progress: Progress, seed: int | None = None) -> Outcome:
    """All of the above."""
    rng = seeded_rng(__name__, progress, seed)
    outcome = Outcome()
    callers = shared_callers()
    _full_at_each_operation(callers, extent, rng, outcome, progress)
    _full_everywhere(callers, extent, rng, outcome)
    _small_file_systems(callers, extent, outcome, progress)
    _small_temporary_folder(callers, outcome, progress)
    _kernel_on_a_full_disk(callers, outcome)
    for case in (
        _read_only_home,
        _home_that_cannot_be,
        _no_home,
        _missing_cache,
        _cache_that_is_a_file,
        _read_only_cache,
        _no_temporary_folder,
    ):
        with new_scratch() as scratch:
            case(callers, scratch, outcome)
    return outcome


def _full_at_each_operation(
    callers: Callers, extent: Extent, rng: random.Random, outcome: Outcome, progress: Progress
) -> None:
    for only, error, stays, share in _SWEEPS:
        count = _operations(callers, only, outcome)
        number = 1 if extent is Extent.SHORT else math.ceil(count * share)
        for at in sorted(rng.sample(range(1, count + 1), number)):
            with new_scratch() as scratch:
                counter = scratch.root / "counter"
                fault = FileFault((scratch.cache,), counter, at, error, stays, only)
                _fill_up(callers, scratch, fault, outcome)
        progress(
            f"{os.strerror(error)} at {number} of {count} {' and '.join(only) or 'file'} "
            f"operations{', and at all after it' * stays}"
        )


def _operations(callers: Callers, only: tuple[str, ...], outcome: Outcome) -> int:
    with new_scratch() as scratch:
        fault = FileFault((scratch.cache,), scratch.root / "counter", 0, 0, only=only)
        answer = callers.call(Call({**scratch.environment, **fault.environment()}))
        expect_answer(outcome, answer, "a call whose operations are counted", how="built")
        return fault.operations()


def _fill_up(callers: Callers, scratch: Scratch, fault: FileFault, outcome: Outcome) -> None:
    answer = callers.call(Call({**scratch.environment, **fault.environment()}))
    what = f"{os.strerror(fault.error)}{' from' if fault.stays else ''} at {fault.at}: "
    what += fault.what_failed()
    is_cached = Path(answer.library).is_relative_to(scratch.cache)
    # What fails after the entry is in place needs no warning.
    expect_answer(outcome, answer, what, how="built", warnings=0 if is_cached else 1)
    _expect_whole(callers, scratch, what, outcome)


def _expect_whole(callers: Callers, scratch: Scratch, what: str, outcome: Outcome) -> None:
    expect_clean(outcome, scratch, what)
    for name in scratch.entry_names():
        outcome.expect(is_intact(scratch.entries / name), f"{what}: {name} is half-written")
    if scratch.entry_names():
        answer = callers.call(Call(scratch.environment))
        expect_answer(outcome, answer, f"the call after {what}", how="loaded")


def _full_everywhere(
    callers: Callers, extent: Extent, rng: random.Random, outcome: Outcome
) -> None:
    count = _operations(callers, (), outcome)
    for at in [1, *sorted(rng.sample(range(2, count), _FULL_EVERYWHERE[extent]))]:
        with new_scratch() as scratch:
            fault = FileFault(
                _TEMPORARY_FOLDERS + (scratch.root,),
                scratch.root / "counter",
                at,
                errno.ENOSPC,
                stays=True,
                spared=(callers.folder,),
            )
            # tempfile's last resort is the current directory.
            call = Call({**scratch.environment, **fault.environment()}, directory=scratch.root)
            answer = callers.call(call)
            what = f"a full disk from operation {at} on: {fault.what_failed()}"
            if answer.right:  # It was full too late to matter.
                expect_answer(outcome, answer, what)
            else:
                words = (str(scratch.cache), os.strerror(errno.ENOSPC))
                _expect_refused_or_warned(outcome, answer, what, words)
            # A compiler that cannot close its own temporary files leaves them.
            for file in scratch.temporary.glob("cc*"):
                file.unlink()
            _expect_whole(callers, scratch, what, outcome)


def _expect_refused_or_warned(
    outcome: Outcome, answer: Answer, what: str, words: tuple[str, ...]
) -> None:
    holds = answer.status == 0 and answer.error == "CacheError" and len(answer.warnings) <= 1
    holds = holds and all(word in answer.message for word in words)
    outcome.expect(holds, f"{what}: expected CacheError with {words}; got {answer}")


def _small_file_systems(
    callers: Callers, extent: Extent, outcome: Outcome, progress: Progress
) -> None:
    for size in _SIZES[extent]:
        with new_scratch() as scratch:
            scratch.cache.mkdir(mode=0o700)
            folders = [
                str(scratch.cache / "v1" / name) for name in ("building", "entries", "trash")
            ]
            mounts = [(str(scratch.cache), f"size={size},mode=700")]
            answer = callers.call(Call(scratch.environment, mounts=mounts, listed_folders=folders))
            if _cannot_mount(answer, progress):
                return
            is_cached = Path(answer.library).is_relative_to(scratch.cache)
            what = f"a disk of {size}"
            expect_answer(outcome, answer, what, how="built", warnings=0 if is_cached else 1)
            left = len(answer.files_left)
            # The entry's folder and the four files in it, or nothing.
            outcome.expect(left == (5 if is_cached else 0), f"{what}: left {answer.files_left}")
            expect_clean(outcome, scratch, what)
    progress(f"disks of {' '.join(_SIZES[extent])}")


def _small_temporary_folder(callers: Callers, outcome: Outcome, progress: Progress) -> None:
    """It says nothing about the cache; where that is on the same disk, nothing can be built."""
    with new_scratch() as scratch:
        mounts = [(str(scratch.temporary), "size=4k,mode=700")]
        answer = callers.call(Call(scratch.environment, "attention", mounts=mounts))
        if _cannot_mount(answer, progress):
            return
        expect_answer(outcome, answer, "a full temporary folder", how="built")
        cache = {"JITFMHA_CACHE_DIR": str(scratch.temporary / "cache")}
        call = Call({**scratch.environment, **cache}, mounts=mounts)
        expect_refused(
            outcome,
            callers.call(call),
            "a full disk with the temporary folder on it",
            *(cache["JITFMHA_CACHE_DIR"], os.strerror(errno.ENOSPC)),
            f"{str(scratch.temporary)!r} has only",
        )


def _cannot_mount(answer: Answer, progress: Progress) -> bool:
    if answer.message.endswith(("] unshare", "] mount")):
        progress(f"nothing can be mounted here ({answer.message})")
        return True
    return False


def _kernel_on_a_full_disk(callers: Callers, outcome: Outcome) -> None:
    with new_scratch() as scratch:
        fault = FileFault((scratch.cache,), scratch.root / "counter", 40, errno.ENOSPC, stays=True)
        environment = {**scratch.environment, **fault.environment()}
        answer = callers.call(Call(environment, "attention"))
        expect_answer(outcome, answer, "a kernel on a full disk", how="built", warnings=1)
        expect_clean(outcome, scratch, "a kernel on a full disk")


def _at_home(scratch: Scratch, home: str | None) -> dict[str, str | None]:
    return {"HOME": home, "TMPDIR": str(scratch.temporary)}


def _read_only_home(callers: Callers, scratch: Scratch, outcome: Outcome) -> None:
    home = scratch.root / "home"
    home.mkdir(mode=0o500)
    answer = callers.call(Call(_at_home(scratch, str(home)), is_ordinary=True))
    _expect_stand_in(outcome, answer, scratch, "a read-only home", str(home), errno.EACCES)
    outcome.expect(not os.listdir(home), "something was written to a read-only home")


def _home_that_cannot_be(callers: Callers, scratch: Scratch, outcome: Outcome) -> None:
    answer = callers.call(Call(_at_home(scratch, "/proc/nowhere"), is_ordinary=True))
    missing = ("/proc/nowhere", errno.ENOENT)
    _expect_stand_in(outcome, answer, scratch, "a home that cannot be", *missing)
    nowhere = scratch.root / "nowhere"
    answer = callers.call(Call(_at_home(scratch, str(nowhere)), is_ordinary=True))
    # Nothing is wrong with making it.
    expect_answer(outcome, answer, "a home that is missing", how="built")
    outcome.expect(
        Path(answer.library).is_relative_to(nowhere) and _is_private(nowhere),
        f"a home that is missing: built {answer.library}, mode {os.stat(nowhere).st_mode:o}",
    )


def _no_home(callers: Callers, scratch: Scratch, outcome: Outcome) -> None:
    call = Call(_at_home(scratch, None), is_nobody=True, directory=scratch.root)
    answer = callers.call(call)
    expect_answer(outcome, answer, "no home", how="built", warnings=1)
    outcome.expect(
        any("no home directory is known" in warning for warning in answer.warnings),
        f"no home: {answer}",
    )
    expect_clean(outcome, scratch, "no home")
    left = sorted(path.name for path in scratch.root.iterdir())
    outcome.expect(left == ["temporary"], f"no home: left {left}")


def _missing_cache(callers: Callers, scratch: Scratch, outcome: Outcome) -> None:
    cache = scratch.root / "not" / "there" / "yet"
    environment = {**scratch.environment, "JITFMHA_CACHE_DIR": str(cache)}
    answer = callers.call(Call(environment, is_ordinary=True, umask=0))
    expect_answer(outcome, answer, "a cache that is missing", how="built")
    made = [scratch.root / "not", scratch.root / "not" / "there", cache]
    outcome.expect(all(map(_is_private, made)), "a cache that is missing: made, but not private")


def _cache_that_is_a_file(callers: Callers, scratch: Scratch, outcome: Outcome) -> None:
    file = scratch.root / "file"
    file.write_text("precious", encoding="ascii")
    for cache in (file, file / "below"):
        environment = {**scratch.environment, "JITFMHA_CACHE_DIR": str(cache)}
        answer = callers.call(Call(environment, is_ordinary=True))
        what = f"{cache.name} as the cache"
        _expect_stand_in(outcome, answer, scratch, what, str(cache), errno.ENOTDIR)
    outcome.expect(file.read_text(encoding="ascii") == "precious", "a file was overwritten")


def _read_only_cache(callers: Callers, scratch: Scratch, outcome: Outcome) -> None:
    scratch.cache.mkdir(mode=0o500)
    answer = callers.call(Call(scratch.environment, is_ordinary=True))
    denied = (str(scratch.cache), errno.EACCES)
    _expect_stand_in(outcome, answer, scratch, "an empty read-only cache", *denied)
    scratch.cache.chmod(0o700)
    answer = callers.call(Call(scratch.environment))
    expect_answer(outcome, answer, "a cache that is to become read-only", how="built")
    _set_modes(scratch.cache, 0o500)
    answer = callers.call(Call(scratch.environment, is_ordinary=True))
    expect_answer(outcome, answer, "what a read-only cache has", how="loaded")
    answer = callers.call(Call(scratch.environment, "tiny2", is_ordinary=True))
    _expect_stand_in(outcome, answer, scratch, "what a read-only cache lacks", *denied)
    _set_modes(scratch.cache, 0o000)
    answer = callers.call(Call(scratch.environment, is_ordinary=True))
    _expect_stand_in(outcome, answer, scratch, "an unreadable cache", *denied)


def _no_temporary_folder(callers: Callers, scratch: Scratch, outcome: Outcome) -> None:
    file = scratch.root / "file"
    file.touch()
    work = scratch.root / "work"
    work.mkdir(mode=0o500)
    for error in (errno.EROFS, errno.EACCES, errno.ENOSPC):
        fault = FileFault(
            _TEMPORARY_FOLDERS,
            scratch.root / "counter",
            1,
            error,
            stays=True,
            spared=(scratch.root,),
        )
        environment = {**scratch.environment, "TMPDIR": str(scratch.root / "nowhere")}
        what = f"no /tmp ({os.strerror(error)})"
        number = error  # A launcher of its own each time.
        call = Call({**environment, **fault.environment()}, f"tiny{number}", work, is_ordinary=True)
        expect_answer(outcome, callers.call(call), f"{what}, but a cache", how="built")
        environment["JITFMHA_CACHE_DIR"] = str(file / "cache")
        call = Call({**environment, **fault.environment()}, f"tiny{number}", work, is_ordinary=True)
        expect_refused(
            outcome,
            callers.call(call),
            f"{what}, and no cache",
            str(file),
            os.strerror(errno.ENOTDIR),
            "No usable temporary directory",
        )


def _expect_stand_in(
    outcome: Outcome, answer: Answer, scratch: Scratch, what: str, path: str, error: int
) -> None:
    expect_answer(outcome, answer, what, how="built", warnings=1)
    warning = answer.warnings[0] if answer.warnings else ""
    holds = path in warning and os.strerror(error) in warning and str(scratch.temporary) in warning
    outcome.expect(holds, f"{what}: the warning names no path, reason or place: {answer}")
    holds = Path(answer.library).is_relative_to(scratch.temporary)
    outcome.expect(holds, f"{what}: built {answer.library!r}")
    outcome.expect(not os.listdir(scratch.temporary), f"{what}: the temporary directory stays")


def _set_modes(folder: Path, mode: int) -> None:
    for root, _, _ in os.walk(folder, topdown=False):
        os.chmod(root, mode)


def _is_private(path: Path) -> bool:
    return path.stat().st_mode & 0o777 == 0o700
