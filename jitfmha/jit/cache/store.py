"""What the loader needs of a place where builds are kept; ours is local_store.py.

Another store (a team's, a site's, one that CI fills) plugs in there: it has these operations, and
loader.py names the one in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ..errors import StoreFailure
from .entry import EntryMeta, OpenEntry
from .key import EntryKey


class Store(Protocol):
    """Keeps entries by their keys. A key says all that went into an entry, so none ever changes.

    A shared or remote store has to guarantee what the local one does:

    * An entry is visible whole or not at all, and the first one published under a key stays.
    * What `find` and `publish` return was checked against its recorded sizes and SHA-256 in a place
      that nobody else can write to: a library is mapped into the process from `OpenEntry.artifact`,
      a path on this machine, after `OpenEntry.is_in_place` has looked at the way there once more.
      So what comes from elsewhere is first published in the local store.
      These checks say that nothing was damaged, not who made it. A store that others can write to
      needs a signature over `meta.json` besides, from somebody who is trusted with code.
    * A failure to reach it is a missing entry. It raises no error and keeps no call waiting for
      longer than a build takes.
    * Turns only save work. If they cannot be had, whoever asks may build, and the first publishes.
    """

    def find(self, key: EntryKey, *, warn: bool = True) -> OpenEntry | None:
        """The entry for `key`, checked and in use by this process; None if there is none.

        Args:
            key: without a compiler it asks for the entry of any compiler.
            warn: whether the user is told, once, of an entry that is there but damaged.

        Raises:
            CacheError: somebody else could put code into the store.
        """

    def turn(self, key: EntryKey) -> AbstractContextManager[OpenEntry | Turn]:
        """Wait until this process may build `key`, or until somebody else has: then the entry.

        Raises:
            CacheError: there is no safe place to build in.
            StoreFailure: also for an `OSError` in the `with` block; see `substitute`.
        """

    def substitute(self, name: str, failure: StoreFailure) -> Store:
        """Where to build `name` after this store has failed.

        Raises:
            CacheError: there is nothing else.
        """

    def locate(self, key: EntryKey) -> Path | None:
        """The directory where the entry for `key` is, or would be; None without a compiler.

        Raises:
            CacheError: somebody else could put code into the store, or there is none.
        """


class Turn(Protocol):
    """This process's turn to build one entry, and where.

    Attributes:
        destination: the directory that the entry will have on this machine.
        logs: a directory for what the compiler says in failed builds.
    """

    @property
    def destination(self) -> Path: ...

    @property
    def logs(self) -> Path: ...

    def workspace(self) -> AbstractContextManager[Path]:
        """A new directory for this build alone, with a path that a shell leaves alone.

        Raises:
            BuildError: in place of a `CompileFailure` in the `with` block whose cause is that the
                interpreter ends.
            OSError: in place of one whose cause is that the directory was removed.
        """

    def publish(self, meta: EntryMeta, contents: Mapping[str, bytes]) -> OpenEntry:
        """Make the entry visible; if somebody else was first, theirs is returned.

        Raises:
            BuildError: what was written does not read back, or is removed all the time.
            OSError: the disk is full or fails.
        """
