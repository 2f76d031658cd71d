"""From a launcher's source to its loaded library: the one entrance to the build cache.

The steps of a first call, each of which may be the last: look it up in this process; look it up in
the cache and check it; wait for another process that is building it; build and publish it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cache_directory import CacheDirectory, cache_dir, readable_directories
from .compiler import Compiler, find_compiler
from .entry import InvalidEntry, OpenEntry, library_name, note_use, open_entry
from .errors import BuildError, CompilerNotFound
from .key import EntryKey, content_key, entry_key
from .spec import BuildSpec

_LOAD_ATTEMPTS = 20


@dataclass(frozen=True)
class LoadEvent:
    """One library that this process loaded.

    Attributes:
        name: of the launcher.
        seconds: from the call of `load` to the loaded library.
        how: whether this process built it, or found it (perhaps after waiting for who built it).
        path: of the library.
    """

    name: str
    seconds: float
    how: Literal["built", "loaded"]
    path: Path


class _ProcessState:
    """What this process loaded, and who is loading what at the moment."""

    def __init__(self) -> None:
        self.libraries: dict[str, ctypes.CDLL] = {}
        self.events: list[LoadEvent] = []
        self.reported: set[Path] = set()
        self.renew_locks()

    def renew_locks(self) -> None:
        """Forget locks that a thread of the parent process held when it forked."""
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def lock_for(self, digest: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(digest, threading.Lock())


_state = _ProcessState()


def load(spec: BuildSpec) -> ctypes.CDLL:
    """The loaded library of a launcher, built if it was never built before.

    Threads and processes that ask for the same launcher at once build it once.

    Raises:
        CompilerNotFound: it is not in the cache and there is no compiler.
        BuildError: it does not compile, or the library cannot be loaded.
        CacheError: the cache is not safe, or there is no place to build in.
    """
    library = _state.libraries.get(spec.digest)
    if library is not None:
        return library
    with _state.lock_for(spec.digest):
        library = _state.libraries.get(spec.digest)
        if library is None:
            library = _load(spec)
            _state.libraries[spec.digest] = library
        return library


def is_built(spec: BuildSpec) -> bool:
    """Whether `load` would find a valid build in the cache. Changes nothing.

    Raises:
        CacheError: the cache is not safe.
    """
    for path, key in _places(spec, _compiler_or_none()):
        try:
            entry = open_entry(path, key)
        except (InvalidEntry, OSError):
            continue
        if entry is not None:
            entry.close()
            return True
    return False


def artifact_path(spec: BuildSpec) -> Path:
    """Where the library of a launcher is, or will be once it is built.

    Raises:
        CompilerNotFound: the path depends on the compiler, there is none, and no other compiler
            built the launcher.
        CacheError: the cache is not safe, or there is none.
    """
    compiler = _compiler_or_none()
    places = list(_places(spec, compiler))
    existing = [path for path, _ in places if path.is_dir()]
    if existing:
        return existing[0] / library_name(spec.name)
    if places:
        return places[0][0] / library_name(spec.name)
    key = entry_key(spec, compiler or find_compiler())
    return CacheDirectory.below(cache_dir()).entries / key.directory_name / library_name(spec.name)


def build_log() -> tuple[LoadEvent, ...]:
    """What this process loaded so far, in order."""
    return tuple(_state.events)


def _load(spec: BuildSpec) -> ctypes.CDLL:
    started = time.perf_counter()
    for _ in range(_LOAD_ATTEMPTS):
        entry, how = _obtain(spec)
        try:
            # By its path, which debuggers and profilers show and read again.
            library = ctypes.CDLL(str(entry.library))
        except OSError as error:
            entry.close()
            if not entry.library.exists():
                continue  # Cleared away between the check and the load.
            raise BuildError(
                f"{entry.library} is intact but cannot be loaded: {error}. It was built by "
                f"{entry.meta.compiler} on {entry.meta.host}"
            ) from error
        note_use(entry.path)
        seconds = time.perf_counter() - started
        _state.events.append(LoadEvent(spec.name, seconds, how, entry.library))
        return library
    raise BuildError(
        f"{spec.name} was removed from the cache {_LOAD_ATTEMPTS} times before it could be loaded; "
        "is something clearing the cache all the time?"
    )


def _obtain(spec: BuildSpec) -> tuple[OpenEntry, Literal["built", "loaded"]]:
    compiler = _compiler_or_none()
    entry = _find(spec, compiler)
    if entry is not None:
        return entry, "loaded"
    # Asked again: a compiler that was upgraded while this process ran builds something else.
    compiler = find_compiler(ask_again=True)
    # Imported here because a filled cache has no use for it.
    from .building import build_or_wait

    entry, built = build_or_wait(spec, entry_key(spec, compiler), compiler)
    return entry, "built" if built else "loaded"


def _find(spec: BuildSpec, compiler: Compiler | None) -> OpenEntry | None:
    for path, key in _places(spec, compiler):
        try:
            entry = open_entry(path, key)
        except InvalidEntry as invalid:
            _report(path, str(invalid))
        except OSError as error:
            _report(path, f"it cannot be read ({error.strerror})")
        else:
            if entry is not None:
                return entry
    return None


def _places(spec: BuildSpec, compiler: Compiler | None) -> Iterator[tuple[Path, EntryKey]]:
    """Where the launcher may be: its own entry, or without a compiler that of any compiler."""
    for directory in readable_directories():
        if compiler is not None:
            key = entry_key(spec, compiler)
            yield directory.entries / key.directory_name, key
        else:
            yield from _entries_of_any_compiler(directory, spec)


def _entries_of_any_compiler(
    directory: CacheDirectory, spec: BuildSpec
) -> Iterator[tuple[Path, EntryKey]]:
    content = content_key(spec)
    try:
        names = sorted(os.listdir(directory.entries))
    except OSError:
        return
    for name in names:
        key = EntryKey.parse(name)
        if key is not None and (key.name, key.content) == (spec.name, content):
            yield directory.entries / name, key


def _compiler_or_none() -> Compiler | None:
    try:
        return find_compiler()
    except CompilerNotFound:
        return None


def _report(path: Path, reason: str) -> None:
    if path in _state.reported:
        return
    _state.reported.add(path)
    warnings.warn(
        f"jitfmha: the cached build {path} is not used and will be built again: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def _renew_locks() -> None:
    _state.renew_locks()


os.register_at_fork(after_in_child=_renew_locks)
