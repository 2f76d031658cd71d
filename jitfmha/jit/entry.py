"""One published build: a directory that appears whole, is checked when read, and leaves whole.

An entry holds the library, the sources it was built from (a debugger finds them there) and
`meta.json`, which records size and SHA-256 of each and carries a checksum of its own. Times play no
part: an entry that is there and agrees with its records is valid.

Whoever loads the library keeps a shared lock on it, by which eviction knows that it is in use.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from . import trust
from .cache_directory import make_private
from .flock import Flock, try_exclusive, try_shared
from .key import EntryKey

META_NAME = "meta.json"
_META_LIMIT = 1 << 20
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IN_THE_WAY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
# Refreshing the time of last use more often than this only makes work for network file systems.
_LAST_USE_GRANULARITY_SECONDS = 3600.0
# Without locks nobody knows whether a discarded library is still mapped somewhere.
_DISCARDED_WITHOUT_LOCKS_SECONDS = 24 * 3600.0


class InvalidEntry(Exception):
    """An entry that is there but must not be loaded; says what is wrong with it."""


@dataclass(frozen=True)
class EntryMeta:
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
        """The key it was built for."""
        return EntryKey(self.name, self.content_key, self.compiler_key)

    def to_bytes(self) -> bytes:
        """The content of `meta.json`."""
        body = asdict(self)
        document = {"checksum": _checksum(body), "entry": body}
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> EntryMeta:
        """The inverse of `to_bytes`.

        Raises:
            InvalidEntry: any byte differs from what `to_bytes` wrote.
        """
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


@dataclass(frozen=True)
class OpenEntry:
    """An entry that was checked, with the shared lock that keeps it in place.

    Attributes:
        descriptor: of the library; the lock lasts until it is closed or the process ends.
    """

    path: Path
    library: Path
    descriptor: int
    meta: EntryMeta

    def close(self) -> None:
        """Give up the lock."""
        os.close(self.descriptor)


def library_name(name: str) -> str:
    """The file name of a launcher's library."""
    return f"{name}.so"


def open_entry(path: Path, key: EntryKey) -> OpenEntry | None:
    """Open and check the entry at `path`; None if there is none (any more).

    Raises:
        InvalidEntry: it is there but not what was published for `key`.
        OSError: it cannot be read.
    """
    try:
        directory = os.open(path, _FOLDER_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise InvalidEntry("it is a symbolic link, or not a directory") from error
        raise
    try:
        return _open_checked(path, directory, key)
    except InvalidEntry:
        # Whoever replaces or evicts an entry moves it away first; what is missing from a directory
        # that is no longer the entry is no damage.
        if _is_elsewhere(path, directory):
            return None
        raise
    finally:
        os.close(directory)


def write_entry(directory: Path, meta: EntryMeta, contents: Mapping[str, bytes]) -> None:
    """Write a complete entry into the new directory `directory`, to be published from there.

    Raises:
        OSError: also where a network file system reports a full disk only at the end.
    """
    os.mkdir(directory, 0o700)
    for name, content in {**contents, META_NAME: meta.to_bytes()}.items():
        path = directory / name
        make_private(path.parent)
        _write_private(path, content)


def file_records(contents: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
    """The `files` of the meta data for these contents."""
    return {name: (len(content), _sha256(content)) for name, content in contents.items()}


def publish(staged: Path, target: Path) -> bool:
    """Put a complete entry in place by one rename; False if there is something there already.

    Raises:
        OSError: the rename failed for another reason.
    """
    try:
        os.rename(staged, target)
    except OSError as error:
        if error.errno in _IN_THE_WAY:
            return False
        raise
    return True


def discard(path: Path, trash: Path) -> None:
    """Take an entry out of service by one rename, without disturbing who has it open.

    Raises:
        OSError: it cannot be moved.
    """
    try:
        os.rename(path, trash / f"{path.name}.{os.urandom(8).hex()}")
    except FileNotFoundError:
        return  # Somebody else was faster.


def empty_trash(trash: Path) -> None:
    """Delete the discarded entries that no process uses. Does not raise."""
    try:
        names = os.listdir(trash)
    except OSError:
        return
    for name in names:
        try:
            _delete_discarded(trash / name)
        except OSError:
            continue


@contextmanager
def removal_lock(path: Path) -> Iterator[Flock]:
    """Try to lock the library of an entry alone: `Flock.TAKEN` means that no process uses it.

    Raises:
        OSError: the library cannot be opened.
    """
    library = _library_in(path)
    if library is None:
        yield Flock.TAKEN
        return
    descriptor = os.open(library, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield try_exclusive(descriptor)
    finally:
        os.close(descriptor)


def note_use(path: Path) -> None:
    """Record that the entry was used now, as the time of its directory. Does not raise."""
    try:
        if abs(time.time() - os.stat(path).st_mtime) > _LAST_USE_GRANULARITY_SECONDS:
            os.utime(path)
    except OSError:
        pass  # A read-only cache works without.


def _open_checked(path: Path, directory: int, key: EntryKey) -> OpenEntry | None:
    _check_hands("the directory", os.fstat(directory))
    name = library_name(key.name)
    descriptor = _open_file(name, directory)
    try:
        if try_shared(descriptor) is Flock.CONTENDED:
            os.close(descriptor)
            return None  # It is being evicted.
        meta = EntryMeta.from_bytes(_read_file(META_NAME, directory, _META_LIMIT))
        _check_files(meta, key, directory, {name: descriptor})
        # A removal that took place before the lock leaves a file without a name.
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return None
    except BaseException:
        os.close(descriptor)
        raise
    return OpenEntry(path, path / name, descriptor, meta)


def _check_files(meta: EntryMeta, key: EntryKey, directory: int, opened: Mapping[str, int]) -> None:
    if meta.key != key:
        raise InvalidEntry(f"it was built as {meta.key.directory_name}")
    if not opened.keys() <= meta.files.keys():
        raise InvalidEntry(f"{META_NAME} does not list {', '.join(opened)}")
    for name, (size, digest) in meta.files.items():
        if name in opened:
            content = _read_open(name, opened[name], size)
        else:
            content = _read_file(name, directory, size)
        if len(content) != size or _sha256(content) != digest:
            raise InvalidEntry(f"{name} is damaged")


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
    reason = trust.node_reason(name, status, as_parent=False)
    if reason:
        raise InvalidEntry(reason)


def _is_elsewhere(path: Path, directory: int) -> bool:
    try:
        return not os.path.samestat(os.lstat(path), os.fstat(directory))
    except FileNotFoundError:
        return True


def _write_private(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _library_in(path: Path) -> Path | None:
    """The one library in the directory of an entry, which may have been renamed."""
    if path.is_symlink() or not path.is_dir():
        return None
    libraries = [item for item in path.glob("*.so") if item.is_file() and not item.is_symlink()]
    return libraries[0] if libraries else None


def _delete_discarded(path: Path) -> None:
    age = abs(time.time() - os.lstat(path).st_ctime)
    with removal_lock(path) as lock:
        is_old = age > _DISCARDED_WITHOUT_LOCKS_SECONDS
        if lock is Flock.TAKEN or (lock is Flock.UNSUPPORTED and is_old):
            delete(path)


def delete(path: Path) -> None:
    """Delete a directory, a file or a link (never what it leads to). Does not raise for trees."""
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checksum(body: Mapping[str, object]) -> str:
    return _sha256(json.dumps(body, sort_keys=True).encode())
