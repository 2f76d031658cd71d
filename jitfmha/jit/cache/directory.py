"""Where builds are kept: found, checked, created, or replaced by a temporary place."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

from ..errors import CacheError
from .trust import parents_reason, private_directory_reason

# Raised when the layout below changes; caches of other versions of the package stay as they are.
_LAYOUT = "v1"
_ENVIRONMENT = "JITFMHA_CACHE_DIR"
_ADVICE = f"Set {_ENVIRONMENT} to a directory that belongs to you and that only you can write to."
_ADVICE_WITHOUT_HOME = f"Set HOME, or {_ENVIRONMENT} to a directory of your own."
_ADVICE_ABOUT_NOEXEC = (
    f"Set {_ENVIRONMENT} to a directory on a file system from which programs may run."
)
_ADVICE_ABOUT_SPACE = (
    f"Free some space there, or set {_ENVIRONMENT} to a directory on another file system."
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Sources, objects and what is built; less is used up before a launcher is there.
_LEAST_FREE_BYTES = 1 << 20


class CacheDirectory:
    """The folders of one cache.

    Attributes:
        root: the versioned folder that holds the others.
        entries: finished builds, one directory each.
        building: private directories of builds under way.
        locks: one file per entry that was ever built, to take turns.
        trash: entries taken out of service but perhaps still mapped by a process.
        logs: what the compiler said in failed builds.
        replaced: why the configured cache is not used, where this one goes when this process ends.
    """

    def __init__(self, cache: Path, *, replaced: str = "") -> None:
        """The folders of this version in the directory that the user sees as the cache."""
        self.root = cache / _LAYOUT
        names = ("entries", "building", "locks", "trash", "logs")
        self.folders = tuple(self.root / name for name in names)
        self.entries, self.building, self.locks, self.trash, self.logs = self.folders
        self.replaced = replaced


# The temporary caches of this process, by the root they stand in for ("" if there is none).
_stand_ins: dict[str, CacheDirectory] = {}


def cache_dir() -> Path:
    """The cache of this process: `JITFMHA_CACHE_DIR`, else the user's cache directory.

    Nothing is created or checked. If an earlier call had to fall back to a temporary directory,
    that is returned.

    Raises:
        CacheError: the variable is not set and no home directory is known, or it names one that
            does not exist.
    """
    root = _configured_root()
    if root in _stand_ins:
        return _stand_ins[root].root.parent
    if not root:
        raise CacheError(f"no cache directory: no home directory is known. {_ADVICE_WITHOUT_HOME}")
    return Path(root)


def readable_directories() -> list[CacheDirectory]:
    """The caches to look for finished builds in, best first. Creates nothing. Raises ``CacheError``
    where somebody else could put code into the configured cache.
    """
    root = _configured_root()
    stand_in = _usable_stand_in(root)
    found = [] if stand_in is None else [stand_in]
    if not root:
        return found
    directory = CacheDirectory(Path(root))
    try:
        check_trust(directory, must_exist=True)
        if not forbids_execution(directory.root):
            found.append(directory)
    except OSError:
        pass  # What cannot be looked at, or is not there, holds nothing for this process.
    return found


def writable_directory() -> CacheDirectory:
    """The cache to build into, created where it is missing.

    What cannot be written to is replaced by a temporary directory of this process, with a warning.

    Raises:
        CacheError: somebody else could put code into the cache, or there is no temporary directory
            either.
    """
    root = _configured_root()
    stand_in = _usable_stand_in(root)
    if stand_in is not None:
        return stand_in
    if not root:
        return _stand_in("has no place: no home directory is known", _ADVICE_WITHOUT_HOME)
    directory = CacheDirectory(Path(root))
    try:
        check_trust(directory)
        _create(directory)
        check_trust(directory, must_exist=True)
    except OSError as error:
        return _stand_in(f"{root!r} cannot be used ({error.strerror or error})", _advice(error))
    if forbids_execution(directory.root):
        return _stand_in(f"{root!r} is on a file system mounted noexec", _ADVICE_ABOUT_NOEXEC)
    return directory


def substitute(directory: CacheDirectory, error: OSError) -> CacheDirectory:
    """Where to build after `directory` has failed: a temporary directory, with a warning. Raises
    ``CacheError`` where `directory` is one already, or there is none.
    """
    reason = f"{str(directory.root.parent)!r} cannot be used ({error})"
    if directory.replaced:
        raise CacheError(
            f"the build cache {directory.replaced}, and its stand-in {reason}. {_advice(error)}"
        ) from error
    return _stand_in(reason, _advice(error))


def _advice(error: OSError) -> str:
    return _ADVICE_ABOUT_SPACE if error.errno in _NO_SPACE else _ADVICE


def _stand_in(reason: str, advice: str) -> CacheDirectory:
    """A temporary cache in place of the configured one, for the rest of this process.

    ``reason`` goes on from "the build cache"; ``advice`` is what to do about that. Raises
    ``CacheError`` where no temporary directory can be had.
    """
    # Imported here because a filled cache has no use for them.
    import tempfile

    from .owned_directory import OwnedDirectory, sweep

    prefix = f"jitfmha-{os.geteuid()}"
    try:
        parent = Path(tempfile.gettempdir()).absolute()
        weakness = parents_reason(str(parent), must_exist=True) or _unfitness(parent)
        if weakness:
            raise CacheError(
                f"the build cache {reason}, and no temporary directory can stand in for it, "
                f"because {weakness}. {advice}"
            )
        sweep(parent, prefix + ".")
        directory = CacheDirectory(OwnedDirectory(parent, prefix).path, replaced=reason)
        _create(directory)
    except OSError as error:
        raise CacheError(
            f"the build cache {reason}, and no temporary directory can stand in for it "
            f"({error}). {advice}"
        ) from error
    _stand_ins[_configured_root()] = directory
    warnings.warn(
        f"jitfmha: the build cache {reason}; building in {str(directory.root.parent)!r} for this "
        f"process only. {advice}",
        RuntimeWarning,
        stacklevel=2,
    )
    return directory


def _unfitness(parent: Path) -> str:
    """Why nothing can be built and loaded in a directory for temporary files; empty if it can."""
    if forbids_execution(parent):
        return f"{str(parent)!r} is on a file system mounted noexec"
    status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    # Some file systems do not say how many blocks they have.
    if status.f_blocks and free < _LEAST_FREE_BYTES:
        return f"{str(parent)!r} has only {free >> 10} KiB of free space"
    return ""


def check_trust(directory: CacheDirectory, *, must_exist: bool = False) -> None:
    """Refuse a cache that somebody else could put code into, by a ``CacheError``.

    With ``must_exist`` the way to it and its root have to be there, else there is an ``OSError``.
    Where they need not be, somebody else may make them after this check.
    """
    reason = parents_reason(str(directory.root.parent), must_exist=must_exist)
    reason = reason or private_directory_reason(str(directory.root), must_exist=must_exist)
    for folder in directory.folders:
        reason = reason or private_directory_reason(str(folder))
    _refuse(directory, reason)


def check_way_to(entry: Path) -> None:
    """Refuse the entry in the directory `entry` if somebody else can change what is there.

    Asked again right before it is used, with every part of the way there. What passes now stays as
    it is, because only this user and root can change it. Raises as `check_trust` does.
    """
    directory = CacheDirectory(entry.parents[2])
    check_trust(directory, must_exist=True)
    for folder in (directory.entries, entry):
        _refuse(directory, private_directory_reason(str(folder), must_exist=True))


def _refuse(directory: CacheDirectory, reason: str | None) -> None:
    if reason:
        raise CacheError(
            f"the build cache {str(directory.root)!r} is not safe: {reason}. {_ADVICE}"
        )


def _usable_stand_in(root: str) -> CacheDirectory | None:
    """The temporary cache in place of `root`, if it is there and this user's.

    It lies where others can write to: when a cleaner of temporary files has removed it, anybody may
    make it again. It is forgotten then.
    """
    directory = _stand_ins.get(root)
    if directory is None:
        return None
    try:
        check_trust(directory, must_exist=True)
        for folder in directory.folders:
            make_private(folder)  # Cleaners begin with what is empty.
    except (CacheError, OSError):
        _stand_ins.pop(root, None)
        return None
    return directory


def _configured_root() -> str:
    """An absolute path, or "" if there is none."""
    chosen = os.environ.get(_ENVIRONMENT, "")
    if chosen:
        expanded = os.path.expanduser(chosen)
        if expanded.startswith("~"):
            raise CacheError(
                f"{_ENVIRONMENT}={chosen!r}: there is no such home directory. {_ADVICE}"
            )
        return os.path.abspath(expanded)
    import platformdirs  # of use where no variable names the cache

    # Without a home directory new versions raise, and in old ones the path starts with "~".
    try:
        standard = platformdirs.user_cache_dir("jitfmha", appauthor=False)
    except RuntimeError:
        return ""
    return standard if os.path.isabs(standard) else ""


def _create(directory: CacheDirectory) -> None:
    make_private(directory.root)
    for folder in directory.folders:
        make_private(folder)
    # Existing folders say nothing about permission, and a file system can be full.
    probe = directory.building / f"probe-{os.urandom(8).hex()}"
    os.mkdir(probe, 0o700)
    os.rmdir(probe)


def make_private(path: Path) -> None:
    """Like mkdir -p, but private also where the parents are missing."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(0o700, exist_ok=True)


def write_private(path: Path, content: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """Write a new file for this user alone, and the folders on the way to it.

    With ``durable`` it waits until the file is on the disk: network file systems report a full disk
    only then. Raises ``OSError`` where it cannot be written.
    """
    make_private(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def forbids_execution(path: Path) -> bool:
    """Whether `path` is on a file system mounted noexec."""
    if not hasattr(os, "ST_NOEXEC"):
        return False
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except FileNotFoundError:
        return False
