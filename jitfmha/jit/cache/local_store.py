"""The build cache of this user on this machine (or on a file system that machines share)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CacheError, StoreFailure
from .directory import CacheDirectory, advice_about, cache_dir, readable_directories, stand_in
from .entry import InvalidEntry, OpenEntry, open_entry
from .key import EntryKey

if TYPE_CHECKING:
    from .store import Turn


class LocalStore:
    """A `Store` below `JITFMHA_CACHE_DIR` or its default; its methods do as that protocol says.

    Attributes:
        directory: where to build; None for the configured cache.
        replaced: what failed before, where `directory` stands in for it.
    """

    def __init__(
        self, directory: CacheDirectory | None = None, replaced: Path | None = None
    ) -> None:
        self.directory = directory
        self.replaced = replaced
        self._reported: set[Path] = set()

    def find(self, key: EntryKey, *, warn: bool = True) -> OpenEntry | None:
        for path, published in _places(key):
            try:
                entry = open_entry(path, published)
            except InvalidEntry as invalid:
                reason = str(invalid)
            except OSError as error:
                reason = f"it cannot be read ({error.strerror})"
            else:
                if entry is not None:
                    return entry
                continue
            if warn:
                self._report(path, reason)
        return None

    def turn(self, key: EntryKey) -> AbstractContextManager[OpenEntry | Turn]:
        # Imported here because a filled cache has no use for it.
        from .local_turn import local_turn

        return local_turn(key, self.directory)

    def substitute(self, name: str, failure: StoreFailure) -> LocalStore:
        """A temporary directory of this process, with a warning."""
        if self.replaced is not None:
            raise CacheError(
                f"{name} cannot be built, neither in {str(self.replaced)!r} nor in "
                f"{str(failure.place)!r} ({failure.error}). {advice_about(failure.error)}"
            ) from failure.error
        if failure.is_temporary:
            raise CacheError(
                f"{name} cannot be built: {failure}. {advice_about(failure.error)}"
            ) from failure.error
        reason = f"{str(failure.place.parent)!r} cannot be used ({failure.error})"
        from .umask import owner_umask  # A filled cache has no use for it.

        with owner_umask():
            return LocalStore(stand_in(reason, advice_about(failure.error)), failure.place)

    def locate(self, key: EntryKey) -> Path | None:
        places = [path for path, _ in _places(key)]
        for path in places:
            if path.is_dir():
                return path
        if key.compiler is None:
            return None
        if places:
            return places[0]
        return CacheDirectory.below(cache_dir()).entries / key.directory_name

    def _report(self, path: Path, reason: str) -> None:
        if path in self._reported:
            return
        self._reported.add(path)
        warnings.warn(
            f"jitfmha: the cached build {path} is not used and will be built again: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )


def _places(key: EntryKey) -> Iterator[tuple[Path, EntryKey]]:
    """Where the entry may be: under its own key, or without a compiler under that of any."""
    for directory in readable_directories():
        if key.compiler is not None:
            yield directory.entries / key.directory_name, key
        else:
            yield from _entries_of_any_compiler(directory.entries, key)


def _entries_of_any_compiler(entries: Path, key: EntryKey) -> Iterator[tuple[Path, EntryKey]]:
    try:
        names = sorted(os.listdir(entries))
    except OSError:
        return
    for name in names:
        published = EntryKey.parse(name)
        if published is not None and key.is_served_by(published):
            yield entries / name, published
