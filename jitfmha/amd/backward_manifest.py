"""What a tree in AITER's form offers for backward passes: four manifests, read row by row.

``<arch>/fmha_v3_bwd`` lies beside the folder of the forward kernels, and has a manifest for each
kind of kernel with the code objects beside it; no chip has a folder of its own. The manifests have
the same columns, of which kernels other than those of gradients leave some at 0.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..problem.problem import BF16_CVTS
from .chips import Arch, Chip
from .code_object import CodeObject, CodeObjectError, read_code_object
from .kernel_arguments import (
    AITER_DQ_ARGUMENTS,
    AITER_GRADIENT_ARGUMENTS,
    AITER_ROW_SUM_ARGUMENTS,
)
from .manifest import BACKWARD_FOLDER, Tree
from .manifest_cells import (
    FILE,
    SYMBOL,
    OddRow,
    distrust,
    listed,
    manifest_lines,
    matching,
    one_of,
    plain_name,
    positive,
    shown,
)

Kind = Literal["odo", "dqdkdv", "dq_convert", "dq_shuffle"]
"""Sums of o times do of each row; gradients; dq of float32 sums; dq of shuffled 16-bit sums."""

BackwardDtype = Literal["bf16", "fp16"]

ANY_BF16_CVT = len(BF16_CVTS)
_MANIFESTS: Mapping[Kind, str] = {kind: f"fmha_bwd_{kind}.csv" for kind in get_args(Kind)}
# Without these there is nothing to serve.
_NEEDED: tuple[Kind, ...] = ("odo", "dqdkdv")
_COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "atomic32", "pssk", "pddv", "mode", "bf16_cvt"),
    *("ts", "knl_name", "co_name"),
)
_ARGUMENTS = {
    "odo": AITER_ROW_SUM_ARGUMENTS,
    "dqdkdv": AITER_GRADIENT_ARGUMENTS,
    "dq_convert": AITER_DQ_ARGUMENTS,
    "dq_shuffle": AITER_DQ_ARGUMENTS,
}
_THREADS = 256


@dataclass(frozen=True)
class BackwardRow:
    """One kernel of a manifest.

    Attributes:
        hdim_q, hdim_v: that it was made for; smaller ones are padded.
        mask: 0 none, 1 top-left causal, 2 bottom-right causal, 3 a window.
        has_atomic_fp32: whether dq is added up in float32, not in q's dtype.
        takes_any_seqlen: and strides of every tensor (``pssk``).
        takes_smaller_hdim: than that it was made for (``pddv``).
        mode: 0 gm0, 1 gm1.
        bf16_cvt: an index of ``BF16_CVTS``, or ``ANY_BF16_CVT``.
        ts: rows of a workgroup: keys of a kernel of gradients, else queries.
        symbol: of the kernel.
        file: of the code object, relative to the manifest's folder.
        threads: of a workgroup.
    """

    kind: Kind
    dtype: BackwardDtype
    hdim_q: int
    hdim_v: int
    mask: int
    has_atomic_fp32: bool
    takes_any_seqlen: bool
    takes_smaller_hdim: bool
    mode: int
    bf16_cvt: int
    ts: int
    symbol: str
    file: str
    threads: int = _THREADS

    @property
    def name(self) -> str:
        """The kernel's name without the decoration of its symbol."""
        return plain_name(self.symbol)

    def rounds(self, bf16_cvt: str) -> bool:
        """Whether the kernel is for this rounding to bf16, or for any."""
        return self.bf16_cvt == ANY_BF16_CVT or BF16_CVTS[self.bf16_cvt] == bf16_cvt


