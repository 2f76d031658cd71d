"""What compiled kernels are made of: data types, tiles and waves, one file for each architecture.

``gfx942.csv`` and ``gfx950.csv`` beside this module are what calls are planned from and what the
templates are rendered with. A file has four tables, each a line with its name in brackets, a line
of columns, and rows. Empty lines and those that begin with ``#`` say nothing. Bad data is an error
that names the file, the line and the value; ``tile_rules.py`` says what must hold of the numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ...amd.manifest import Cells, OddRow
from ...problem.problem import Direction

KernelPart = Literal["forward", "dq", "dk_and_dv", "dk", "dv"]
"""Which results a kernel makes: those of forward, or gradients."""

WithFeatures = Literal["none", "light one", "any"]
"""How much a kernel has beside the plain computation; a light feature takes few registers."""

Product = Literal["FP32", "BF16", "FP16", "FP8", "BF8", "INT8"]
"""Numbers as ``elements.h`` and ``number_formats.h`` name them."""

PRODUCT_BYTES: Mapping[Product, int] = {
    "FP32": 4,
    "BF16": 2,
    "FP16": 2,
    "FP8": 1,
    "BF8": 1,
    "INT8": 1,
}
WAVE = 64  # lanes

_MOST = (1 << 20) - 1  # of a cell


class TileTableError(ValueError):
    """The data of compiled kernels cannot be used; the text names file, line and value."""


class Elements(NamedTuple):
    """What a data type is in C++.

    An ``element`` is in memory; products of queries and keys take ``scores``, and those of
    probabilities and values ``products``.
    """

    line: int
    dtype: str
    element: Product
    scores: Product
    products: Product


class Tile(NamedTuple):
    """The shape of a kernel's work for calls with head dimensions up to some.

    Attributes:
        line: of the file.
        dtypes: of queries.
        slices: of the columns that are made, each of which has workgroups of its own.
        tile_q, tile_k: queries and keys of a tile.
        waves: of a workgroup.
        lds_bytes: that the tiles of a workgroup take at most.
    """

    line: int
    kernel: KernelPart
    dtypes: tuple[str, ...]
    hdim_q: int
    hdim_v: int
    slices: int
    tile_q: int
    tile_k: int
    waves: int
    lds_bytes: int

    @property
    def threads(self) -> int:
        return WAVE * self.waves

    @property
    def owns_queries(self) -> bool:
        """Whether a workgroup's own rows are queries, which go through the keys they see."""
        return self.kernel in ("forward", "dq")

    @property
    def own_rows(self) -> int:
        """Rows that a workgroup has for itself: queries, or of a kernel of dk and dv keys."""
        return self.tile_q if self.owns_queries else self.tile_k

    @property
    def made_columns(self) -> int:
        """Columns of the result: of the output or dv those of v, of dq or dk those of q."""
        of_results = {"dq": self.hdim_q, "dk": self.hdim_q}
        return of_results.get(self.kernel, self.hdim_v)

    @property
    def other_rows(self) -> int:
        """Rows of the tiles that it goes through."""
        return self.tile_k if self.owns_queries else self.tile_q

    @property
    def direction(self) -> Direction:
        return "forward" if self.kernel == "forward" else "backward"

    def has_room_for(self, hdim_q: int, hdim_v: int) -> bool:
        return hdim_q <= self.hdim_q and hdim_v <= self.hdim_v


class SimdWaves(NamedTuple):
    """How many waves share a SIMD where each holds up to so many registers.

    Attributes:
        line: of the file.
        features: of the kernels that the row is for; the templates say what counts as one.
        held_registers: vector registers that a wave holds throughout its loop.
    """

    line: int
    direction: Direction
    features: WithFeatures
    held_registers: int
    waves_of_simd: int


class EarlyLoads(NamedTuple):
    """Forward kernels that load the next tile from the products with values on.

    Attributes:
        line: of the file.
        waves_of_simd: that share a SIMD in them.
        held_registers: up to how many a wave holds throughout its loop.
    """

    line: int
    waves_of_simd: int
    held_registers: int


