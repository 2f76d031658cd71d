"""Whether somebody else could put code where this process will load it from.

The rules are those that ssh applies to its files: a path is as safe as the weakest directory on
the way to it. A directory is safe if it belongs to this user or to root and nobody else can write
to it; one that others can write to is safe as a parent if it has the sticky bit (like /tmp),
because then they cannot replace what they do not own.

In a user namespace all owners outside of it show as one number. Among them is the root of the
host, who owns the system's directories in an unprivileged container, and any other user. So they
are trusted with the first directories of a path only: below one that others can write to, anybody
may have made a directory, and what is loaded may be anybody's anyway.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache

_MAX_SYMBOLIC_LINKS = 40
_ALL_USERS = 2**32 - 1


def parents_reason(path: str, *, must_exist: bool = False) -> str | None:
    """Why the way to `path` (absolute), `path` included, is not safe; None if it is.

    Args:
        path: where to.
        must_exist: whether a missing component is an error. To who is about to create it for this
            user alone it is not; to who reads from `path` it is, because somebody else may create
            it in the meantime.

    Raises:
        FileNotFoundError: a component that must exist does not.
        OSError: a component cannot be looked at.
    """
    current = "/"
    pending = _components(path)
    links = 0
    status = os.lstat("/")
    reason = node_reason("/", status, as_parent=True, trusts_unmapped=True)
    is_sheltered = not _may_be_changed_by_others(status)
    while pending and reason is None:
        component = pending.pop()
        if component == "..":
            current = os.path.dirname(current)
            continue
        node = os.path.join(current, component)
        try:
            status = os.lstat(node)
        except FileNotFoundError:
            if must_exist:
                raise
            return None
        reason = node_reason(node, status, as_parent=True, trusts_unmapped=is_sheltered)
        is_sheltered = is_sheltered and not _may_be_changed_by_others(status)
        if not stat.S_ISLNK(status.st_mode):
            current = node
            continue
        links += 1
        if links > _MAX_SYMBOLIC_LINKS:
            return f"{path!r} leads through more than {_MAX_SYMBOLIC_LINKS} symbolic links"
        target = os.readlink(node)
        pending += _components(target)
        if os.path.isabs(target):
            current = "/"
    return reason


def private_directory_reason(path: str, *, must_exist: bool = False) -> str | None:
    """Why the directory `path` itself cannot hold code to run; None if it can or is not there.

    Raises:
        FileNotFoundError: it must exist and does not.
        OSError: it cannot be looked at.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if must_exist:
            raise
        return None
    if stat.S_ISLNK(status.st_mode):
        return f"{path!r} is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path!r} is not a directory"
    return node_reason(path, status, as_parent=False)


def file_reason(path: str) -> str | None:
    """Why what is read from the file `path` (absolute) is not safe; None if it is.

    Links on the way to it are followed. What passes stays as it is, because only this user and root
    can change it. Raises ``OSError`` where it cannot be looked at, or is not there.
    """
    reason = parents_reason(path, must_exist=True)
    return reason or node_reason(path, os.stat(path), as_parent=False)


def node_reason(
    path: str, status: os.stat_result, *, as_parent: bool, trusts_unmapped: bool = False
) -> str | None:
    """Why what `status` describes is in somebody else's hands; None if it is not.

    Args:
        status: of the node itself, symbolic links not followed.
        as_parent: whether the sticky bit excuses a directory that others can write to.
        trusts_unmapped: whether an owner outside of this user namespace is taken for root.
    """
    reason = _owner_reason(path, status.st_uid, trusts_unmapped)
    if reason:
        return reason
    if stat.S_ISLNK(status.st_mode):
        return None  # The mode of a link means nothing, and only its owner can replace it.
    if as_parent and status.st_mode & stat.S_ISVTX:
        return None
    others = _other_writers(status)
    if others:
        mode = stat.S_IMODE(status.st_mode)
        return f"{path!r} can be written to by {others} (mode {mode:04o})"
    return None


def _components(path: str) -> list[str]:
    """The components that matter, last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _may_be_changed_by_others(status: os.stat_result) -> bool:
    return not stat.S_ISLNK(status.st_mode) and bool(_other_writers(status))


def _other_writers(status: os.stat_result) -> str:
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _has_no_other_member(status.st_gid, os.geteuid()):
        return f"group id {status.st_gid}"
    return ""


@lru_cache(maxsize=16)
def _has_no_other_member(group: int, user: int) -> bool:
    """Whether who belongs to `group` is root, or `user` alone.

    The latter holds for the private group that distributions with a umask of 002 give each user:
    the primary one, numbered like the user. The number alone says nothing: on a system without
    private groups it may be any group's.
    """
    if group not in (0, user):
        return False
    # Asked only here, because directories answer it, and those of a site are slow.
    import grp
    import pwd

    try:
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        members = set()
    if group == 0:
        # That it is the primary one of others means nothing: system accounts have it.
        return members <= {"root"}
    try:
        account = pwd.getpwuid(user)
    except KeyError:
        return False
    if account.pw_gid != group or not members <= {account.pw_name}:
        return False
    return all(other.pw_uid == user for other in pwd.getpwall() if other.pw_gid == group)


def _owner_reason(path: str, owner: int, trusts_unmapped: bool) -> str | None:
    if owner == 0:
        return None
    if owner == _unmapped_owner():
        if trusts_unmapped:
            return None
        return (
            f"{path!r} is owned by user id {owner}, which in this user namespace stands for "
            "everybody outside of it"
        )
    if owner == os.geteuid():
        return None
    return f"{path!r} is owned by user id {owner}, not by this user (id {os.geteuid()}) or root"


@lru_cache(maxsize=1)
def _unmapped_owner() -> int | None:
    """The number that stands for all owners outside of this process's user namespace.

    It may be that of a user inside as well, who cannot be told from them then. None where every
    user is mapped, as outside of user namespaces.
    """
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            overflow = int(file.read())
        with open("/proc/self/uid_map", encoding="ascii") as file:
            mapped = sum(int(line.split()[2]) for line in file)
    except (OSError, ValueError, IndexError):
        return None
    return overflow if mapped < _ALL_USERS else None


# A child may enter a namespace of its own.
os.register_at_fork(after_in_child=_unmapped_owner.cache_clear)
