"""A turn to build in a cache: wait for it, work in a private directory, publish.

Turns save work; they do not keep the cache correct, publishing by rename does. So where somebody
does not get on, the build goes ahead without. Where the file system has no locks, whoever has come
first builds, which is looked up rather than locked: two may build where they come at one moment.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ...version import __version__
from ..errors import BuildError, CacheError, CompileFailure
from ..spec import ARTIFACT_SUFFIXES, BuildSpec
from ..status import PATIENCE_SECONDS, building, say
from ..toolchain.compiling import Toolchain, is_plain_path
from ..toolchain.failure_report import build_error
from .directory import CacheDirectory, write_private
from .entry import (
    EntryMeta,
    InvalidEntry,
    OpenEntry,
    file_records,
    kept_in_place,
    open_entry,
    publish,
    write_entry,
)
from .eviction import empty_trash, enforce_limit, make_way
from .flock import Flock, try_lock
from .key import EntryKey
from .owned_directory import OwnedDirectory, earlier_owner, is_owned_here, owner_of, sweep
from .trust import parents_reason

_POLL_SECONDS = 0.05
# A holder that is alive but stopped (a suspended job, a frozen node) must not stop everybody else.
_GIVE_UP_SECONDS = 900.0
# The builder leaves its name right after it has taken the lock. Where many start at once on a few
# processors, that can be seconds later.
_NAMELESS_SECONDS = 10.0
_PUBLISH_ATTEMPTS = 20
# At least a tick of a file system's clock.
_TICK_SECONDS = 0.02

# What is open for its lock, which lasts until the last copy is closed.
_locks: set[int] = set()


@contextmanager
def turn_to_build(directory: CacheDirectory, key: EntryKey) -> Iterator[OpenEntry | Turn]:
    """Wait until this process may build `key`, or until somebody else has: then the entry.

    Raises:
        OSError: the directory cannot be written to (any more). Nothing that was begun is visible.
    """
    target = directory.entries / key.directory_name
    with ExitStack() as held:
        entry = wait_for_turn(directory, key, held)
        if entry is not None:
            yield entry
            return
        sweep(directory.building)
        empty_trash(directory.trash)
        # Beside the finished entries, so that a rename publishes.
        stage = held.enter_context(OwnedDirectory(directory.building, key.directory_name))
        yield Turn(directory, key, stage.path)
    enforce_limit(directory, keep=target)


class Turn(NamedTuple):
    """This process's turn to build one entry; ``stage`` is a new directory for this build alone."""

    directory: CacheDirectory
    key: EntryKey
    stage: Path

    @property
    def destination(self) -> Path:
        return self.directory.entries / self.key.directory_name

    def build(
        self, spec: BuildSpec, toolchain: Toolchain, objects: Mapping[str, bytes]
    ) -> tuple[EntryMeta, dict[str, bytes]]:
        """Compile, and link with ``objects``, by name; returns what is to be published.

        Raises ``BuildError`` with what the compiler said first, ``OSError`` where the disk is full,
        or the workspace is gone, and ``ValueError`` where JITFMHA_VERBOSE has an unknown value.
        """
        started = time.monotonic()
        with building(spec.name, spec.why):
            artifact = self._compiled(spec, toolchain, objects)
        sources = {name: text.encode() for name, text in spec.sources.items()}
        contents = {spec.artifact_name: artifact, **sources}
        meta = EntryMeta(
            name=self.key.name,
            content_key=self.key.content,
            compiler_key=str(self.key.compiler),
            compiler=str(toolchain),
            torch=torch.__version__,
            package=__version__,
            host=os.uname().nodename,
            why=spec.why,
            created=time.time(),
            build_seconds=round(time.monotonic() - started, 3),
            files=file_records(contents),
        )
        return meta, contents

    def _compiled(
        self, spec: BuildSpec, toolchain: Toolchain, objects: Mapping[str, bytes]
    ) -> bytes:
        try:
            with self._workspace() as workspace:
                for name, text in spec.sources.items():
                    write_private(workspace / "sources" / name, text.encode())
                for name, content in objects.items():
                    write_private(workspace / "objects" / name, content)
                return toolchain.compile(spec, workspace, self.destination)
        except CompileFailure as failure:
            logs = self.directory.logs
            raise build_error(spec, toolchain, failure.output, workspace, logs) from None

    @contextmanager
    def _workspace(self) -> Iterator[Path]:
        """A new directory for this build alone, with a path that a shell leaves alone.

        Raises:
            BuildError: in place of a `CompileFailure` in the `with` block whose cause is that the
                interpreter ends.
            OSError: in place of one whose cause is that the directory was removed.
        """
        with ExitStack() as held:
            workspace = self.stage / "workspace"
            if not is_plain_path(self.stage):
                parent = _plain_temporary_directory()
                prefix = f"jitfmha-{os.geteuid()}"
                sweep(parent, prefix + ".")
                workspace = held.enter_context(OwnedDirectory(parent, prefix)).path / "workspace"
            workspace.mkdir(mode=0o700)
            try:
                yield workspace
            except CompileFailure as failure:
                if not is_owned_here(workspace):
                    # Removed at exit, compiler included, while a daemon thread was building.
                    reason = f"{self.key.name} was not built: the interpreter ends"
                    raise BuildError(reason) from None
                if not workspace.is_dir():
                    raise OSError(
                        f"the build directory {str(workspace)!r} was removed"
                    ) from failure
                raise

    def publish(self, meta: EntryMeta, contents: Mapping[str, bytes]) -> OpenEntry:
        """Make the entry visible; if somebody else was first, theirs is returned.

        Raises:
            BuildError: what was written does not read back, or is removed all the time.
            OSError: the disk is full or fails.
        """
        staged = self.stage / "entry"
        write_entry(staged, meta, contents)
        artifact = next(name for name in contents if Path(name).suffix in ARTIFACT_SUFFIXES)
        reason = "other processes kept removing it"
        with kept_in_place(staged / artifact):
            for _ in range(_PUBLISH_ATTEMPTS):
                ours = staged.is_dir() and publish(staged, self.destination)
                try:
                    entry = open_entry(self.destination, self.key)
                except InvalidEntry as invalid:
                    if ours:
                        raise BuildError(
                            f"{self.destination} was written but does not read back ({invalid}); "
                            "check the disk"
                        ) from invalid
                    reason = str(invalid)
                    make_way(self.destination, self.directory.trash)
                    continue
                if entry is not None:
                    return entry
                if not staged.is_dir():
                    break  # Ours was evicted at once.
                time.sleep(_POLL_SECONDS)
        raise BuildError(f"{self.destination} could not be published ({reason}); try again")


