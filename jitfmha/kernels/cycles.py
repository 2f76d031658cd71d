"""The cycles that workgroups take, as ``cycles.csv`` has them.

They are the emulator's cost model's: ``op_tests/rigs/kernel_cycles.py`` measured them, and does so
anew after the model or a kernel has changed. A kernel that is not in the file counts as the next
wider one of its family.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from ..amd.chips import Arch
from .launch_estimate import KernelCycles

CyclesOf = Literal["ready", "compiled", "aiter"]
"""Whose kernels: code objects of ours or of AITER's, or what is compiled for a call."""

# fmt: off
Part = Literal[
    "forward", "one_wave", "short", "medium", "decode",
    "gradients", "deterministic", "dq", "dk_and_dv",
]
# fmt: on
"""Of a pass: a forward kernel, or its workgroups that have rows for one wave, or those that see no
tile of keys whole: of up to two tiles, and of more; a kernel for few rows, whose waves share keys;
the kernel of a backward pass that makes all gradients, or those that make some."""

COLUMNS = (
    *("arch", "kernels", "part", "dtype", "hdim_q", "hdim_v", "rows", "masked"),
    *("cycles_of_row", "cycles_once"),
)
_FILE = Path(__file__).with_name("cycles.csv")
# Others have the cycles of this data type.
_USUAL_DTYPE = "bf16"


@cache
def kernel_cycles(
    arch: Arch,
    kernels: CyclesOf,
    part: Part,
    dtype: str,
    hdims: tuple[int, int],
    is_masked: bool,
) -> tuple[KernelCycles, ...]:
    """The cycles of a kernel: one entry for each number of rows, the fewest first.

    Of ready kernels that is the size of a tile; compiled ones take less where some of their waves
    have no rows. Ready forward kernels with masks have two entries for a tile: with rows for one
    wave alone, and with all. A mask hides keys from waves with rows, which pass over them; those
    without rows go through all. Others follow of workgroups that see no tile of keys whole, whose
    main loop has nothing to do: of up to two tiles of keys, and of more. ``dtype`` is that of
    queries, "fp8" for both forms.
    """
    found = _measured_cycles(arch, kernels, part, dtype, hdims, is_masked)
    if not (kernels == "ready" and part == "forward" and is_masked):
        return found
    others: dict[tuple[str, int], KernelCycles] = {
        (row.part, row.cycles.rows): row.cycles
        for row in _rows()
        if (row.arch, row.kernels, row.dtype, row.hdims) == (arch, kernels, dtype, hdims)
    }
    entries: list[KernelCycles] = []
    for every in found:
        entries += others.get(("one_wave", every.rows), every), every
        entries += (
            others[name, every.rows] for name in ("short", "medium") if (name, every.rows) in others
        )
    return tuple(entries)


def _measured_cycles(
    arch: Arch, kernels: CyclesOf, part: Part, dtype: str, hdims: tuple[int, int], is_masked: bool
) -> tuple[KernelCycles, ...]:
    wanted = arch, kernels, part, is_masked
    rows = [row for row in _rows() if row[:4] == wanted]
    of_dtype = [row for row in rows if row.dtype == dtype]
    rows = of_dtype or [row for row in rows if row.dtype == _USUAL_DTYPE]

    def is_narrow(row: _Row) -> bool:
        return row.hdims[0] < hdims[0] or row.hdims[1] < hdims[1]

    # Of those that are wide enough the narrowest one, or else the widest.
    best = min((row.hdims for row in rows if not is_narrow(row)), key=sum, default=None) or max(
        (row.hdims for row in rows), key=sum
    )
    scale = max(sum(hdims) / sum(best), 1.0)
    found = [row.cycles for row in rows if row.hdims == best]
    return tuple(
        each._replace(of_row=tuple(scale * x for x in each.of_row)) for each in sorted(found)
    )


class _Row(NamedTuple):
    arch: str
    kernels: str
    part: str
    is_masked: bool
    dtype: str
    hdims: tuple[int, int]
    cycles: KernelCycles


@cache
def _rows() -> tuple[_Row, ...]:
    with _FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            _Row(
                row["arch"],
                row["kernels"],
                row["part"],
                row["masked"] == "1",
                row["dtype"],
                (int(row["hdim_q"]), int(row["hdim_v"])),
                KernelCycles(
                    int(row["rows"]), _numbers(row["cycles_of_row"]), _numbers(row["cycles_once"])
                ),
            )
            for row in csv.DictReader(file)
        )


def _numbers(cell: str) -> tuple[float, ...]:
    return tuple(float(x) for x in cell.split())
