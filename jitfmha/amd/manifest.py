"""What a tree of code objects offers: its manifest, read row by row.

A tree has one folder for each architecture. ``<arch>/fmha_v3_fwd/fmha_fwd.csv`` lists the forward
kernels. AITER's trees have this form, and so has the one that this package ships, with more
columns: ``abi``, ``threads`` and ``grid`` name the binary interface of a kernel. Where they are
missing the kernel is one of AMD's, and the rules of its interface ("fmha v3") say the rest. The
code objects lie beside the manifest; AMD's for gfx942 one folder deeper, in ``MI300`` and
``MI308``. Whatever is odd in a tree is told by name and left out.

Code objects are code. So what the environment names has to be in the hands of this user or of root,
as the build cache has; the tree of this package is as safe as the package.
"""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..jit.resources import hsa_dir
from ..problem.problem import BF16_CVTS
from .chips import Arch, Chip
from .code_object import CodeObject, CodeObjectError, read_code_object
from .kernel_arguments import ARGUMENTS_OF, Abi
from .manifest_cells import (
    FILE,
    SYMBOL,
    OddRow,
    distrust,
    listed,
    manifest_lines,
    matching,
    number_of,
    one_of,
    plain_name,
    positive,
    shown,
)

KernelDtype = Literal["bf16", "fp16", "fp8bf16"]

Grid = Literal[
    "tiles_heads_batches",
    "tile_pairs_heads_batches",
    "heads_tiles_batches",
    "heads_batches_tiles",
    "heads_batches_tile_pairs",
    "xcd_heads_tiles_splits",
    "heads_batches_tiles_splits",
]
"""What a launch counts along x, y and z; the launcher has the formulas. In a pair is a tile from
the head of a causal triangle and one from its tail."""
GRIDS: tuple[Grid, ...] = get_args(Grid)

HSA_DIR, AITER_ASM_DIR = "JITFMHA_HSA_DIR", "AITER_ASM_DIR"

BACKWARD_FOLDER = "fmha_v3_bwd"
MANIFEST = Path("fmha_v3_fwd", "fmha_fwd.csv")
COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "mode", "bf16_cvt"),
    *("ts_qo", "ts_kv", "knl_name", "co_name"),
)
_GRIDS_OF: Mapping[tuple[Abi, int], tuple[Grid, ...]] = {
    ("aiter", 0): ("tiles_heads_batches", "tile_pairs_heads_batches", "heads_tiles_batches"),
    ("aiter", 1): ("heads_batches_tiles", "heads_batches_tile_pairs"),
    ("jitfmha", 0): ("xcd_heads_tiles_splits",),
    ("jitfmha", 1): ("heads_batches_tiles_splits",),
}
_WAVE, _MOST_THREADS = 64, 1024
_SIMDS = 4  # of a compute unit
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a manifest, for one chip.

    Attributes:
        mask: 0 none, 1 top-left causal, 2 bottom-right causal.
        mode: 0 gm0, 1 gm1.
        bf16_cvt: an index of ``BF16_CVTS``.
        ts_qo, ts_kv: rows of q and of k in a tile.
        symbol: of the kernel.
        file: of the code object, relative to the manifest's folder.
        abi: whose argument block the kernel takes.
        threads: of a workgroup.
        grid: what a launch counts along x, y and z.
        combine_symbol: of the kernel that makes the output where keys are split; None: this one
            cannot split them.
        sha256: of the file; None where the manifest has none.
        waves_of_simd: of our kernels, that share a SIMD.
        stacks_heads: whether the query heads that share a key head are rows of the same tiles.
    """

    dtype: KernelDtype
    hdim_q: int
    hdim_v: int
    mask: int
    mode: int
    bf16_cvt: int
    ts_qo: int
    ts_kv: int
    symbol: str
    file: str
    abi: Abi
    threads: int
    grid: Grid
    combine_symbol: str | None = None
    sha256: str | None = None
    waves_of_simd: int = 2
    stacks_heads: bool = False

    @property
    def name(self) -> str:
        """The kernel's name without the decoration of its symbol."""
        return plain_name(self.symbol)

    @property
    def workgroups_of_unit(self) -> int:
        """How many workgroups of a kernel of ours share a compute unit: of AMD's it is not known.

        With two waves a SIMD, a unit has 8 of our waves: two workgroups of four, or one of eight.
        """
        return self.waves_of_simd * _SIMDS * _WAVE // self.threads

    @property
    def can_split_keys(self) -> bool:
        """Whether there is a kernel that makes the output of what several splits leave."""
        return self.combine_symbol is not None

    @property
    def serves(self) -> tuple[object, ...]:
        """What two rows of one manifest must not have in common.

        Of our kernels there are tiles of several sizes to choose from; for AMD's there is no rule.
        """
        return (
            *(self.dtype, self.hdim_q, self.hdim_v, self.mask, self.mode, self.bf16_cvt),
            *((self.ts_qo,) if self.abi == "jitfmha" else ()),
        )


