"""Private working directories that say whose they are, and are swept once their owner is dead.

Each holds a file `owner` with a lock on it that its process keeps. The kernel drops the lock when
the process dies, however it dies, and the next one to come by removes the directory.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from .flock import Flock, try_lock, wait_for_lock

_OWNER_FILE = "owner"
_OWNER_FILE_LIMIT = 4096
# How long an owner file may be absent or empty: its process is just creating it.
_CREATION_SECONDS = 3600.0
# How long a directory is left alone whose owner cannot be asked: another machine, or no locks.
_DISTANT_OWNER_SECONDS = 24 * 3600.0
# Nobody waits for an owner who cannot be asked and who came so long before.
_STALE_NANOSECONDS = 600 * 10**9


@dataclass(frozen=True)
class Owner:
    """The process that a working directory belongs to."""

    pid: int
    host: str
    boot: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@final
class OwnedDirectory(AbstractContextManager["OwnedDirectory"]):
    """A new directory of this process alone, removed on exit from the `with` block or at exit."""

    def __init__(self, parent: Path, prefix: str) -> None:
        """Raises ``OSError`` where the file system does not allow it."""
        self.path = parent / f"{prefix}.{os.urandom(8).hex()}"
        # All that takes time comes before: of a directory whose process dies before it is claimed,
        # nobody knows for long whether that is still to come.
        claim = json.dumps(asdict(Owner(os.getpid(), os.uname().nodename, _boot()))).encode()
        os.mkdir(self.path, 0o700)
        self._created = os.lstat(self.path)
        try:
            self._descriptor = _claim(self.path, claim)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        _owned_here.append(self)

    def __exit__(self, *_exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Delete the directory and end what still runs in it. Does not raise."""
        if self not in _owned_here:
            return
        _owned_here.remove(self)
        if self._is_there():
            _remove_tree(self.path)
        os.close(self._descriptor)

    def _is_there(self) -> bool:
        """Whether the path leads to what was created, and not to what somebody made after it."""
        try:
            status = os.lstat(self.path)
        except OSError:
            return False
        # A number is used again, but nobody else makes anything of this user's.
        return os.path.samestat(status, self._created) and status.st_uid == self._created.st_uid


_owned_here: list[OwnedDirectory] = []


def is_owned_here(path: Path) -> bool:
    """Whether `path` lies in a directory of this process that was not removed, even in part."""
    return any(path.is_relative_to(directory.path) for directory in _owned_here)


def sweep(parent: Path, prefix: str = "") -> None:
    """Remove the directories below `parent` whose owners are dead. Does not raise."""
    for path in _directories(parent, prefix):
        try:
            _remove_if_abandoned(path)
        except OSError:
            continue  # Somebody else sweeps, or owns it.


def owner_of(parent: Path, prefix: str) -> Owner | None:
    """The owner of one directory below `parent` named after `prefix`, if there is any."""
    for path in _directories(parent, f"{prefix}."):
        owner = _owner_in(path)
        if owner is not None:
            return owner
    return None


def earlier_owner(own: OwnedDirectory, prefix: str) -> Owner | None:
    """The owner of a directory beside `own`, named after `prefix`, that came before and may live.

    For file systems without locks, where whoever came first goes first. Raises ``OSError`` where
    `own` is gone.
    """
    came = _claimed(own.path)
    for path in _directories(own.path.parent, f"{prefix}."):
        try:
            claimed = _claimed(path)
        except OSError:
            continue  # It has just ended, or is only just beginning.
        if claimed < came and came[0] - claimed[0] < _STALE_NANOSECONDS:
            owner = _owner_in(path)
            if owner is not None and _may_live(owner):
                return owner
    return None


def _owner_in(path: Path) -> Owner | None:
    try:
        return _parse((path / _OWNER_FILE).read_bytes())
    except OSError:
        return None


def _claimed(path: Path) -> tuple[int, str]:
    """When a directory was claimed by the file system's clock; the name decides between two."""
    return (path / _OWNER_FILE).stat().st_mtime_ns, path.name


