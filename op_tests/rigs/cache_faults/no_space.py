"""Places that cannot be written to: a full disk, a quota, a read-only or missing home, no /tmp.

Where a place fails, the call must still be right, with one warning and a temporary directory that
goes at exit; without any place it must fail with the path and the reason. The cache must never
hold half of an entry.

The disk fills up at every file operation of a first call in turn, in the caller as well as in the
compiler, by a library that is preloaded (:mod:`.faulty_system`); where this process may mount, also
on memory file systems that are too small.
"""

import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path

from .callers import Answer, Call, Scratch, Trial, new_scratch
from .damaged_files import is_intact
from .faulty_system import FileFault
from .outcome import Extent

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
# A compiler may take what is missing in a temporary file of its own for a fault of the source. Such
# a file is complete in the next call, where the disk was full for one operation only.
_COMPILERS_FILE = "/workspace/cc"
_FULL_EVERYWHERE = {Extent.SHORT: 2, Extent.LONG: 60}
_SIZES = {Extent.SHORT: ("4k", "24k"), Extent.LONG: tuple(f"{4 * n}k" for n in range(1, 31, 2))}
_TEMPORARY_FOLDERS = tuple(map(Path, ("/tmp", "/var/tmp", "/usr/tmp", "/dev/shm")))


def run(trial: Trial) -> None:
    """All of the above."""
    _full_at_each_operation(trial)
    _full_everywhere(trial)
    _small_file_systems(trial)
    _small_temporary_folder(trial)
    _kernel_on_a_full_disk(trial)
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
            case(trial, scratch)


def _full_at_each_operation(trial: Trial) -> None:
    for only, error, stays, share in _SWEEPS:
        count = _operations(trial, only)
        number = math.ceil(count * share) if trial.is_long else 1
        for at in sorted(trial.rng.sample(range(1, count + 1), number)):
            with new_scratch() as scratch:
                counter = scratch.root / "counter"
                fault = FileFault((scratch.cache,), counter, at, error, stays, only)
                _fill_up(trial, scratch, fault)
        trial.progress(
            f"{os.strerror(error)} at {number} of {count} {' and '.join(only) or 'file'} "
            f"operations{', and at all after it' * stays}"
        )


def _operations(trial: Trial, only: tuple[str, ...]) -> int:
    with new_scratch() as scratch:
        fault = FileFault((scratch.cache,), scratch.root / "counter", 0, 0, only=only)
        call = Call({**scratch.environment, **fault.environment()})
        trial.builds(call, "a call whose operations are counted")
        return fault.operations()


def _fill_up(trial: Trial, scratch: Scratch, fault: FileFault) -> None:
    answer = trial.callers.call(Call({**scratch.environment, **fault.environment()}))
    what = f"{os.strerror(fault.error)}{' from' if fault.stays else ''} at {fault.at}: "
    what += fault.what_failed()
    if not fault.stays and _COMPILERS_FILE in what and answer.error == "BuildError":
        trial.expect("The full log is" in answer.message, f"{what}: no log is named: {answer}")
        trial.builds(Call(scratch.environment), f"the call after {what}")
        return
    is_cached = Path(answer.library).is_relative_to(scratch.cache)
    # What fails after the entry is in place needs no warning.
    trial.expect_right(answer, what, how="built", warnings=0 if is_cached else 1)
    _expect_whole(trial, scratch, what)


def _expect_whole(trial: Trial, scratch: Scratch, what: str) -> None:
    trial.expect_clean(scratch, what)
    for name in scratch.entry_names():
        trial.expect(is_intact(scratch.entries / name), f"{what}: {name} is half-written")
    if scratch.entry_names():
        trial.loads(Call(scratch.environment), f"the call after {what}")


def _full_everywhere(trial: Trial) -> None:
    count = _operations(trial, ())
    for at in [1, *sorted(trial.rng.sample(range(2, count), _FULL_EVERYWHERE[trial.extent]))]:
        with new_scratch() as scratch:
            fault = FileFault(
                _TEMPORARY_FOLDERS + (scratch.root,),
                scratch.root / "counter",
                at,
                errno.ENOSPC,
                stays=True,
                spared=(trial.callers.folder,),
            )
            # tempfile's last resort is the current directory.
            call = Call({**scratch.environment, **fault.environment()}, directory=scratch.root)
            answer = trial.callers.call(call)
            what = f"a full disk from operation {at} on: {fault.what_failed()}"
            if answer.right:  # It was full too late to matter.
                trial.expect_right(answer, what)
            else:
                words = (str(scratch.cache), os.strerror(errno.ENOSPC))
                trial.expect_refused(answer, what, *words, warnings=1)
            # A compiler that cannot close its own temporary files leaves them.
            for file in scratch.temporary.glob("cc*"):
                file.unlink()
            _expect_whole(trial, scratch, what)


