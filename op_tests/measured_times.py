"""Where tests keep measured times: in a folder of their own, while builds stay where they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from jitfmha.jit.cache.directory import CacheDirectory, make_private
from jitfmha.planning import measured


@contextmanager
def times_in(folder: Path) -> Iterator[Path]:
    """Inside, measured times are beside an empty cache in ``folder``; gives their file."""
    directory = CacheDirectory(folder)
    for each in directory.folders:
        make_private(each)
    read_anew()
    with (
        patch.object(measured, "readable_directories", lambda: [directory]),
        patch.object(measured, "writable_directory", lambda: directory),
    ):
        yield directory.root / measured.FILE_NAME
    read_anew()


def read_anew() -> None:
    """Forget what this process has read, as a new one would."""
    measured._times.cache_clear()
