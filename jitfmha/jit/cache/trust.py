"""Whether somebody else could put code where this process will load it from.

The rules are those that ssh applies to its files: a path is as safe as the weakest directory on
the way to it. A directory is safe if it belongs to this user or to root and nobody else can write
to it; one that others can write to is safe as a parent if it has the sticky bit (like /tmp),
because then they cannot replace what they do not own.
"""

from __future__ import annotations

import os
import stat

_MAX_SYMBOLIC_LINKS = 40


def parents_reason(path: str) -> str | None:
    """Why the way to `path` (absolute), `path` included, is not safe; None if it is.

    Components that do not exist are safe: this process creates them for itself alone.

    Raises:
        OSError: a component cannot be looked at.
    """
    current = "/"
    pending = _components(path)
    links = 0
    reason = node_reason("/", os.lstat("/"), as_parent=True)
    while pending and reason is None:
        component = pending.pop()
        if component == "..":
            current = os.path.dirname(current)
            continue
        node = os.path.join(current, component)
        try:
            status = os.lstat(node)
        except FileNotFoundError:
            return None
        reason = node_reason(node, status, as_parent=True)
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


def private_directory_reason(path: str) -> str | None:
    """Why the directory `path` itself cannot hold code to run; None if it can or is not there.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return f"{path!r} is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path!r} is not a directory"
    return node_reason(path, status, as_parent=False)


def node_reason(path: str, status: os.stat_result, *, as_parent: bool) -> str | None:
    """Why what `status` describes is in somebody else's hands; None if it is not.

    Args:
        path: for the message.
        status: of the node itself, symbolic links not followed.
        as_parent: whether the sticky bit excuses a directory that others can write to.
    """
    if _is_foreign(status.st_uid):
        return (
            f"{path!r} is owned by user id {status.st_uid}, "
            f"not by this user (id {os.geteuid()}) or root"
        )
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


def _other_writers(status: os.stat_result) -> str:
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    # Group 0 is root's. A group with the number of the user is that user's private group, which
    # distributions with a umask of 002 rely on.
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (0, os.geteuid()):
        return f"group id {status.st_gid}"
    return ""


def _is_foreign(user: int) -> bool:
    return user not in (0, os.geteuid()) and not _stands_for_unmapped(user)


def _stands_for_unmapped(user: int) -> bool:
    """Whether `user` is what a user namespace shows for owners outside of it.

    In an unprivileged container the root of the host is such an owner, so all of the host's system
    directories would be refused otherwise.
    """
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            overflow = int(file.read())
        with open("/proc/self/uid_map", encoding="ascii") as file:
            mapped = sum(int(line.split()[2]) for line in file)
    except (OSError, ValueError, IndexError):
        return False
    return user == overflow and mapped < 2**32 - 1