def _small_file_systems(trial: Trial) -> None:
    for size in _SIZES[trial.extent]:
        with new_scratch() as scratch:
            scratch.cache.mkdir(mode=0o700)
            names = ("building", "entries", "trash")
            folders = [str(scratch.cache / "v1" / name) for name in names]
            mounts = [(str(scratch.cache), f"size={size},mode=700")]
            call = Call(scratch.environment, mounts=mounts, listed_folders=folders)
            answer = trial.callers.call(call)
            if _cannot_mount(trial, answer):
                return
            is_cached = Path(answer.library).is_relative_to(scratch.cache)
            what = f"a disk of {size}"
            trial.expect_right(answer, what, how="built", warnings=0 if is_cached else 1)
            left = len(answer.files_left)
            # The entry's folder and the four files in it, or nothing.
            trial.expect(left == (5 if is_cached else 0), f"{what}: left {answer.files_left}")
            trial.expect_clean(scratch, what)
    trial.progress(f"disks of {' '.join(_SIZES[trial.extent])}")


def _small_temporary_folder(trial: Trial) -> None:
    """It says nothing about the cache; where that is on the same disk, nothing can be built."""
    with new_scratch() as scratch:
        mounts = [(str(scratch.temporary), "size=4k,mode=700")]
        answer = trial.callers.call(Call(scratch.environment, "attention", mounts=mounts))
        if _cannot_mount(trial, answer):
            return
        trial.expect_right(answer, "a full temporary folder", how="built")
        cache = {"JITFMHA_CACHE_DIR": str(scratch.temporary / "cache")}
        call = Call({**scratch.environment, **cache}, mounts=mounts)
        words = (cache["JITFMHA_CACHE_DIR"], os.strerror(errno.ENOSPC))
        what = "a full disk with the temporary folder on it"
        trial.refused(call, what, *words, f"{str(scratch.temporary)!r} has only")


def _cannot_mount(trial: Trial, answer: Answer) -> bool:
    if answer.message.endswith(("] unshare", "] mount")):
        trial.progress(f"nothing can be mounted here ({answer.message})")
        return True
    return False


def _kernel_on_a_full_disk(trial: Trial) -> None:
    with new_scratch() as scratch:
        fault = FileFault((scratch.cache,), scratch.root / "counter", 40, errno.ENOSPC, stays=True)
        environment = {**scratch.environment, **fault.environment()}
        trial.builds(Call(environment, "attention"), "a kernel on a full disk", warnings=1)
        trial.expect_clean(scratch, "a kernel on a full disk")


def _at_home(scratch: Scratch, home: str | None) -> dict[str, str | None]:
    return {"HOME": home, "TMPDIR": str(scratch.temporary)}


def _read_only_home(trial: Trial, scratch: Scratch) -> None:
    home = scratch.root / "home"
    home.mkdir(mode=0o500)
    environment = _at_home(scratch, str(home))
    _expect_stand_in(trial, scratch, "a read-only home", environment, str(home), errno.EACCES)
    trial.expect(not os.listdir(home), "something was written to a read-only home")


def _home_that_cannot_be(trial: Trial, scratch: Scratch) -> None:
    path, what = "/proc/nowhere", "a home that cannot be"
    _expect_stand_in(trial, scratch, what, _at_home(scratch, path), path, errno.ENOENT)
    nowhere = scratch.root / "nowhere"
    call = Call(_at_home(scratch, str(nowhere)), is_ordinary=True)
    answer = trial.builds(call, "a home that is missing")  # Nothing is wrong with making it.
    trial.expect(
        Path(answer.library).is_relative_to(nowhere) and _is_private(nowhere),
        f"a home that is missing: built {answer.library}, mode {os.stat(nowhere).st_mode:o}",
    )