class TileTable(NamedTuple):
    """The rows of one architecture's file."""

    path: Path
    elements: tuple[Elements, ...]
    tiles: tuple[Tile, ...]
    simd_waves: tuple[SimdWaves, ...]
    early_loads: tuple[EarlyLoads, ...]

    def elements_of(self, dtype: str) -> Elements:
        return next(row for row in self.elements if row.dtype == dtype)

    def tiles_of(self, direction: Direction, dtype: str) -> tuple[Tile, ...]:
        """The rows that serve a data type of queries; none where nothing does."""
        return tuple(
            row for row in self.tiles if row.direction == direction and dtype in row.dtypes
        )

    def dtypes_of(self, direction: Direction) -> tuple[str, ...]:
        served = (row.dtypes for row in self.tiles if row.direction == direction)
        return tuple(dict.fromkeys(dtype for dtypes in served for dtype in dtypes))

    def simd_waves_of(self, direction: Direction, features: WithFeatures) -> tuple[SimdWaves, ...]:
        """The rows for kernels of one kind, by the registers that a wave holds."""
        kind = direction, features
        return tuple(row for row in self.simd_waves if (row.direction, row.features) == kind)


# ---- Reading -------------------------------------------------------------------------------------


def read_table(path: Path) -> TileTable:
    """A file as it is; whether it keeps the rules is not looked at.

    Raises ``TileTableError`` for what is no table of this form, naming line and value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TileTableError(f"{path} cannot be read: {error}") from error
    tables: dict[str, list[Any]] = {}
    name, columns = "", None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            if line.startswith("["):
                name, columns = line.strip("[] "), None
                if name not in _TABLES or name in tables:
                    known = ", ".join(_TABLES)
                    raise OddRow(f"the table {name!r} is not known, or here twice; {known} are")
                tables[name] = []
            elif not name:
                raise OddRow(f"{line!r} stands before the first table")
            else:
                cells = [cell.strip() for cell in next(csv.reader([line]))]
                expected, read = _TABLES[name]
                if columns is None:
                    columns = expected
                    if tuple(cells) != columns:
                        raise OddRow(f"the columns are {line!r}; expected {','.join(columns)}")
                elif len(cells) != len(columns):
                    raise OddRow(f"{line!r} has {len(cells)} cells; expected {len(columns)}")
                else:
                    row = Cells(dict(zip(columns, cells, strict=True)))
                    tables[name].append(read(number, row))
        except OddRow as error:
            raise TileTableError(f"{path}, line {number}: {error}") from error
    missing = [name for name in _TABLES if not tables.get(name) and name != "early loads"]
    if missing:
        raise TileTableError(f"{path} has no rows of {', '.join(missing)}")
    return TileTable(path, *(tuple(tables.get(name, ())) for name in _TABLES))


def _elements(line: int, cells: Cells) -> Elements:
    named = (cells.word(x, get_args(Product)) for x in ("element", "scores", "products"))
    return Elements(line, cells.text("dtype"), *named)


def _tile(line: int, cells: Cells) -> Tile:
    return Tile(
        line,
        cells.word("kernel", get_args(KernelPart)),
        tuple(cells.text("dtypes").split()),
        *(cells.positive(column, _MOST) for column in _TILE_COLUMNS[2:]),
    )


def _simd_waves(line: int, cells: Cells) -> SimdWaves:
    return SimdWaves(
        line,
        cells.word("direction", get_args(Direction)),
        cells.word("features", get_args(WithFeatures)),
        cells.positive("held_registers"),
        cells.positive("waves_of_simd"),
    )


def _early_loads(line: int, cells: Cells) -> EarlyLoads:
    return EarlyLoads(line, *(cells.positive(column) for column in _EARLY_COLUMNS))


_TILE_COLUMNS = (
    *("kernel", "dtypes", "hdim_q", "hdim_v", "slices"),
    *("tile_q", "tile_k", "waves", "lds_bytes"),
)
_EARLY_COLUMNS = ("waves_of_simd", "held_registers")
# The columns of each table, and what reads a row of it.
_TABLES: Mapping[str, tuple[tuple[str, ...], Callable[[int, Cells], Any]]] = {
    "data types": (("dtype", "element", "scores", "products"), _elements),
    "tiles": (_TILE_COLUMNS, _tile),
    "waves of a SIMD": (
        ("direction", "features", "held_registers", "waves_of_simd"),
        _simd_waves,
    ),
    "early loads": (_EARLY_COLUMNS, _early_loads),
}
