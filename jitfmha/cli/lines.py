"""Lines that fit the terminal, for help and results; in a file or a pipe they have 80 columns."""

from __future__ import annotations

import re
import shutil
import textwrap


def line_width() -> int:
    """What ``COLUMNS`` says, else the terminal, else 80, as for the help of ``argparse``."""
    return shutil.get_terminal_size().columns


def folded(text: str, hang: int | None = None) -> str:
    """The text with long lines folded between words; words, such as paths, stay whole.

    ``hang`` is how many blanks stand before what goes on. None: as many as stand before the line's
    second column, which two blanks separate, or two more than before the line.
    """
    return "\n".join(_folded(line, hang) for line in text.split("\n"))


def _folded(line: str, hang: int | None) -> str:
    width = line_width()
    if len(line) <= width:
        return line
    begin = len(line) - len(line.lstrip())
    if hang is None:
        first = re.match(r" *\S+( \S+)* {2,}", line)
        hang = first.end() if first is not None and first.end() <= width // 2 else begin + 2
    return textwrap.fill(
        line[begin:],
        width,
        initial_indent=" " * begin,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def pieces(text: str, width: int) -> list[str]:
    """The text in pieces of at most ``width`` characters, cut behind blanks and marks."""
    found: list[str] = []
    while len(text) > width:
        cut = max((m.end() for m in re.finditer(r"[ _/,.-]", text[:width])), default=width)
        if text[width] == " ":
            cut = width
        found.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    return [*found, text]
