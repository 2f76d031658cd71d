"""The way of a launcher into the cache: wait for the turn, compile, publish."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from . import trust
from .build_turn import turn_to_build
from .cache_directory import CacheDirectory, stand_in, writable_directory
from .compile_commands import CompileFailure, compile_library, is_plain_path
from .compiler import Compiler
from .entry import (
    EntryMeta,
    InvalidEntry,
    OpenEntry,
    discard,
    empty_trash,
    file_records,
    library_name,
    open_entry,
    publish,
    write_entry,
)
from .errors import BuildError, CacheError
from .eviction import cache_limit, enforce_limit
from .failure_report import build_error
from .key import EntryKey, package_version
from .owned_directory import OwnedDirectory, is_owned_here, sweep
from .owner_umask import owner_umask
from .spec import BuildSpec
from .status import status_line

_PUBLISH_ATTEMPTS = 20
_PUBLISH_PAUSE_SECONDS = 0.05


def build_or_wait(spec: BuildSpec, key: EntryKey, compiler: Compiler) -> tuple[OpenEntry, bool]:
    """The entry for `key`, and whether this process built it (or waited for who did).

    Raises:
        BuildError: the launcher does not compile.
        CacheError: there is no place to build it in, or the cache is not safe.
    """
    cache_limit()  # A malformed limit is reported before the work rather than after it.
    with owner_umask():
        return _build_or_wait(spec, key, compiler)


def _build_or_wait(spec: BuildSpec, key: EntryKey, compiler: Compiler) -> tuple[OpenEntry, bool]:
    directory = writable_directory()
    try:
        return _build_in(directory, spec, key, compiler)
    except OSError as error:
        if directory.is_temporary:
            raise CacheError(
                f"{spec.name} cannot be built: {str(directory.root)!r} cannot be used ({error})"
            ) from error
        # Anything may fill up or go away half way; what was begun there is never visible.
        replacement = stand_in(f"{str(directory.root.parent)!r} cannot be used ({error})")
    try:
        return _build_in(replacement, spec, key, compiler)
    except OSError as error:
        raise CacheError(
            f"{spec.name} cannot be built, neither in {str(directory.root)!r} nor in "
            f"{str(replacement.root)!r} ({error}); free some space, or set JITFMHA_CACHE_DIR"
        ) from error


def _build_in(
    directory: CacheDirectory, spec: BuildSpec, key: EntryKey, compiler: Compiler
) -> tuple[OpenEntry, bool]:
    target = directory.entries / key.directory_name
    with turn_to_build(directory, key, lambda: _valid_entry(target, key)) as entry:
        if entry is not None:
            return entry, False
        sweep(directory.building)
        empty_trash(directory.trash)
        entry = _build(directory, spec, key, compiler)
    enforce_limit(directory, keep=target)
    return entry, True


def _valid_entry(target: Path, key: EntryKey) -> OpenEntry | None:
    try:
        return open_entry(target, key)
    except InvalidEntry:
        return None


def _build(
    directory: CacheDirectory, spec: BuildSpec, key: EntryKey, compiler: Compiler
) -> OpenEntry:
    target = directory.entries / key.directory_name
    started = time.monotonic()
    with OwnedDirectory(directory.building, key.directory_name) as stage:
        with status_line(lambda: f"building {spec.name} ({spec.why})"):
            library = _compile(directory, stage, spec, compiler, target)
        contents = {
            library_name(spec.name): library,
            **{name: text.encode() for name, text in spec.sources.items()},
        }
        meta = EntryMeta(
            name=key.name,
            content_key=key.content,
            compiler_key=key.compiler,
            compiler=str(compiler),
            torch=torch.__version__,
            package=package_version(),
            host=os.uname().nodename,
            why=spec.why,
            created=time.time(),
            build_seconds=round(time.monotonic() - started, 3),
            files=file_records(contents),
        )
        staged = stage.path / "entry"
        write_entry(staged, meta, contents)
        return _publish(staged, target, key, directory)


def _compile(
    directory: CacheDirectory,
    stage: OwnedDirectory,
    spec: BuildSpec,
    compiler: Compiler,
    target: Path,
) -> bytes:
    with _workspace(stage) as workspace:
        try:
            return compile_library(spec, compiler, workspace, target)
        except CompileFailure as failure:
            if not is_owned_here(workspace):
                # Removed at exit, compiler included, while a daemon thread was building.
                raise BuildError(f"{spec.name} was not built: the interpreter ends") from None
            if not workspace.is_dir():
                raise OSError(f"the build directory {str(workspace)!r} was removed") from failure
            raise build_error(spec, compiler, failure.output, workspace, directory) from None


@contextmanager
def _workspace(stage: OwnedDirectory) -> Iterator[Path]:
    """A directory to compile in: in the cache, or elsewhere if a shell would trip over its name."""
    if is_plain_path(stage.path):
        workspace = stage.path / "workspace"
        workspace.mkdir(mode=0o700)
        yield workspace
        return
    parent = _plain_temporary_directory()
    prefix = f"jitfmha-{os.geteuid()}"
    sweep(parent, prefix + ".")
    with OwnedDirectory(parent, prefix) as elsewhere:
        yield elsewhere.path


def _plain_temporary_directory() -> Path:
    reasons = []
    for candidate in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]):
        path = Path(candidate)
        if not path.is_absolute() or not is_plain_path(path):
            reasons.append(f"{candidate!r} has special characters too")
        elif not os.access(path, os.W_OK | os.X_OK):
            reasons.append(f"{candidate!r} cannot be written to")
        elif weakness := trust.parents_reason(candidate):
            reasons.append(weakness)
        else:
            return path
    raise CacheError(
        "the path of the build cache has characters that a shell interprets, and no temporary "
        f"directory can be built in instead: {'; '.join(reasons)}. Set JITFMHA_CACHE_DIR to a "
        "path of letters, digits and '_./+=@,-'."
    )


def _publish(staged: Path, target: Path, key: EntryKey, directory: CacheDirectory) -> OpenEntry:
    """Put the build in place, or use what somebody else put there meanwhile."""
    reason = "other processes kept removing it"
    for _ in range(_PUBLISH_ATTEMPTS):
        ours = staged.is_dir() and publish(staged, target)
        try:
            entry = open_entry(target, key)
        except InvalidEntry as invalid:
            if ours:
                raise BuildError(
                    f"{target} was written but does not read back ({invalid}); check the disk"
                ) from invalid
            reason = str(invalid)
            discard(target, directory.trash)
            continue
        if entry is not None:
            return entry
        if not staged.is_dir():
            break  # Ours was evicted at once.
        time.sleep(_PUBLISH_PAUSE_SECONDS)
    raise BuildError(f"{target} could not be published ({reason}); try again")