def _no_home(trial: Trial, scratch: Scratch) -> None:
    call = Call(_at_home(scratch, None), is_nobody=True, directory=scratch.root)
    answer = trial.builds(call, "no home", warnings=1)
    trial.expect(
        any("no home directory is known" in warning for warning in answer.warnings),
        f"no home: {answer}",
    )
    trial.expect_clean(scratch, "no home")
    left = sorted(path.name for path in scratch.root.iterdir())
    trial.expect(left == ["temporary"], f"no home: left {left}")


def _missing_cache(trial: Trial, scratch: Scratch) -> None:
    cache = scratch.root / "not" / "there" / "yet"
    environment = {**scratch.environment, "JITFMHA_CACHE_DIR": str(cache)}
    trial.builds(Call(environment, is_ordinary=True, umask=0), "a cache that is missing")
    made = [scratch.root / "not", scratch.root / "not" / "there", cache]
    trial.expect(all(map(_is_private, made)), "a cache that is missing: made, but not private")


def _cache_that_is_a_file(trial: Trial, scratch: Scratch) -> None:
    file = scratch.root / "file"
    file.write_text("precious", encoding="ascii")
    for cache in (file, file / "below"):
        environment = {**scratch.environment, "JITFMHA_CACHE_DIR": str(cache)}
        what = f"{cache.name} as the cache"
        _expect_stand_in(trial, scratch, what, environment, str(cache), errno.ENOTDIR)
    trial.expect(file.read_text(encoding="ascii") == "precious", "a file was overwritten")


def _read_only_cache(trial: Trial, scratch: Scratch) -> None:
    def denied(what: str, kernel: str = "tiny1") -> None:
        path = str(scratch.cache)
        _expect_stand_in(trial, scratch, what, scratch.environment, path, errno.EACCES, kernel)

    scratch.cache.mkdir(mode=0o500)
    denied("an empty read-only cache")
    scratch.cache.chmod(0o700)
    trial.builds(Call(scratch.environment), "a cache that is to become read-only")
    _set_modes(scratch.cache, 0o500)
    trial.loads(Call(scratch.environment, is_ordinary=True), "what a read-only cache has")
    denied("what a read-only cache lacks", "tiny2")
    _set_modes(scratch.cache, 0o000)
    denied("an unreadable cache")


def _no_temporary_folder(trial: Trial, scratch: Scratch) -> None:
    file = scratch.root / "file"
    file.touch()
    work = scratch.root / "work"
    work.mkdir(mode=0o500)
    for error in (errno.EROFS, errno.EACCES, errno.ENOSPC):
        counter, spared = scratch.root / "counter", (scratch.root,)
        fault = FileFault(_TEMPORARY_FOLDERS, counter, 1, error, stays=True, spared=spared)
        environment = {**scratch.environment, "TMPDIR": str(scratch.root / "nowhere")}
        what = f"no /tmp ({os.strerror(error)})"
        number = error  # A launcher of its own each time.
        call = Call({**environment, **fault.environment()}, f"tiny{number}", work, is_ordinary=True)
        trial.builds(call, f"{what}, but a cache")
        environment["JITFMHA_CACHE_DIR"] = str(file / "cache")
        call = Call({**environment, **fault.environment()}, f"tiny{number}", work, is_ordinary=True)
        words = (str(file), os.strerror(errno.ENOTDIR), "No usable temporary directory")
        trial.refused(call, f"{what}, and no cache", *words)


def _expect_stand_in(
    trial: Trial,
    scratch: Scratch,
    what: str,
    environment: Mapping[str, str | None],
    path: str,
    error: int,
    kernel: str = "tiny1",
) -> None:
    answer = trial.builds(Call(environment, kernel, is_ordinary=True), what, warnings=1)
    warning = answer.warnings[0] if answer.warnings else ""
    holds = path in warning and os.strerror(error) in warning and str(scratch.temporary) in warning
    trial.expect(holds, f"{what}: the warning names no path, reason or place: {answer}")
    holds = Path(answer.library).is_relative_to(scratch.temporary)
    trial.expect(holds, f"{what}: built {answer.library!r}")
    trial.expect(not os.listdir(scratch.temporary), f"{what}: the temporary directory stays")


def _set_modes(folder: Path, mode: int) -> None:
    for root, _, _ in os.walk(folder, topdown=False):
        os.chmod(root, mode)


def _is_private(path: Path) -> bool:
    return path.stat().st_mode & 0o777 == 0o700
