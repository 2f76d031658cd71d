#!/usr/bin/env python3
"""Formats the repository's C++ and HIP sources by `.clang-format`, templates included.

    python .ci/clang_format.py              # rewrite what is not in form
    python .ci/clang_format.py --check      # show it, and fail
    python .ci/clang_format.py FILE ...     # these files only

A template's placeholders, `@{name}`, are no C++. In the place of each, clang-format sees an
identifier of the same length; of one that has a line to itself, a comment, so that the line stays.
It leaves the text of comments alone, so that a line that is too long is for a person to break;
`--check` names it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".cpp", ".h", ".hip", ".inc", ".cpp.in", ".h.in", ".hip.in", ".inc.in")
# A letter that none of the sources uses, so that the way back is unambiguous.
MARK = "µ"
COLUMNS = int(re.findall(r"^ColumnLimit: (\d+)$", (ROOT / ".clang-format").read_text(), re.M)[0])
NAME = "[A-Za-z_][A-Za-z0-9_]*"
# (pattern, what stands for it, the stand-in's pattern), in the order in which they are looked for.
PLACEHOLDERS = (
    (rf"(?m)^([ \t]*)@\{{({NAME})\}}$", rf"\1// {MARK}\2", rf"// {MARK}({NAME})$"),
    (rf"@\{{({NAME})\}}", rf"{MARK}{MARK}\1{MARK}", rf"{MARK}{MARK}({NAME}){MARK}"),
)


def tracked_sources() -> list[Path]:
    """Every source that git knows and that has not been deleted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    names = [name for name in listed.split("\0") if name.endswith(SUFFIXES)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def clang_format_of_this_environment() -> str:
    """The pinned clang-format, not one that the system happens to have: versions differ."""
    found = shutil.which("clang-format", path=sysconfig.get_path("scripts"))
    if found is None:
        raise SystemExit("clang-format is not installed beside this Python: pip install '.[test]'")
    return found


def formatted(clang_format: str, path: Path, text: str) -> str:
    """The text in form.

    Raises:
        ValueError: it holds the letter that stands for placeholders.
        subprocess.CalledProcessError: clang-format fails.
    """
    if MARK in text:
        raise ValueError(f"{path} holds the letter {MARK}, which stands for placeholders here")
    # The name says which header is the file's own, and that all of them are C++.
    name = str(path).removesuffix(".in")
    if not name.endswith((".cpp", ".h")):
        name += ".cpp"
    for placeholder, stand_in, _ in PLACEHOLDERS:
        text = re.sub(placeholder, stand_in, text)
    text = subprocess.run(
        [clang_format, "--style=file", f"--assume-filename={name}"],
        input=text,
        check=True,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ).stdout
    for _, _, stand_in in PLACEHOLDERS:
        text = re.sub(stand_in, r"@{\1}", text, flags=re.M)
    return text


def show_changes(path: Path, before: str, after: str) -> None:
    """Print what formatting would change."""
    name = str(path.relative_to(ROOT))
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(old, new, name, f"{name}, in form"))


def show_long_lines(path: Path, text: str) -> int:
    """Print the lines that are too long; their number."""
    long_lines = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]
    for number in long_lines:
        print(f"{path.relative_to(ROOT)}:{number}: longer than {COLUMNS} columns")
    return len(long_lines)


def main() -> int:
    """Format, or check; whether all is in form decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if needed")
    parser.add_argument("files", nargs="*", type=Path, help="default: all that git tracks")
    arguments = parser.parse_args()
    clang_format = clang_format_of_this_environment()
    out_of_form = long_lines = 0
    for path in [file.resolve() for file in arguments.files] or tracked_sources():
        before = path.read_text(encoding="utf-8")
        after = formatted(clang_format, path, before)
        out_of_form += before != after
        if arguments.check:
            show_changes(path, before, after)
            long_lines += show_long_lines(path, after)
        elif before != after:
            path.write_text(after, encoding="utf-8")
    if arguments.check and out_of_form:
        print(f"{out_of_form} files are not in form; run: python .ci/clang_format.py")
    return int(arguments.check and bool(out_of_form or long_lines))


if __name__ == "__main__":
    sys.exit(main())
