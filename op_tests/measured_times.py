"""Where tests keep measured times: in a folder of their own, while builds stay where they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from jitfmha.jit.cache.directory import CacheDirectory, make_private
from jitfmha.planning import measured_file


@contextmanager
def times_in(folder: Path) -> Iterator[Path]:
    """Inside, measured times are beside an empty cache in ``folder``; gives their file."""
    directory = CacheDirectory(folder)
    for each in directory.folders:
        make_private(each)
    read_anew()
    with (
        patch.object(measured_file, "readable_directories", lambda: [directory]),
        patch.object(measured_file, "writable_directory", lambda: directory),
    ):
        yield directory.root / measured_file.FILE_NAME
    read_anew()


def read_anew() -> None:
    """Forget what this process has read, as a new one would."""
    measured_file._times.cache_clear()
