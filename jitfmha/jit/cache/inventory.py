"""What is in the cache, for people who look at it or clear it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .directory import CacheDirectory, readable_directories
from .entry import InvalidEntry, open_entry
from .eviction import delete, discard, empty_trash, entry_size
from .key import EntryKey
from .owned_directory import sweep


@dataclass(frozen=True)
class CacheEntry:
    """One entry of the cache, as it is on the disk.

    Attributes:
        name: of what was built.
        key: the hash in its path, of all that went into it.
        size: in bytes, all files together.
        created: seconds since the epoch; 0 if the entry does not say (any more).
        last_used: seconds since the epoch, to the hour.
        valid: whether it would be loaded.
        path: its directory.
    """

    name: str
    key: str
    size: int
    created: float
    last_used: float
    valid: bool
    path: Path


def cache_entries() -> list[CacheEntry]:
    """All entries, sorted by name; damaged ones too. Creates and changes nothing.

    Raises:
        CacheError: the cache is not safe.
    """
    found = []
    for directory in readable_directories():
        for path in _entry_paths(directory):
            entry = _describe(path)
            if entry is not None:
                found.append(entry)
    return sorted(found, key=lambda entry: (entry.name, entry.key))


def cache_clear() -> int:
    """Remove all entries and logs; returns how many entries there were.

    What a running process has loaded stays intact for that process and is deleted later.

    Raises:
        CacheError: the cache is not safe.
        OSError: an entry cannot be removed.
    """
    count = 0
    for directory in readable_directories():
        for path in _entry_paths(directory):
            discard(path, directory.trash)
            count += 1
        empty_trash(directory.trash)
        sweep(directory.building)
        for log in _listed(directory.logs):
            delete(log)
    return count


def _entry_paths(directory: CacheDirectory) -> list[Path]:
    return [path for path in _listed(directory.entries) if EntryKey.parse(path.name) is not None]


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _describe(path: Path) -> CacheEntry | None:
    key = EntryKey.parse(path.name)
    try:
        last_used = os.lstat(path).st_mtime
    except FileNotFoundError:
        return None
    if key is None:
        return None
    created, valid = _creation(path, key)
    label = f"{key.content}-{key.compiler}"
    return CacheEntry(key.name, label, entry_size(path), created, last_used, valid, path)


def _creation(path: Path, key: EntryKey) -> tuple[float, bool]:
    try:
        entry = open_entry(path, key)
    except (InvalidEntry, OSError):
        return 0.0, False
    if entry is None:
        return 0.0, False
    entry.close()
    return entry.meta.created, True
