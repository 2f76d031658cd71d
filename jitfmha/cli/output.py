"""How results are shown: aligned tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain, zip_longest

from tqdm import tqdm

from ..jit.status import hand_lines_to
from .lines import folded, line_width, pieces

# Units from the smallest; a value is shown in the last one that it fills.
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_BAR = "{percentage:3.0f}% {bar:20} {elapsed} so far, about {remaining} left"
_BAR_WITHOUT_TOTAL = "{elapsed} so far"
_NARROWEST = 8  # that a column is made, however narrow the terminal is


def print_json(value: object) -> None:
    """Print a value as one JSON document."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


def show(text: str = "") -> None:
    """Print what people read, in lines that fit the terminal."""
    print(folded(text))


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An aligned table under a header line; a column of figures is flush right.

    Where the terminal is narrower, wide cells go on in the lines below.
    """
    lines = [tuple(headers), *(tuple(map(str, row)) for row in rows)]
    columns = list(zip(*lines, strict=True))
    widths = _widths(columns)
    are_figures = [bool(rows) and all(map(_is_figure, column[1:])) for column in columns]

    def shown(line: tuple[str, ...]) -> list[str]:
        cells = map(pieces, line, widths)
        return [
            "  ".join(
                cell.rjust(width) if figures else cell.ljust(width)
                for cell, width, figures in zip(parts, widths, are_figures, strict=True)
            ).rstrip()
            for parts in zip_longest(*cells, fillvalue="")
        ]

    rule = "  ".join("-" * width for width in widths)
    return "\n".join((*shown(lines[0]), rule, *chain.from_iterable(map(shown, lines[1:]))))


def _widths(columns: list[tuple[str, ...]]) -> list[int]:
    """Those of the columns, the widest ones narrower where all do not fit beside each other."""
    widths = [max(map(len, column)) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > line_width() and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return [
        max(len(piece) for cell in column for piece in pieces(cell, width))
        for column, width in zip(columns, widths, strict=True)
    ]


def fields(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns, without a header; a value may have several lines."""
    width = max((len(name) for name, _ in pairs), default=0)
    lines = []
    for name, value in pairs:
        first, *others = value.splitlines() or [""]
        lines.append(f"{name.ljust(width)}  {first}".rstrip())
        lines.extend(f"{' ' * width}  {line}" for line in others)
    return folded("\n".join(lines), hang=width + 2)


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
