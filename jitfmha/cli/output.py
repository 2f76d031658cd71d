"""How results are shown: aligned tables for people, JSON for scripts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest

from tqdm import tqdm

from ..jit.status import hand_lines_to

# Units from the smallest; a value is shown in the last one that it fills.
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_BAR = "{percentage:3.0f}% {bar:20} {elapsed} so far, about {remaining} left"
_BAR_WITHOUT_TOTAL = "{elapsed} so far"
_NARROWEST = 8  # that a column is made, however narrow the terminal is


def print_json(value: object) -> None:
    """Print a value as one JSON document."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An aligned table under a header line; a column of figures is flush right.

    Where a terminal is narrower, wide columns go on in the lines below.
    """
    texts = (map(str, row) for row in rows)
    columns = _wrapped(list(zip(headers, *texts, strict=True)), _terminal_width())
    shown = []
    for column in columns:
        width = max(map(len, column))
        figures = bool(rows) and all(_is_figure(cell) for cell in column[1:])
        shown.append([cell.rjust(width) if figures else cell.ljust(width) for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*shown, strict=True)]
    rule = "  ".join("-" * len(column[0]) for column in shown)
    return "\n".join((lines[0], rule, *lines[1:]))


def _terminal_width() -> int | None:
    """The width of the terminal that reads stdout; None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _wrapped(columns: list[tuple[str, ...]], width: int | None) -> list[tuple[str, ...]]:
    """The columns, with long cells of the widest ones in several rows, where they are too wide."""
    widths = [max(map(len, column)) for column in columns]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        if max(widths) <= _NARROWEST:
            break
        widths[widths.index(max(widths))] -= 1
    lines: list[tuple[str, ...]] = []
    for row in zip(*columns, strict=True):
        parts = [
            [cell[at : at + room] for at in range(0, len(cell), room)]
            for cell, room in zip(row, widths, strict=True)
        ]
        lines += zip_longest(*parts, fillvalue="") if any(parts) else [row]
    return list(zip(*lines, strict=True))


def fields(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns, without a header; a value may have several lines."""
    width = max((len(name) for name, _ in pairs), default=0)
    lines = []
    for name, value in pairs:
        first, *others = value.splitlines() or [""]
        lines.append(f"{name.ljust(width)}  {first}".rstrip())
        lines.extend(f"{' ' * width}  {line}" for line in others)
    return "\n".join(lines)


def byte_size(size: int) -> str:
    """A number of bytes as people read it."""
    value = float(size)
    for unit in _BYTES:
        if value < 1024 or unit == _BYTES[-1]:
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def progress(text: str) -> None:
    """One line about what is under way, on stderr."""
    print(text, file=sys.stderr, flush=True)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar on stderr with the time that is left, below the lines about what is under way.

    Where stderr is no terminal there are the lines alone. With a ``unit``, steps are counted.
    """

    def __init__(self, total: float = 0, unit: str = "") -> None:
        self._total = total
        self._format = (f"{{n_fmt}} of {{total_fmt}} {unit} " if unit else "") + _BAR
        self._bar = tqdm(
            total=total,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            bar_format=self._format if total else _BAR_WITHOUT_TOTAL,
            leave=False,
        )
        if not self._bar.disable:
            hand_lines_to(self.line)

    def __exit__(self, *_: object) -> None:
        hand_lines_to(None)
        self._bar.close()

    def line(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)
        sys.stderr.flush()

    def reach(self, done: float, total: float | None = None) -> None:
        """So much is done; ``total`` where that is known by now only."""
        if total is not None:
            self._total = self._bar.total = total
            self._bar.bar_format = self._format
        self._bar.update(min(done, self._total) - self._bar.n)
        self._bar.refresh()


def _is_figure(cell: str) -> bool:
    return cell in ("", "-") or cell[0].isdigit() or (cell[0] in "<>+-" and len(cell) > 1)
