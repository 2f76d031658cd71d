#!/usr/bin/env python3
"""Builds the documents into a small site; a link that leads nowhere is an error.

    python .ci/site.py FOLDER

The documents are the repository's Markdown files, at their places, so that a link means the same in
the site as in a checkout. FOLDER is made, and must not exist.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
# What documents show or lead to.
_SHOWN = (".md", ".svg", ".png", ".hip", ".ipynb")
_PLACES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs", "examples"),
    *("hsa/README.md", "csrc_templates/emulator/README.md"),
)


def main() -> int:
    """Build the site; the exit code is that of mkdocs."""
    if len(sys.argv) != 2:
        sys.exit("usage: python .ci/site.py FOLDER")
    site = Path(sys.argv[1]).resolve()
    if site.exists():
        sys.exit(f"{site} exists already")
    with tempfile.TemporaryDirectory() as scratch:
        pages = Path(scratch) / "pages"
        for place in _PLACES:
            _copy(_ROOT / place, pages / place)
        config = Path(scratch) / "mkdocs.yml"
        shutil.copy(_ROOT / ".ci" / "mkdocs.yml", config)
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
        command += ["--config-file", str(config), "--site-dir", str(site)]
        return subprocess.run(command, check=False).returncode


def _copy(source: Path, to: Path) -> None:
    files = source.rglob("*") if source.is_dir() else [source]
    for file in files:
        if file.suffix in _SHOWN:
            target = to / file.relative_to(source) if source.is_dir() else to
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


if __name__ == "__main__":
    sys.exit(main())
