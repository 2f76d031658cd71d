"""One published build: a directory that appears whole, is checked when read, and leaves whole.

An entry holds its *artifact* (the library or code object that was built), the sources it was built
from (a debugger finds them there) and `meta.json`, which records size and SHA-256 of each and
carries a checksum of its own. Times play no part: an entry that is there and agrees with its
records is valid.

Whoever loads a library keeps a shared lock on it, by which eviction knows that it is in use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..spec import ARTIFACT_SUFFIXES
from .directory import CacheDirectory, check_way_to, readable_directories, write_private
from .flock import Flock, try_lock
from .key import EntryKey
from .trust import node_reason

META_NAME = "meta.json"
_META_LIMIT = 1 << 20
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IN_THE_WAY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
# Refreshing the time of last use more often than this only makes work for network file systems.
_LAST_USE_GRANULARITY_SECONDS = 3600.0
# These say that this process has too much open, and nothing about an entry.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# Eviction holds an entry's lock for one rename.
_EVICTION_SECONDS = 0.5
_POLL_SECONDS = 0.01


class InvalidEntry(Exception):
    """An entry that is there but must not be loaded; says what is wrong with it."""


class EntryMeta(NamedTuple):
    """What an entry records about itself.

    Attributes:
        files: name, which may lie in folders of the entry, to (size in bytes, SHA-256 in
            hexadecimal digits).
        created: seconds since the epoch, for display.
    """

    name: str
    content_key: str
    compiler_key: str
    compiler: str
    torch: str
    package: str
    host: str
    why: str
    created: float
    build_seconds: float
    files: Mapping[str, tuple[int, str]]

    @property
    def key(self) -> EntryKey:
        return EntryKey(self.name, self.content_key, self.compiler_key)

    def to_bytes(self) -> bytes:
        body = self._asdict()
        document = {"checksum": _checksum(body), "entry": body}
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> EntryMeta:
        """The inverse of `to_bytes`; ``InvalidEntry`` where any byte differs from what it wrote."""
        try:
            body = json.loads(content)["entry"]
            files = {
                name: (int(size), str(digest)) for name, (size, digest) in body["files"].items()
            }
            meta = cls(**{**body, "files": files})
            # Writing it again covers every byte, those that JSON ignores included.
            intact = meta.to_bytes() == content
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidEntry(f"{META_NAME} is damaged") from error
        if not intact:
            raise InvalidEntry(f"{META_NAME} is damaged")
        return meta


class OpenEntry(NamedTuple):
    """An entry that was checked, with the shared lock that keeps it in place.

    Attributes:
        artifact: the path of the file that was built.
        content: of that file; what is used is what was checked.
        descriptor: of that file; the lock lasts until it is closed or the process ends.
    """

    path: Path
    artifact: Path
    content: bytes
    descriptor: int
    meta: EntryMeta

    def is_in_place(self) -> bool:
        """Whether `artifact` leads to the file that was checked, and nobody else can change that.
        Raises ``CacheError`` where somebody else can, or could when it was opened.
        """
        try:
            check_way_to(self.path)
            return os.path.samestat(os.lstat(self.artifact), os.fstat(self.descriptor))
        except OSError:
            return False

    def close(self) -> None:
        """Give up the lock that keeps the entry from being evicted."""
        os.close(self.descriptor)


def open_entry(path: Path, key: EntryKey) -> OpenEntry | None:
    """Open and check the entry at `path`; None if there is none (any more).

    Raises:
        InvalidEntry: it is there but not what was published for `key`, or cannot be read.
        OSError: this process cannot read anything more, whatever the entry.
    """
    try:
        directory = os.open(path, _FOLDER_FLAGS)
        try:
            return _open_checked(path, directory, key)
        except InvalidEntry:
            # Whoever replaces or evicts an entry moves it away first; what is missing from a
            # directory that is no longer the entry is no damage.
            if _is_elsewhere(path, directory):
                return None
            raise
        finally:
            os.close(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise InvalidEntry("it is a symbolic link, or not a directory") from error
        raise InvalidEntry(f"it cannot be read ({error.strerror})") from error


def write_entry(directory: Path, meta: EntryMeta, contents: Mapping[str, bytes]) -> None:
    """Write a complete entry into the new directory `directory`, to be published from there.

    Raises:
        OSError: also where a network file system reports a full disk only at the end.
    """
    os.mkdir(directory, 0o700)
    files = {**contents, META_NAME: meta.to_bytes()}
    # All at once: a disk that is waited for file by file takes ten times as long.
    with ThreadPoolExecutor(len(files)) as pool:
        write = partial(write_private, durable=True)
        for _ in pool.map(write, (directory / name for name in files), files.values()):
            pass


@contextmanager
def kept_in_place(artifact: Path) -> Iterator[None]:
    """Hold the shared lock of an entry that was just written, wherever it is moved meanwhile.

    Without it others could evict the entry between its publication and its opening.
    """
    descriptor = os.open(artifact, _READ_FLAGS)
    try:
        try_lock(descriptor, fcntl.LOCK_SH)  # Where there are no locks nothing is evicted either.
        yield
    finally:
        os.close(descriptor)


def file_records(contents: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
    """The `files` of the meta data for these contents."""
    return {name: (len(content), _sha256(content)) for name, content in contents.items()}


def publish(staged: Path, target: Path) -> bool:
    """Put a complete entry in place by one rename; False if there is something there already."""
    try:
        os.rename(staged, target)
    except OSError as error:
        if error.errno in _IN_THE_WAY:
            return False
        raise
    return True


def note_use(path: Path) -> None:
    """Record that the entry was used now, as the time of its directory. Does not raise."""
    with suppress(OSError):  # A read-only cache works without.
        if abs(time.time() - os.stat(path).st_mtime) > _LAST_USE_GRANULARITY_SECONDS:
            os.utime(path)


def _open_checked(path: Path, directory: int, key: EntryKey) -> OpenEntry | None:
    _check_hands("the directory", os.fstat(directory))
    name = _artifact_name(directory, key)
    descriptor = _open_file(name, directory)
    try:
        if _is_being_evicted(path, directory, descriptor):
            os.close(descriptor)
            return None
        meta = EntryMeta.from_bytes(_read_file(META_NAME, directory, _META_LIMIT))
        content = _checked_artifact(meta, key, directory, name, descriptor)
        # A removal that took place before the lock leaves a file without a name.
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return None
    except BaseException:
        os.close(descriptor)
        raise
    return OpenEntry(path, path / name, content, descriptor, meta)


def _is_being_evicted(path: Path, directory: int, descriptor: int) -> bool:
    """Take the shared lock that keeps the entry from being deleted; whether it is on its way out.

    Whoever can read the files of a shared cache can lock them too, and nothing is gained by a lock
    that is held for longer than eviction does. The entry is used without one then.
    """
    deadline = time.monotonic() + _EVICTION_SECONDS
    while try_lock(descriptor, fcntl.LOCK_SH) is Flock.CONTENDED:
        if _is_elsewhere(path, directory):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return False


def _artifact_name(directory: int, key: EntryKey) -> str:
    present = os.listdir(directory)
    names = [key.name + suffix for suffix in ARTIFACT_SUFFIXES]
    for name in names:
        if name in present:
            return name
    raise InvalidEntry(f"{' or '.join(names)} is missing")


def _checked_artifact(
    meta: EntryMeta, key: EntryKey, directory: int, artifact: str, descriptor: int
) -> bytes:
    if meta.key != key:
        raise InvalidEntry(f"it was built as {meta.key.directory_name}")
    if artifact not in meta.files:
        raise InvalidEntry(f"{META_NAME} does not list {artifact}")
    result = b""
    for name, (size, digest) in meta.files.items():
        if name == artifact:
            content = result = _read_open(name, descriptor, size)
        else:
            content = _read_file(name, directory, size)
        if len(content) != size or _sha256(content) != digest:
            raise InvalidEntry(f"{name} is damaged")
    return result


def _read_file(name: str, directory: int, limit: int) -> bytes:
    descriptor = _open_file(name, directory)
    try:
        return _read_open(name, descriptor, limit)
    finally:
        os.close(descriptor)


def _open_file(name: str, directory: int) -> int:
    """Open a file of the entry, one folder after the other, none of them through a link."""
    *folders, file_name = name.split("/")
    if not {"", ".", ".."}.isdisjoint((*folders, file_name)):
        raise InvalidEntry(f"{META_NAME} lists the path {name!r}")
    inner = os.dup(directory)
    try:
        for depth, folder in enumerate(folders, start=1):
            outer, inner = inner, _open_node(folder, _FOLDER_FLAGS, inner, name)
            os.close(outer)
            _check_hands("/".join(folders[:depth]), os.fstat(inner))
        return _open_node(file_name, _READ_FLAGS, inner, name)
    finally:
        os.close(inner)


def _open_node(component: str, flags: int, directory: int, name: str) -> int:
    try:
        return os.open(component, flags, dir_fd=directory)
    except FileNotFoundError as error:
        raise InvalidEntry(f"{name} is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidEntry(f"{name} is a symbolic link") from error
        if error.errno == errno.ENOTDIR:
            raise InvalidEntry(f"{component}, on the way to {name}, is no folder") from error
        raise


def _read_open(name: str, descriptor: int, limit: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidEntry(f"{name} is not a regular file")
    _check_hands(name, status)
    if status.st_size > limit:
        raise InvalidEntry(f"{name} is damaged")
    chunks = []
    while chunk := os.read(descriptor, limit + 1):
        chunks.append(chunk)
    return b"".join(chunks)


def _check_hands(name: str, status: os.stat_result) -> None:
    reason = node_reason(name, status, as_parent=False)
    if reason:
        raise InvalidEntry(reason)


def _is_elsewhere(path: Path, directory: int) -> bool:
    try:
        return not os.path.samestat(os.lstat(path), os.fstat(directory))
    except FileNotFoundError:
        return True


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checksum(body: Mapping[str, object]) -> str:
    return _sha256(json.dumps(body, sort_keys=True).encode())


# ---- Looking up ----------------------------------------------------------------------------------
# An entry never changes: its key says all that went into it, and the first one that is published
# under a key stays. Machines may share them.


def find(key: EntryKey, *, warn: bool = True) -> OpenEntry | None:
    """The entry for `key`, checked and in use by this process; None if there is none.

    A key without a compiler asks for the entry of any. A failure to read it is a missing entry; the
    user is told of one that is there but damaged, with ``warn``. Raises ``CacheError`` where
    somebody else could put code into the cache.
    """
    for path, published in _places(key):
        try:
            entry = open_entry(path, published)
        except (InvalidEntry, OSError) as reason:
            if warn:
                warnings.warn(
                    f"jitfmha: the cached build {path} is not used and will be built again: "
                    f"{reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            continue
        if entry is not None:
            return entry
    return None


def _places(key: EntryKey) -> Iterator[tuple[Path, EntryKey]]:
    """Where the entry may be: under its own key, or without a compiler under that of any."""
    for directory in readable_directories():
        if key.compiler is not None:
            yield directory.entries / key.directory_name, key
            continue
        for path, published in published_in(directory):
            if key.is_served_by(published):
                yield path, published


def published_in(directory: CacheDirectory) -> list[tuple[Path, EntryKey]]:
    """The entries of a cache with the keys in their names, in the order of these; not opened."""
    try:
        names = sorted(os.listdir(directory.entries))
    except OSError:
        return []
    keys = ((name, EntryKey.parse(name)) for name in names)
    return [(directory.entries / name, key) for name, key in keys if key is not None]
