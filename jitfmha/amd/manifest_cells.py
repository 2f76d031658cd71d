"""The cells of a tree's manifests, and whether a file of a tree may be trusted."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from pathlib import Path

from ..jit.cache.trust import file_reason
from .code_object import list_of_names

# Both end up inside C++ string literals; a file stays inside of its tree.
SYMBOL = re.compile(r"[A-Za-z_$.][A-Za-z0-9_$.]*")
FILE = re.compile(r"[A-Za-z0-9_+,=-][A-Za-z0-9_.+,=-]*(/[A-Za-z0-9_+,=-][A-Za-z0-9_.+,=-]*)*")
_MOST_DIGITS = 18
_SHOWN_LETTERS = 100


class OddRow(Exception):
    """Why a row, or a whole manifest, cannot be used."""


def manifest_lines(path: Path, columns: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a manifest with their line numbers, as column -> cell.

    Lines that are comments in AITER's eyes are left out. Raises ``OSError``,
    ``UnicodeDecodeError``, ``csv.Error`` or :class:`OddRow` where the manifest as a whole cannot be
    read.
    """
    text = path.read_text(encoding="utf-8-sig")
    # An empty line in the place of each keeps the numbers of the others.
    text = re.sub(r"(?m)^[ \t]*(#|//|;).*$", "", text)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    first = next((cells for cells in reader if cells), [])
    header = [name.strip() for name in first]
    missing = [name for name in columns if name not in header]
    if missing:
        raise OddRow(f"it has no column {', '.join(missing)}")
    twice = sorted(name for name, count in Counter(header).items() if name and count > 1)
    if twice:
        raise OddRow(f"it has the column {list_of_names(twice)} more than once")
    lines = []
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        # A row that is too short lacks what its missing columns would say; its reader says which.
        lines.append(
            (reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=False)))
        )
    return lines


def plain_name(symbol: str) -> str:
    """The name of a kernel without the decoration of its symbol."""
    decorated = re.fullmatch(r"_ZN5aiter\d+(\w+)E", symbol)
    return decorated[1] if decorated else symbol


def distrust(path: Path) -> str | None:
    """Why somebody else could have put the file there or change it; None if nobody could."""
    try:
        return file_reason(str(path.absolute()))
    except OSError:
        return None  # Who opens it says why it cannot be read.


def number_of(name: str, text: str) -> int:
    """A cell that holds a number. Raises :class:`OddRow`, as all that read cells do."""
    # int() also takes "1_0" and digits of other scripts, and raises for very many digits.
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise OddRow(f"{name} {shown(text)} is not a number of up to {_MOST_DIGITS} digits")
    return int(text)


def positive(name: str, text: str) -> int:
    """A number from 1 to 65535."""
    number = number_of(name, text)
    if not 0 < number < 1 << 16:
        raise OddRow(f"{name} {text!r} is not between 1 and 65535")
    return number


def one_of(name: str, text: str, known: range | tuple[int, ...]) -> int:
    """A number that means something."""
    number = number_of(name, text)
    if number not in known:
        raise OddRow(f"{name} {text!r} is not known; {listed(known)} are")
    return number


def matching(name: str, text: str, form: re.Pattern[str], what: str) -> str:
    """A cell of a certain form; ``what`` is that form's name."""
    if not form.fullmatch(text):
        raise OddRow(f"{name} {shown(text)} is not {what}")
    return text


def shown(text: str) -> str:
    """A cell as messages quote it, where it may be of any length."""
    return repr(text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}...")


def listed(values: range | tuple[object, ...]) -> str:
    """What is known, for a message."""
    return ", ".join(str(value) for value in values)