def _may_live(owner: Owner) -> bool:
    if owner.boot != _boot():
        return True
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # Somebody else's, but alive.
    return True


def _claim(path: Path, content: bytes) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path / _OWNER_FILE, flags, 0o600)
    try:
        # Waits for nothing but a sweeper that looks at this very moment.
        wait_for_lock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, content)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _directories(parent: Path, prefix: str) -> Iterator[Path]:
    try:
        with os.scandir(parent) as listing:
            names = [item.name for item in listing if item.is_dir(follow_symlinks=False)]
    except OSError:
        return
    yield from (parent / name for name in names if name.startswith(prefix))


def _remove_if_abandoned(path: Path) -> None:
    if os.lstat(path).st_uid != os.geteuid():
        return
    try:
        descriptor = os.open(path / _OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if _age(os.stat(path)) > _CREATION_SECONDS:
            _remove_tree(path)
        return
    try:
        if _is_abandoned(descriptor):
            _remove_tree(path)
    finally:
        os.close(descriptor)


def _is_abandoned(descriptor: int) -> bool:
    lock = try_lock(descriptor, fcntl.LOCK_EX)
    if lock is Flock.CONTENDED:
        return False
    owner = _parse(os.read(descriptor, _OWNER_FILE_LIMIT))
    age = _age(os.fstat(descriptor))
    if owner is None:
        return age > _CREATION_SECONDS
    if lock is Flock.TAKEN and owner.boot == _boot():
        return True
    # A lock that can be had proves nothing about another machine: network file systems may be
    # mounted with locks that hold on one machine only.
    return age > _DISTANT_OWNER_SECONDS


def _age(status: os.stat_result) -> float:
    # A time in the future comes from a clock that was wrong; it counts the same.
    return abs(time.time() - status.st_mtime)


def _parse(content: bytes) -> Owner | None:
    try:
        fields = json.loads(content)
        return Owner(int(fields["pid"]), _printable(fields["host"]), str(fields["boot"]))
    except (ValueError, KeyError, TypeError):
        return None


def _printable(text: object) -> str:
    return "".join(character for character in str(text)[:64] if character.isprintable())


def _boot() -> str:
    """Identifies the running kernel: processes that share it see each other's locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def _remove_tree(path: Path) -> None:
    # What still runs there is the compiler of an interrupted build: ninja starts it in a process
    # group of its own, where neither a signal to the caller nor the end of ninja reaches it.
    end_processes_in(path)
    # Whose it is goes last: of what somebody leaves who dies meanwhile, others can tell that.
    with suppress(OSError), os.scandir(path) as listing:
        for item in listing:
            if item.is_dir(follow_symlinks=False):
                shutil.rmtree(item.path, ignore_errors=True)
            elif item.name != _OWNER_FILE:
                os.unlink(item.path)
    shutil.rmtree(path, ignore_errors=True)


def end_processes_in(path: Path) -> None:
    """End this user's processes whose working directory is `path` or below. Does not raise."""
    where = os.path.realpath(path)
    for _ in range(100):  # A process that is about to start another may be caught in between.
        running = [pid for pid in _own_processes() if _works_in(pid, where)]
        if not running:
            return
        for pid in running:
            try:
                os.kill(pid, signal.SIGTERM)
            except OSError:
                continue
        time.sleep(0.01)


def _own_processes() -> list[int]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def _works_in(pid: int, directory: str) -> bool:
    try:
        current = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return False  # Gone, or somebody else's.
    return current == directory or current.startswith(directory + "/")


def _remove_all_owned_here() -> None:
    while _owned_here:
        _owned_here[-1].remove()


def _leave_all_to_parent() -> None:
    """Let go of the directories in the child of a fork."""
    # The lock belongs to the open file, which a fork shares; closing this copy of the descriptor
    # leaves the parent's lock in place, and lets it end with the parent.
    for directory in _owned_here:
        os.close(directory._descriptor)
    _owned_here.clear()


atexit.register(_remove_all_owned_here)
os.register_at_fork(after_in_child=_leave_all_to_parent)
