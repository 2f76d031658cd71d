"""What must hold of the tiles that compiled kernels have: of every row of the data files.

A rule is a small predicate with a sentence about what breaks it, and a source. The files are
checked when they are read, so that no kernel is planned from a row that breaks one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...amd.chips import Architecture
from ...problem.problem import MAX_HDIM, Direction
from .tile_table import PRODUCT_BYTES, Elements, Tile, TileTable, TileTableError, WithFeatures

_MATRIX_ROWS = 32  # and columns of one matrix product
_CHUNK_BYTES = 16  # that a lane reads from LDS at once
_THREADS_OF_ROW = 8
_MOST_COLUMNS = 256
_LEAST_GRADIENT_BYTES = 2
# What is compiled for a number of waves.
_WAVES_KINDS: tuple[tuple[Direction, WithFeatures], ...] = (
    ("forward", "none"),
    ("forward", "light one"),
    ("forward", "any"),
    ("backward", "any"),
)


class TileRule(NamedTuple):
    """What complains, without a period, about tiles that break a rule, and the rule's source."""

    complaints: Callable[[Tile, TileTable, Architecture], Iterator[str]]
    source: str

    @property
    def name(self) -> str:
        return self.complaints.__name__


def lds_fits(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """A workgroup's LDS is not more than a compute unit has."""
    if tile.lds_bytes > chip.lds_bytes:
        yield f"lds_bytes {tile.lds_bytes} is more than the {chip.lds_bytes} of a compute unit"


def lds_holds_chunks(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """Tiles follow each other in LDS, and each begins where a lane can read a chunk."""
    if tile.lds_bytes % _CHUNK_BYTES:
        yield f"lds_bytes {tile.lds_bytes} is no multiple of {_CHUNK_BYTES}"


def waves_own_whole_products(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """Each wave has the 32 rows of a matrix product for itself."""
    if tile.own_rows != _MATRIX_ROWS * tile.waves:
        column = "tile_q" if tile.owns_queries else "tile_k"
        yield f"{column} {tile.own_rows} is not {_MATRIX_ROWS} rows for each of {tile.waves} waves"


def others_are_one_product(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """A tile of the other rows is as many as one matrix product makes scores of."""
    if tile.other_rows != _MATRIX_ROWS:
        column = "tile_k" if tile.owns_queries else "tile_q"
        yield f"{column} {tile.other_rows} is not the {_MATRIX_ROWS} of a matrix product"


def threads_load_whole_rows(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """Eight threads load a row of a tile, all rows of it at once."""
    if tile.threads != _THREADS_OF_ROW * tile.other_rows:
        yield (
            f"waves {tile.waves} have {tile.threads} threads; a tile of {tile.other_rows} rows is "
            f"loaded by {_THREADS_OF_ROW * tile.other_rows}"
        )


def hdims_are_whole_products(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """No product of a row's widest call has empty columns."""
    for name, hdim in (("hdim_q", tile.hdim_q), ("hdim_v", tile.hdim_v)):
        if hdim % _MATRIX_ROWS:
            yield f"{name} {hdim} is no multiple of {_MATRIX_ROWS}"


def slices_are_narrow(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """A workgroup makes up to 256 columns: tiles of values are two of 128 at most."""
    if tile.made_columns > _MOST_COLUMNS * tile.slices:
        name = "hdim_v" if tile.made_columns == tile.hdim_v else "hdim_q"
        hdim, most = tile.made_columns, _MOST_COLUMNS
        yield f"slices {tile.slices} of {name} {hdim} are wider than {most} columns each"


def slices_are_of_one_result(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """The columns of dk and of dv are not the same."""
    if tile.slices != 1 and tile.kernel == "dk_and_dv":
        yield f"slices {tile.slices} of kernel {tile.kernel!r}, which has one"


def gradients_have_16_bits_or_more(
    tile: Tile, table: TileTable, chip: Architecture
) -> Iterator[str]:
    """Nothing in 8 bits has a gradient that is worth something."""
    for dtype in () if tile.kernel == "forward" else tile.dtypes:
        if PRODUCT_BYTES[table.elements_of(dtype).element] < _LEAST_GRADIENT_BYTES:
            yield f"dtypes {dtype!r} of kernel {tile.kernel!r} has 8 bits"


def registers_hold_operands(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """The rows of a wave and the columns that it makes stay in its registers."""
    for dtype in tile.dtypes if tile.kernel == "forward" else ():
        queries = tile.hdim_q * PRODUCT_BYTES[table.elements_of(dtype).scores] // 8
        columns = tile.hdim_v // tile.slices // 2
        if queries + columns > chip.simd_vgprs:
            yield (
                f"hdim_q {tile.hdim_q} in {dtype} takes {queries} registers and "
                f"{columns * 2} columns {columns}, over the {chip.simd_vgprs} that there are"
            )


def dtypes_are_listed(tile: Tile, table: TileTable, chip: Architecture) -> Iterator[str]:
    """Every data type of a tile has a row that says what it is in C++."""
    known = [row.dtype for row in table.elements]
    for dtype in tile.dtypes:
        if dtype not in known:
            yield f"dtypes names {dtype!r}, which is none of the data types {', '.join(known)}"
    if not tile.dtypes:
        yield "dtypes is empty"


_TILES_H = "hsa/src/tiles.h, where the same is a static_assert"
_ISA = "AMD's CDNA3 and CDNA4 instruction set documents"
TILE_RULES = (
    TileRule(dtypes_are_listed, "csrc_templates/amd/elements.h"),
    TileRule(lds_fits, "lds_bytes in chips.json"),
    TileRule(lds_holds_chunks, f"{_ISA}: ds_read_b128 needs addresses of 16 bytes"),
    TileRule(waves_own_whole_products, f"{_ISA}: v_mfma_f32_32x32x* make 32 rows of 32"),
    TileRule(others_are_one_product, "csrc_templates/amd/scores.h: a lane has 16 scores of a tile"),
    TileRule(threads_load_whole_rows, _TILES_H),
    TileRule(hdims_are_whole_products, f"{_ISA}: v_mfma_f32_32x32x* make 32 columns"),
    TileRule(slices_are_narrow, "csrc_templates/amd/row_tiles.h"),
    TileRule(slices_are_of_one_result, "csrc_templates/amd/compiled_bwd.hip.in"),
    TileRule(gradients_have_16_bits_or_more, "csrc_templates/amd/elements.h"),
    TileRule(registers_hold_operands, "simd_vgprs in chips.json; hsa/src/attention.h"),
)


def check_table(table: TileTable, chip: Architecture) -> None:
    """Raise ``TileTableError``, naming file, line and value, where a row breaks a rule."""
    complaints = (
        *_complaints_of_elements(table, chip),
        *_complaints_of_tiles(table, chip),
        *_complaints_of_order(table),
        *_complaints_of_reach(table),
        *_complaints_of_waves(table, chip),
    )
    for line, text, source in complaints:
        raise TileTableError(f"{table.path}, line {line}: {text} ({source})")


Complaint = tuple[int, str, str]
"""The line, what is wrong with it, and the source of the rule."""


def _complaints_of_tiles(table: TileTable, chip: Architecture) -> Iterator[Complaint]:
    for tile in table.tiles:
        for rule in TILE_RULES:
            complaint = next(rule.complaints(tile, table, chip), None)
            if complaint is not None:
                yield tile.line, complaint, rule.source
                break  # later rules may take this one for granted


def _complaints_of_elements(table: TileTable, chip: Architecture) -> Iterator[Complaint]:
    """The data types are those of the matrix units, each once and with a tile of forward."""
    rows: dict[str, Elements] = {}
    for row in table.elements:
        if row.dtype not in chip.dtypes:
            served = ", ".join(chip.dtypes)
            yield row.line, f"dtype {row.dtype!r} is none of {served}", "dtypes in chips.json"
        if row.dtype in rows:
            text = f"dtype {row.dtype!r} is in line {rows[row.dtype].line} already"
            yield row.line, text, "a call has one row"
        if not table.tiles_of("forward", row.dtype):
            text = f"dtype {row.dtype!r} has no tile of forward"
            yield row.line, text, "what is listed is served"
        rows[row.dtype] = row
    for dtype in chip.dtypes:
        if dtype not in rows:
            last = table.elements[-1].line
            yield last, f"dtype {dtype!r} is missing behind it", "dtypes in chips.json"


def _complaints_of_order(table: TileTable) -> Iterator[Complaint]:
    """Calls take the first tile with room: none stands in the shadow of one before it."""
    for i, tile in enumerate(table.tiles):
        for before in table.tiles[:i]:
            are_alike = before.kernel == tile.kernel and set(before.dtypes) & set(tile.dtypes)
            if are_alike and before.has_room_for(tile.hdim_q, tile.hdim_v):
                hdims = f"hdim_q {tile.hdim_q} with hdim_v {tile.hdim_v}"
                text = f"{hdims} is served by line {before.line}"
                yield tile.line, text, "the first row with room is taken"
                break


def _complaints_of_reach(table: TileTable) -> Iterator[Complaint]:
    """Calls with any head dimensions have a row in every kernel of a direction that has some."""
    for kernel in ("forward", "dq", "dk", "dv"):
        direction: Direction = "forward" if kernel == "forward" else "backward"
        for dtype in table.dtypes_of(direction):
            all_rows = table.tiles_of(direction, dtype)
            rows = [row for row in all_rows if row.kernel == kernel]
            if not any(row.has_room_for(MAX_HDIM, MAX_HDIM) for row in rows):
                text = f"no row of kernel {kernel!r} up to it serves {dtype} with hdims {MAX_HDIM}"
                yield (rows or all_rows)[-1].line, text, "MAX_HDIM of problem.py"


def _complaints_of_waves(table: TileTable, chip: Architecture) -> Iterator[Complaint]:
    """Waves that share a SIMD share its registers, and every kernel has a number of them."""
    for row in table.simd_waves:
        if (row.direction, row.features) not in _WAVES_KINDS:
            text = f"features {row.features!r} of {row.direction}, which has one kind"
            yield row.line, text, "csrc_templates/amd/compiled_bwd.hip.in"
        if row.waves_of_simd * row.held_registers > chip.simd_vgprs:
            text = (
                f"waves_of_simd {row.waves_of_simd} with held_registers {row.held_registers} each "
                f"take more than the {chip.simd_vgprs} of a SIMD"
            )
            yield row.line, text, "simd_vgprs in chips.json"
    for early in table.early_loads:
        if early.waves_of_simd * early.held_registers > chip.simd_vgprs:
            text = (
                f"waves_of_simd {early.waves_of_simd} with held_registers {early.held_registers} "
                f"each take more than the {chip.simd_vgprs} of a SIMD"
            )
            yield early.line, text, "simd_vgprs in chips.json"
    for direction, features in _WAVES_KINDS:
        rows = table.simd_waves_of(direction, features)
        if not rows:
            text = f"there is no row of {direction} with features {features!r} up to it"
            yield table.simd_waves[-1].line, text, "the templates ask for it"
        for before, row in itertools.pairwise(rows):
            if row.held_registers <= before.held_registers:
                held, line = row.held_registers, before.line
                text = f"held_registers {held} is not above that of line {line}"
                yield row.line, text, "the first row with as many is taken"
        for last in rows[-1:]:
            held, all_of_simd = last.held_registers, chip.simd_vgprs
            if held != all_of_simd:
                text = f"held_registers {held} is not the {all_of_simd} of a SIMD"
                yield last.line, text, "the last row of a kind serves what no other does"
