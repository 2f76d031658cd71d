"""Publishes a folder: it is complete, or it is not there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_INVENTORY = "exported.json"


class ForeignFilesError(ValueError):
    """The folder holds what no export wrote."""


def check_folder(folder: Path) -> None:
    """Raise :class:`ForeignFilesError` unless a folder is absent, empty, or an earlier export."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ForeignFilesError(f"{folder} is there and is no folder")
    found = {x.relative_to(folder).as_posix() for x in folder.rglob("*") if not x.is_dir()}
    foreign = sorted(found - _exported_files(folder))
    if foreign:
        raise ForeignFilesError(f"{folder} has files that no export wrote, such as {foreign[0]}")


def publish(folder: Path, files: Mapping[str, str]) -> None:
    """Write files, by their paths in the folder, in the place of an earlier export.

    Raises ``ForeignFilesError`` where the folder holds something else, ``OSError`` where it cannot
    be written; then everything is as it was.
    """
    check_folder(folder)
    folder = Path(os.path.abspath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        complete, replaced = Path(scratch, "complete"), Path(scratch, "replaced")
        for name, text in files.items():
            path = complete / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if folder.exists():
            os.rename(folder, replaced)
        try:
            os.rename(complete, folder)
        except OSError:
            if replaced.exists():
                os.rename(replaced, folder)
            raise


def _exported_files(folder: Path) -> set[str]:
    try:
        listed = json.loads((folder / _INVENTORY).read_text(encoding="utf-8"))["files"]
        return {_INVENTORY, *map(str, listed)}
    except (OSError, ValueError, LookupError, TypeError):
        return set()