@dataclass(frozen=True)
class BackwardTree:
    """The backward kernels of one tree for one chip.

    Attributes:
        origin: how a message names the tree.
        folder: of the manifests.
        arch: that the code objects must be for.
        rows: the usable ones, by kind and in the order of the manifest.
        oddities: a sentence for everything that was left out.
        is_shipped: whether it is a part of this package, and so as safe as that.
    """

    origin: str
    folder: Path
    arch: Arch
    rows: Mapping[Kind, tuple[BackwardRow, ...]] = field(repr=False)
    oddities: tuple[str, ...] = field(repr=False)
    is_shipped: bool
    _warned_of: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _code_objects: dict[BackwardRow, CodeObject | CodeObjectError] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __str__(self) -> str:
        return self.origin

    @property
    def kernel_count(self) -> int:
        """How many usable kernels there are, of all kinds."""
        return sum(map(len, self.rows.values()))

    def warn_of_oddities(self) -> None:
        """Warn of everything that was left out, once for each tree."""
        for oddity in self.oddities:
            self._warn_of(oddity)

    def code_object(self, row: BackwardRow) -> CodeObject | CodeObjectError:
        """The code object of a row, read and checked once, or why it must not be loaded.

        The latter is warned of.
        """
        found = self._code_objects.get(row)
        if found is None:
            try:
                found = self._read(row)
            except CodeObjectError as error:
                found = error
                self._warn_of(f"{self}: {error}")
            self._code_objects[row] = found
        return found

    def _read(self, row: BackwardRow) -> CodeObject:
        path = self.folder / row.file
        reason = None if self.is_shipped else distrust(path)
        if reason:
            raise CodeObjectError(f"{path} is not used: {reason}")
        return read_code_object(
            path,
            arch=self.arch,
            symbol=row.symbol,
            threads=row.threads,
            kernarg_bytes=_ARGUMENTS[row.kind].size,
            sha256=None,
        )

    def _warn_of(self, text: str) -> None:
        if text not in self._warned_of:
            self._warned_of.add(text)
            warnings.warn(f"jitfmha: {text}", RuntimeWarning, stacklevel=3)


def read_backward_tree(tree: Tree, chip: Chip) -> BackwardTree | None:
    """The backward kernels of a tree, whose forward kernels are read; None where it has none.

    Raises nothing: what cannot be read, or what somebody else could change, is an oddity.
    """
    folder = tree.folder.parent / BACKWARD_FOLDER
    arch = chip.architecture.name
    if not folder.is_dir():
        return None
    rows: dict[Kind, tuple[BackwardRow, ...]] = {}
    oddities: list[str] = []
    for kind, name in _MANIFESTS.items():
        path = folder / name
        rows[kind] = ()
        if not path.is_file() and kind not in _NEEDED:
            continue
        reason = None if tree.is_shipped else distrust(path)
        if reason:
            oddities.append(
                f"{path} is not used: {reason}. Copy the tree to a directory that belongs to you "
                "and that only you can write to"
            )
            continue
        rows[kind] = tuple(_rows(kind, path, f"{tree}: {path}", oddities))
    return BackwardTree(tree.origin, folder, arch, rows, tuple(oddities), tree.is_shipped)


def _rows(kind: Kind, path: Path, where: str, oddities: list[str]) -> list[BackwardRow]:
    """The usable rows of a manifest; adds a sentence to ``oddities`` for everything else."""
    try:
        lines = manifest_lines(path, _COLUMNS)
    except (OSError, UnicodeDecodeError, csv.Error, OddRow) as error:
        why = error.strerror if isinstance(error, OSError) else error
        oddities.append(f"{where} cannot be read: {why}")
        return []
    rows = []
    for number, cells in lines:
        try:
            row = _row(kind, cells)
        except OddRow as error:
            oddities.append(f"{where}, line {number} is left out: {error}")
            continue
        if os.path.isfile(path.parent / row.file):
            rows.append(row)
        else:
            missing = path.parent / row.file
            oddities.append(f"{where}, line {number} is left out: there is no file {missing}")
    return rows


def _row(kind: Kind, cells: Mapping[str, str]) -> BackwardRow:
    short = [name for name in _COLUMNS if name not in cells]
    if short:
        raise OddRow(f"it has no {', '.join(short)}")
    mask, mode, cvt = (
        one_of(name, cells[name], range(n))
        for name, n in (("mask", 4), ("mode", 2), ("bf16_cvt", 4))
    )
    atomic32, pssk, pddv = (
        one_of(name, cells[name], range(2)) == 1 for name in ("atomic32", "pssk", "pddv")
    )
    return BackwardRow(
        kind=kind,
        dtype=_dtype(cells["dtype"]),
        hdim_q=positive("hdim_q", cells["hdim_q"]),
        hdim_v=positive("hdim_v", cells["hdim_v"]),
        mask=mask,
        has_atomic_fp32=atomic32,
        takes_any_seqlen=pssk,
        takes_smaller_hdim=pddv,
        mode=mode,
        bf16_cvt=cvt,
        ts=positive("ts", cells["ts"]),
        symbol=matching("knl_name", cells["knl_name"], SYMBOL, "a symbol"),
        file=matching("co_name", cells["co_name"], FILE, "a file name"),
    )


def _dtype(text: str) -> BackwardDtype:
    for known in get_args(BackwardDtype):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise OddRow(f"dtype {shown(text)} is not known; {listed(get_args(BackwardDtype))} are")
