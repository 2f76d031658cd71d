"""Finds finished builds in the cache of this user, which machines may share.

An entry never changes: its key says all that went into it, it appears whole by one rename, and the
first one published under a key stays. What is found was checked against its recorded sizes and
SHA-256, in a place that nobody else can write to.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from .directory import CacheDirectory, cache_dir, readable_directories
from .entry import InvalidEntry, OpenEntry, open_entry
from .key import EntryKey


def find(key: EntryKey, *, warn: bool = True) -> OpenEntry | None:
    """The entry for `key`, checked and in use by this process; None if there is none.

    A failure to read it is a missing entry.

    Args:
        key: without a compiler it asks for the entry of any compiler.
        warn: whether the user is told of an entry that is there but damaged.

    Raises:
        CacheError: somebody else could put code into the cache.
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


def locate(key: EntryKey) -> Path | None:
    """The directory where the entry for `key` is, or would be; None without a compiler.

    Raises:
        CacheError: somebody else could put code into the cache, or there is none.
    """
    places = [path for path, _ in _places(key)]
    for path in places:
        if path.is_dir():
            return path
    if key.compiler is None:
        return None
    return places[0] if places else CacheDirectory(cache_dir()).entries / key.directory_name


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
