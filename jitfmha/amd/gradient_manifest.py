"""This package's own code objects for backward passes: their manifest, read row by row.

``<arch>/fmha_bwd/fmha_bwd.csv`` lies beside the folder of the forward kernels. A row is a code
object with three kernels, which run one after the other; ``hsa/src/fmha_bwd.hip`` says what each
does, and ``hsa/src/fmha_bwd_hd192.hip`` for larger head dimensions.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ..jit.resources import hsa_dir
from ..problem.problem import BF16_CVTS
from .chips import Arch
from .code_object import CodeObject, CodeObjectError, read_code_object
from .kernel_arguments import BACKWARD_ARGUMENTS

FOLDER = "fmha_bwd"
_MANIFEST = "fmha_bwd.csv"


@dataclass(frozen=True)
class GradientRow:
    """One code object of the manifest.

    Attributes:
        dtype: bf16 or fp16.
        hdim_q, hdim_v: of q and k; of v.
        is_masked: whether there may be a mask: causal of both corners, or a window.
        mode: 0 gm0, 1 gm1.
        bf16_cvt: an index of ``BF16_CVTS``; 0 where the chip has one way only.
        is_deterministic: whether dq is added up in one order.
        keys: of a workgroup of the kernel ``symbol``.
        queries: of a workgroup of the two others.
        symbol: of the kernel that makes dk and dv, and adds dq up.
        row_sums_symbol, round_dq_symbol: of those before and after it.
        threads, edge_threads: of a workgroup of the first, and of the two others.
        file: of the code object, relative to the manifest's folder.
        sha256: of the file.
    """

    dtype: str
    hdim_q: int
    hdim_v: int
    is_masked: bool
    mode: int
    bf16_cvt: int
    is_deterministic: bool
    keys: int
    queries: int
    symbol: str
    row_sums_symbol: str
    round_dq_symbol: str
    threads: int
    edge_threads: int
    file: str
    sha256: str

    def rounds(self, bf16_cvt: str, arch: Arch) -> bool:
        """Whether the kernels round as asked; where there is one way, it is for all."""
        has_roundings = arch == "gfx942" and self.dtype == "bf16"
        return not has_roundings or BF16_CVTS[self.bf16_cvt] == bf16_cvt


@dataclass(frozen=True)
class GradientTree:
    """The code objects for one architecture.

    Attributes:
        folder: of the manifest.
        rows: in its order, which has more keys first where there is a choice.
    """

    folder: Path
    arch: Arch
    rows: tuple[GradientRow, ...] = field(repr=False)

    def __str__(self) -> str:
        return "the kernels of this package"

    def code_object(self, row: GradientRow) -> CodeObject:
        """That of a row, read and checked.

        Raises:
            jitfmha.amd.code_object.CodeObjectError: it is not what the manifest says.
        """
        expected = {
            row.symbol: row.threads,
            row.row_sums_symbol: row.edge_threads,
            row.round_dq_symbol: row.edge_threads,
        }
        read = [
            read_code_object(
                self.folder / row.file,
                arch=self.arch,
                symbol=symbol,
                threads=threads,
                kernarg_bytes=BACKWARD_ARGUMENTS.size,
                sha256=row.sha256,
            )
            for symbol, threads in expected.items()
        ]
        return read[0]


def gradient_tree(arch: Arch) -> GradientTree | None:
    """What this package has for an architecture; None where it has nothing."""
    return gradient_tree_in(hsa_dir() / arch, arch)


def gradient_tree_in(architecture_folder: Path, arch: Arch) -> GradientTree | None:
    """The same of a folder for an architecture.

    Raises ``ValueError`` for a manifest that cannot be read.
    """
    folder = architecture_folder / FOLDER
    if not (folder / _MANIFEST).is_file():
        return None
    try:
        return _read(folder, arch)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{folder / _MANIFEST} cannot be read: {error!r}") from error


def readings_of_shipped(arch: Arch) -> list[CodeObject | CodeObjectError]:
    """All code objects for an architecture, each read and checked, or why it must not be loaded."""
    tree = gradient_tree(arch)
    readings: list[CodeObject | CodeObjectError] = []
    if tree is None:
        return readings
    for row in tree.rows:
        try:
            readings.append(tree.code_object(row))
        except CodeObjectError as error:
            readings.append(error)
    return readings


@cache
def _read(folder: Path, arch: Arch) -> GradientTree:
    with (folder / _MANIFEST).open(newline="", encoding="utf-8") as text:
        return GradientTree(folder, arch, tuple(map(_row, csv.DictReader(text))))


def _row(cells: Mapping[str, str]) -> GradientRow:
    return GradientRow(
        dtype=cells["dtype"],
        hdim_q=int(cells["hdim_q"]),
        hdim_v=int(cells["hdim_v"]),
        is_masked=cells["masked"] == "1",
        mode=int(cells["mode"]),
        bf16_cvt=int(cells["bf16_cvt"]),
        is_deterministic=cells["deterministic"] == "1",
        keys=int(cells["keys"]),
        queries=int(cells["queries"]),
        symbol=cells["knl_name"],
        row_sums_symbol=cells["row_sums_name"],
        round_dq_symbol=cells["round_dq_name"],
        threads=int(cells["threads"]),
        edge_threads=int(cells["edge_threads"]),
        file=cells["co_name"],
        sha256=cells["sha256"],
    )