def wait_for_turn(directory: CacheDirectory, key: EntryKey, held: ExitStack) -> OpenEntry | None:
    """The entry that somebody else has published meanwhile; None where this process may build.

    Tells once, after a second, what is waited for, and for whom as soon as that is known. ``held``
    ends the turn. Raises ``OSError`` where the lock file cannot be created.
    """
    lock = _locked(directory.locks / f"{key.directory_name}.lock", held)
    has_come = lock or _first_to_come(directory, key, held)
    started, has_told = time.monotonic(), False
    while not has_come():
        entry = _valid_entry(directory, key)
        if entry is not None:
            return entry
        waited = time.monotonic() - started
        if waited > PATIENCE_SECONDS and not has_told:
            builder = owner_of(directory.building, key.directory_name)
            if builder is not None or waited > _NAMELESS_SECONDS:
                has_told = True
                say(f"waiting for {key.name}, which {builder or 'another process'} is building ...")
        if waited > _GIVE_UP_SECONDS:
            say(f"{key.name} is still not there; building it without waiting any longer")
            break
        time.sleep(_POLL_SECONDS)
    return _valid_entry(directory, key)


def _locked(path: Path, held: ExitStack) -> Callable[[], bool] | None:
    """Whether a lock was taken, which the kernel takes back when its holder dies.

    None where the file system at `path` has no locks, or this process may not take this one.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except PermissionError:
        return None  # Of root, say, who built this entry in this user's cache.
    _locks.add(descriptor)
    held.callback(_let_go, descriptor)
    if try_lock(descriptor, fcntl.LOCK_EX) is Flock.UNSUPPORTED:
        return None
    return lambda: try_lock(descriptor, fcntl.LOCK_EX) is Flock.TAKEN


def _let_go(descriptor: int) -> None:
    if descriptor in _locks:
        _locks.remove(descriptor)
        os.close(descriptor)


def _first_to_come(directory: CacheDirectory, key: EntryKey, held: ExitStack) -> Callable[[], bool]:
    """Whether nobody who waits or builds came earlier, all by the clock of the one file system."""
    place = held.enter_context(OwnedDirectory(directory.building, key.directory_name))
    # Names decide among those who come in one tick; by then all of them are there.
    time.sleep(_TICK_SECONDS)
    return lambda: earlier_owner(place, key.directory_name) is None


def _valid_entry(directory: CacheDirectory, key: EntryKey) -> OpenEntry | None:
    try:
        return open_entry(directory.entries / key.directory_name, key)
    except InvalidEntry:
        return None


def _plain_temporary_directory() -> Path:
    reasons = []
    for candidate in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):
        path = Path(candidate)
        if not path.is_absolute() or not is_plain_path(path):
            reasons.append(f"{candidate!r} has special characters too")
        elif not os.access(path, os.W_OK | os.X_OK):
            reasons.append(f"{candidate!r} cannot be written to")
        elif weakness := parents_reason(candidate, must_exist=True):
            reasons.append(weakness)
        else:
            return path
    raise CacheError(
        "the path of the build cache has characters that a shell interprets, and no temporary "
        f"directory can be built in instead: {'; '.join(reasons)}. Set JITFMHA_CACHE_DIR to a "
        "path of letters, digits and '_./+=@,-'."
    )


def _leave_locks_to_parent() -> None:
    for descriptor in tuple(_locks):
        _let_go(descriptor)


os.register_at_fork(after_in_child=_leave_locks_to_parent)