@dataclass(frozen=True)
class Tree:
    """The forward kernels of one tree for one chip.

    Attributes:
        origin: how a message names the tree.
        folder: of the manifest.
        arch: that the code objects must be for.
        rows: the usable ones.
        oddities: a sentence for everything that was left out.
        is_shipped: whether it is a part of this package, and so as safe as that.
    """

    origin: str
    folder: Path
    arch: Arch
    rows: tuple[KernelRow, ...] = field(repr=False)
    oddities: tuple[str, ...] = field(repr=False)
    is_shipped: bool = False
    _warned_of: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _code_objects: dict[KernelRow, CodeObject | CodeObjectError] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __str__(self) -> str:
        return self.origin

    def warn_of_oddities(self) -> None:
        """Warn of everything that was left out, once for each tree."""
        for oddity in self.oddities:
            self._warn_of(oddity)

    def code_object(self, row: KernelRow) -> CodeObject | CodeObjectError:
        """The code object of a row, read and checked once, or why it must not be loaded.

        The latter is warned of.
        """
        found = self._code_objects.get(row)
        if found is None:
            path = self.folder / row.file
            try:
                reason = None if self.is_shipped else distrust(path)
                if reason:
                    raise CodeObjectError(f"{path} is not used: {reason}")
                found = read_code_object(
                    path,
                    arch=self.arch,
                    symbol=row.symbol,
                    threads=row.threads,
                    kernarg_bytes=ARGUMENTS_OF[row.abi].size,
                    sha256=row.sha256,
                    combine_symbol=row.combine_symbol,
                )
            except CodeObjectError as error:
                found = error
                self._warn_of(f"{self}: {error}")
            self._code_objects[row] = found
        return found

    def _warn_of(self, text: str) -> None:
        if text not in self._warned_of:
            self._warned_of.add(text)
            warnings.warn(f"jitfmha: {text}", RuntimeWarning, stacklevel=3)


def trees_of(chip: Chip) -> tuple[Tree, ...]:
    """The trees for a chip, the preferred one first: the user's, AITER's, then ours.

    The user's own tree need not be there.
    """
    arch = chip.architecture.name
    trees = []
    for variable in (HSA_DIR, AITER_ASM_DIR):
        given = os.environ.get(variable, "")
        if given:
            folder = architecture_folder(Path(given), arch)
            if folder is not None:
                trees.append(read_tree(f"{variable}={given}", folder, chip))
        elif variable == HSA_DIR:
            own = default_user_tree()
            if own is not None and os.path.isdir(own / arch):
                trees.append(read_tree(f"your tree {own}", own / arch, chip))
    shipped = hsa_dir() / arch
    if (shipped / MANIFEST).is_file():
        trees.append(read_tree("the kernels of this package", shipped, chip, is_shipped=True))
    return tuple(trees)


def user_tree() -> Path:
    """Where ``python -m jitfmha hsa import`` adds kernels; it need not be there.

    What JITFMHA_HSA_DIR names, else :func:`default_user_tree`. Raises ``RuntimeError`` where there
    is neither.
    """
    given = os.environ.get(HSA_DIR, "")
    own = Path(given) if given else default_user_tree()
    if own is None:
        raise RuntimeError(f"there is no home directory for a tree; set {HSA_DIR} to a folder")
    return own


def default_user_tree() -> Path | None:
    """``jitfmha/hsa`` in the user's folder for data, the tree where JITFMHA_HSA_DIR names none.

    None for a user without a home directory.
    """
    import platformdirs  # of use where kernels are looked for only

    try:
        data = platformdirs.user_data_dir("jitfmha", appauthor=False)
    except RuntimeError:
        return None
    return Path(data, "hsa") if os.path.isabs(data) else None


def architecture_folder(given: Path, arch: Arch) -> Path | None:
    """The folder of ``arch`` where ``given`` is a whole tree or one architecture's folder.

    None where it is the folder of another architecture, which is nothing odd.
    """
    if given.name in get_args(Arch):
        return given if given.name == arch else None
    # Unlike those of a Path, the functions of `os.path` raise for no name.
    exists = os.path.exists
    if exists(given / MANIFEST) and not exists(given / arch):
        return given
    if not exists(given / arch) and any(exists(given / other) for other in get_args(Arch)):
        return None
    return given / arch


