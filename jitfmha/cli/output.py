"""How results are shown: aligned tables for people, JSON for scripts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

# Units from the smallest; a value is shown in the last one that it fills.
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout and nothing else")


def print_json(value: object) -> None:
    """Print one JSON document."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned table under a header line; a column of figures is flush right."""
    columns = list(zip(headers, *rows, strict=True))
    shown = []
    for column in columns:
        width = max(map(len, column))
        figures = bool(rows) and all(_is_figure(cell) for cell in column[1:])
        shown.append([cell.rjust(width) if figures else cell.ljust(width) for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*shown, strict=True)]
    rule = "  ".join("-" * len(column[0]) for column in shown)
    return "\n".join((lines[0], rule, *lines[1:]))


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


def _is_figure(cell: str) -> bool:
    return cell in ("", "-") or cell[0].isdigit() or (cell[0] in "<>+-" and len(cell) > 1)
