"""From a spec to what was built of it: the one entrance to the build cache.

`_obtain` shows the way of a first call: try the cache, take the turn to build, try again, build,
publish; `load` and `read` then make the artifact usable in this process and remember it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from .cache.directory import substitute, writable_directory
from .cache.entry import OpenEntry, find, note_use
from .cache.key import entry_key
from .errors import BuildError, CompilerNotFound
from .spec import BuildSpec
from .toolchain.compiling import Toolchain
from .toolchain.host_cpp import find_host_cpp

_LOAD_ATTEMPTS = 20

_How = Literal["built", "loaded"]
_Result = TypeVar("_Result")


class LoadEvent(NamedTuple):
    """One library or code object that this process loaded.

    ``how`` says whether this process built it, or found it, perhaps after waiting for who built it;
    ``seconds`` are from the call of `load` or `read` to what it returned.
    """

    name: str
    seconds: float
    how: _How
    path: Path


class _ProcessState:
    """What this process loaded, and who is loading what at the moment."""

    def __init__(self) -> None:
        self.libraries: dict[str, ctypes.CDLL] = {}
        self.code_objects: dict[str, bytes] = {}
        self.events: list[LoadEvent] = []
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
    """The loaded library of a host spec, built if it was never built before.

    Threads and processes that ask for the same one at once build it once.

    Raises:
        CompilerNotFound: it is not in the cache and there is no compiler.
        BuildError: it does not compile, or the library cannot be loaded.
        CacheError: the cache is not safe, or there is no place to build in.
        ValueError: the spec is one of device code, which `read` is for.
    """
    library = _state.libraries.get(spec.digest)
    if library is not None:
        return library
    if spec.toolchain != "host_cpp":
        raise ValueError(f"{spec.artifact_name} is no library of this machine; read it instead")
    with _state.lock_for(spec.digest):
        library = _state.libraries.get(spec.digest)
        if library is None:
            library = _state.libraries[spec.digest] = _used(spec, _mapped)
        return library


def read(spec: BuildSpec) -> bytes:
    """The content of what is built of a spec, as `hipModuleLoadData` takes a code object.

    Threads and processes that ask for the same one at once build it once. The bytes are those that
    were checked. Raises as `load`.
    """
    with _state.lock_for(spec.digest):
        content = _state.code_objects.get(spec.digest)
        if content is None:
            content = _state.code_objects[spec.digest] = _used(spec, _content)
        return content


def is_built(spec: BuildSpec) -> bool:
    """Whether `load` or `read` would find a valid build; ``CacheError`` where that is not safe."""
    entry = find(entry_key(spec, _toolchain_or_none(spec)), warn=False)
    if entry is None:
        return False
    entry.close()
    return True


def build_log() -> tuple[LoadEvent, ...]:
    """What this process loaded so far, in order."""
    return tuple(_state.events)


def _used(spec: BuildSpec, use: Callable[[OpenEntry], _Result | None]) -> _Result:
    """What `use` makes of the entry while its path leads to what was checked; raises as `load`.

    It makes None of an entry that was cleared away before it could be used.
    """
    started = time.perf_counter()
    for _ in range(_LOAD_ATTEMPTS):
        entry, how = _obtain(spec)
        try:
            result = use(entry) if entry.is_in_place() else None
        except BaseException:
            entry.close()
            raise
        if result is not None:
            note_use(entry.path)
            seconds = time.perf_counter() - started
            _state.events.append(LoadEvent(spec.name, seconds, how, entry.artifact))
            return result
        entry.close()
    raise BuildError(
        f"{spec.name} was removed from the cache {_LOAD_ATTEMPTS} times before it could be loaded; "
        "is something clearing the cache all the time?"
    )


def _mapped(entry: OpenEntry) -> ctypes.CDLL | None:
    """The library, whose entry stays locked as long as this process lives."""
    try:
        # By its path, which debuggers and profilers show and read again. A path that leads to the
        # open file, below /proc, would be that of another library later on, and the loader of the
        # system knows a library by its path.
        return ctypes.CDLL(str(entry.artifact))
    except OSError as error:
        if not entry.artifact.exists():
            return None
        raise BuildError(
            f"{entry.artifact} is intact but cannot be loaded: {error}. It was built by "
            f"{entry.meta.compiler} on {entry.meta.host}"
        ) from error


def _content(entry: OpenEntry) -> bytes:
    entry.close()
    return entry.content


def _obtain(spec: BuildSpec) -> tuple[OpenEntry, _How]:
    """The checked entry for `spec`, in use by this process, and whether this process built it.

    Each step may be the last. What it may raise:
        try: CacheError, where somebody else could put code into the cache.
        get the objects to link, each in the same way: whatever that raises.
        take the turn: CompilerNotFound, CacheError; a disk that fails is replaced, once.
        try again: nothing; a damaged entry is built again.
        build: BuildError, with the compiler's first error.
        publish: BuildError, where the disk returns something else than was written.
    """
    entry = find(entry_key(spec, _toolchain_or_none(spec)))
    if entry is not None:
        return entry, "loaded"
    # Asked again: a compiler that was upgraded while this process ran builds something else.
    toolchain = _find_toolchain(spec, ask_again=True)
    key = entry_key(spec, toolchain)
    # Imported here because a filled cache has no use for them.
    from .cache.eviction import cache_limit
    from .cache.turn import turn_to_build
    from .cache.umask import owner_umask

    cache_limit()  # A malformed limit is reported before the work rather than after it.
    # Before the turn, so that nobody has two.
    objects = {each.artifact_name: _used(each, _content) for each in spec.objects}
    with owner_umask():
        directory = writable_directory()
        while True:
            try:
                with turn_to_build(directory, key) as turn:
                    if isinstance(turn, OpenEntry):
                        return turn, "loaded"
                    return turn.publish(*turn.build(spec, toolchain, objects)), "built"
            except OSError as error:
                directory = substitute(directory, error)


def _find_toolchain(spec: BuildSpec, *, ask_again: bool = False) -> Toolchain:
    if spec.toolchain == "device_hip":
        # Imported here because a call on the CPU has no use for it.
        from .toolchain.device_hip import find_device_hip

        return find_device_hip(ask_again=ask_again)
    return find_host_cpp(ask_again=ask_again)


def _toolchain_or_none(spec: BuildSpec) -> Toolchain | None:
    try:
        return _find_toolchain(spec)
    except CompilerNotFound:
        return None


os.register_at_fork(after_in_child=lambda: _state.renew_locks())