def read_tree(origin: str, folder: Path, chip: Chip, *, is_shipped: bool = False) -> Tree:
    """Read the manifest below an architecture's folder, as far as it concerns ``chip``.

    Raises nothing: a manifest that cannot be read, or that somebody else could change, gives a tree
    without rows and the reason.
    """
    path = folder / MANIFEST
    arch = chip.architecture.name
    reason = None if is_shipped else distrust(path)
    if reason:
        oddity = (
            f"{origin} is not used: {reason}. Copy the tree to a directory that belongs to you "
            "and that only you can write to"
        )
        return Tree(origin, path.parent, arch, (), (oddity,))
    rows: list[KernelRow] = []
    oddities: list[str] = []
    try:
        lines = manifest_lines(path, COLUMNS)
    except (OSError, UnicodeDecodeError, csv.Error, OddRow) as error:
        why = error.strerror if isinstance(error, OSError) else error
        # A tree may have backward kernels only.
        if not (isinstance(error, FileNotFoundError) and (folder / BACKWARD_FOLDER).is_dir()):
            oddities.append(f"{origin}: the manifest {path} cannot be read: {why}")
        lines = []
    seen: dict[tuple[object, ...], int] = {}
    for number, cells in lines:
        where = f"{origin}: {path}, line {number}"
        try:
            row = row_of(cells, chip)
        except OddRow as error:
            oddities.append(f"{where} is left out: {error}")
            continue
        if row.serves in seen:
            oddities.append(f"{where} is left out: it serves the same as line {seen[row.serves]}")
            continue
        seen[row.serves] = number
        if not os.path.isfile(path.parent / row.file):
            oddities.append(f"{where} is left out: there is no file {path.parent / row.file}")
            continue
        rows.append(row)
    return Tree(origin, path.parent, arch, tuple(rows), tuple(oddities), is_shipped)


def row_of(cells: Mapping[str, str], chip: Chip) -> KernelRow:
    """One row of a manifest, for a chip. Raises :class:`OddRow` for one that cannot be used."""
    short = [name for name in COLUMNS if name not in cells]
    if short:
        raise OddRow(f"it has no {', '.join(short)}")
    hdims = tuple(positive(name, cells[name]) for name in ("hdim_q", "hdim_v"))
    mask, mode = (one_of(name, cells[name], range(n)) for name, n in (("mask", 3), ("mode", 2)))
    abi = _abi(cells.get("abi", ""))
    threads, grid = cells.get("threads", ""), cells.get("grid", "")
    if abi == "jitfmha" and not (threads and grid):
        raise OddRow(
            f"abi 'jitfmha' needs threads and a grid; they are {shown(threads)} and {shown(grid)}"
        )
    is_wide = hdims == (192, 128)
    file = matching("co_name", cells["co_name"], FILE, "a file name")
    if abi == "aiter" and chip.kernel_folder is not None:
        file = f"{chip.kernel_folder}/{file}"
    sha256, combine = cells.get("sha256", "").lower(), cells.get("combine_name", "")
    return KernelRow(
        dtype=_dtype(cells["dtype"]),
        hdim_q=hdims[0],
        hdim_v=hdims[1],
        mask=mask,
        mode=mode,
        bf16_cvt=one_of("bf16_cvt", cells["bf16_cvt"], range(len(BF16_CVTS))),
        ts_qo=positive("ts_qo", cells["ts_qo"]),
        ts_kv=positive("ts_kv", cells["ts_kv"]),
        symbol=matching("knl_name", cells["knl_name"], SYMBOL, "a symbol"),
        file=file,
        abi=abi,
        threads=_threads(threads) if threads else default_threads(*hdims),
        grid=(
            _grid(grid, abi, mode)
            if grid
            else _aiter_grid(mode, mask, takes_pairs=not (is_wide and _is_gfx942(chip)))
        ),
        combine_symbol=matching("combine_name", combine, SYMBOL, "a symbol") if combine else None,
        sha256=matching("sha256", sha256, _SHA256, "64 hexadecimal digits") if sha256 else None,
    )


# ---- What AMD's interface says where a manifest does not -----------------------------------------


def _is_gfx942(chip: Chip) -> bool:
    return chip.architecture.name == "gfx942"


def default_threads(hdim_q: int, hdim_v: int) -> int:
    """Threads of a workgroup of a kernel of AMD's."""
    return 256 if (hdim_q, hdim_v) == (192, 128) else 512


def _aiter_grid(mode: int, mask: int, *, takes_pairs: bool) -> Grid:
    """The grid of a kernel of AMD's; only the wide ones for gfx942 know no pairs of tiles."""
    if mode == 1:
        return "heads_batches_tile_pairs" if mask and takes_pairs else "heads_batches_tiles"
    if not takes_pairs:
        return "heads_tiles_batches"
    return "tile_pairs_heads_batches" if mask else "tiles_heads_batches"


# ---- Cells ---------------------------------------------------------------------------------------


def _abi(text: str) -> Abi:
    if not text:
        return "aiter"
    for known in ARGUMENTS_OF:
        if text == known:
            return known
    raise OddRow(f"abi {shown(text)} is not known; {listed(tuple(ARGUMENTS_OF))} are")


def _threads(text: str) -> int:
    threads = number_of("threads", text)
    if threads % _WAVE or not 0 < threads <= _MOST_THREADS:
        raise OddRow(f"threads {text!r} is not a multiple of {_WAVE} up to {_MOST_THREADS}")
    return threads


def _grid(text: str, abi: Abi, mode: int) -> Grid:
    known = _GRIDS_OF[abi, mode]
    for grid in known:
        if text == grid:
            return grid
    raise OddRow(
        f"grid {shown(text)} is not known for abi {abi} and mode {mode}; {listed(known)} are"
    )


def _dtype(text: str) -> KernelDtype:
    for known in get_args(KernelDtype):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise OddRow(f"dtype {shown(text)} is not known; {listed(get_args(KernelDtype))} are")
