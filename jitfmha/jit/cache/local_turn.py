"""A turn to build in the local cache: wait for it, work in a private directory, publish."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, CacheError, CompileFailure, StoreFailure
from ..spec import ARTIFACT_SUFFIXES
from ..toolchain.compiling import is_plain_path
from .directory import CacheDirectory, writable_directory
from .entry import (
    EntryMeta,
    InvalidEntry,
    OpenEntry,
    kept_in_place,
    open_entry,
    publish,
    write_entry,
)
from .eviction import cache_limit, empty_trash, enforce_limit, make_way
from .key import EntryKey
from .lock import building_lock
from .owned_directory import OwnedDirectory, is_owned_here, sweep
from .store import Turn
from .trust import parents_reason
from .umask import owner_umask

_PUBLISH_ATTEMPTS = 20
_PUBLISH_PAUSE_SECONDS = 0.05


@contextmanager
def local_turn(key: EntryKey, directory: CacheDirectory | None) -> Iterator[OpenEntry | Turn]:
    """As `Store.turn` says, in `directory` or (None) in the configured cache."""
    cache_limit()  # A malformed limit is reported before the work rather than after it.
    with owner_umask():
        directory = directory or writable_directory()
        try:
            yield from _turn_in(directory, key)
        except OSError as error:
            raise StoreFailure(directory.root, directory.is_temporary, error) from error


def _turn_in(directory: CacheDirectory, key: EntryKey) -> Iterator[OpenEntry | Turn]:
    target = directory.entries / key.directory_name
    with building_lock(directory, key, lambda: _valid_entry(target, key)) as entry:
        if entry is not None:
            yield entry
            return
        sweep(directory.building)
        empty_trash(directory.trash)
        with OwnedDirectory(directory.building, key.directory_name) as stage:
            yield LocalTurn(directory, key, stage.path)
    enforce_limit(directory, keep=target)


@dataclass(frozen=True)
class LocalTurn:
    """A `Turn` with a private directory beside the finished entries, so that a rename publishes.

    Attributes:
        directory: the cache.
        key: of the entry to build.
        stage: the private directory.
    """

    directory: CacheDirectory
    key: EntryKey
    stage: Path

    @property
    def destination(self) -> Path:
        return self.directory.entries / self.key.directory_name

    @property
    def logs(self) -> Path:
        return self.directory.logs

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A part of the private directory, or one elsewhere if a shell would trip over its path."""
        if is_plain_path(self.stage):
            workspace = self.stage / "workspace"
            workspace.mkdir(mode=0o700)
            yield from _watched(workspace, self.key.name)
            return
        parent = _plain_temporary_directory()
        prefix = f"jitfmha-{os.geteuid()}"
        sweep(parent, prefix + ".")
        with OwnedDirectory(parent, prefix) as elsewhere:
            yield from _watched(elsewhere.path, self.key.name)

    def publish(self, meta: EntryMeta, contents: Mapping[str, bytes]) -> OpenEntry:
        staged = self.stage / "entry"
        write_entry(staged, meta, contents)
        artifact = next(name for name in contents if Path(name).suffix in ARTIFACT_SUFFIXES)
        with kept_in_place(staged / artifact):
            return self._published(staged)

    def _published(self, staged: Path) -> OpenEntry:
        """The entry that is in place in the end: that in `staged`, or another process's."""
        reason = "other processes kept removing it"
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
            time.sleep(_PUBLISH_PAUSE_SECONDS)
        raise BuildError(f"{self.destination} could not be published ({reason}); try again")


def _watched(workspace: Path, name: str) -> Iterator[Path]:
    try:
        yield workspace
    except CompileFailure as failure:
        if not is_owned_here(workspace):
            # Removed at exit, compiler included, while a daemon thread was building.
            raise BuildError(f"{name} was not built: the interpreter ends") from None
        if not workspace.is_dir():
            raise OSError(f"the build directory {str(workspace)!r} was removed") from failure
        raise


def _valid_entry(target: Path, key: EntryKey) -> OpenEntry | None:
    try:
        return open_entry(target, key)
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
