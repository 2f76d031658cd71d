"""Builds what is released, and checks it.

    python .ci/release.py FOLDER

makes a wheel and an sdist of a tree without changes, twice: the same bytes both times, for anybody
who has the commit. The changelog has to have the version, with the day of its release. Needs
`pip install '.[test]'`; uploads nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(folder: Path) -> None:
    """Build into ``folder``; ends with a sentence where something is not as it should be."""
    if _output("git", "status", "--porcelain"):
        sys.exit("there are changes that are not committed")
    version = re.findall(r'^__version__ = "(.+)"$', _text("jitfmha/version.py"), re.MULTILINE)[0]
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", _text("CHANGELOG.md"), re.M
    ):
        sys.exit(f"CHANGELOG.md has no section '## [{version}] - YEAR-MONTH-DAY'")
    files = _built(folder)
    with tempfile.TemporaryDirectory() as again:
        if _built(Path(again)) != files:
            sys.exit("a second build has other bytes")
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *(str(folder / x) for x in files)],
        check=True,
    )
    _check_wheel(folder / f"jitfmha-{version}-py3-none-any.whl")
    for name, digest in sorted(files.items()):
        print(f"{digest}  {name}")


def _built(folder: Path) -> dict[str, str]:
    """Build both, the wheel from the sdist; their names and hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")
    time = _output("git", "show", "-s", "--format=%ct", "HEAD")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"SOURCE_DATE_EPOCH": time}
    )
    return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in folder.iterdir()}


def _check_wheel(wheel: Path) -> None:
    """It has every file of the repository that belongs in it, and no other."""
    tracked = _output("git", "ls-files", "jitfmha", "csrc_templates", "hsa").splitlines()
    expected = {x if x.startswith("jitfmha/") else f"jitfmha/{x}" for x in tracked}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    if names != expected:
        sys.exit(f"{wheel.name} lacks or has too much: {sorted(names ^ expected)}")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
