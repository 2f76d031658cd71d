"""The tiles that compiled kernels take: the data files, read and checked once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ...amd.chips import Arch, architecture
from ...problem.problem import Direction
from .tile_rules import check_table
from .tile_table import KernelPart, Tile, TileTable, WithFeatures, read_table


@cache
def tile_table(arch: Arch) -> TileTable:
    """The table of an architecture.

    Raises ``TileTableError`` where its file cannot be read or breaks a rule of ``tile_rules``.
    """
    table = read_table(Path(__file__).with_name(f"{arch}.csv"))
    check_table(table, architecture(arch))
    return table


@cache
def tile_for(arch: Arch, kernel: KernelPart, dtype: str, hdim_q: int, hdim_v: int) -> Tile | None:
    """The tile that a kernel takes for calls with queries of ``dtype``; None where it has none."""
    for tile in tile_table(arch).tiles:
        if tile.kernel == kernel and dtype in tile.dtypes and tile.has_room_for(hdim_q, hdim_v):
            return tile
    return None


def waves_in_cpp(arch: Arch, direction: Direction, features: WithFeatures) -> str:
    """How many waves share a SIMD, in C++, by ``held_registers``."""
    *rows, last = tile_table(arch).simd_waves_of(direction, features)
    cases = (f"held_registers <= {row.held_registers} ? {row.waves_of_simd} : " for row in rows)
    return "".join((*cases, str(last.waves_of_simd)))


def early_loads_in_cpp(arch: Arch) -> str:
    """Whether forward loads the next tile early, in C++, by ``waves`` and ``held_registers``."""
    cases = (
        f"(waves == {row.waves_of_simd} && held_registers <= {row.held_registers})"
        for row in tile_table(arch).early_loads
    )
    return " || ".join(cases) or "false"
