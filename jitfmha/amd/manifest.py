"""What a tree of code objects offers: its manifest, read row by row.

A tree has one folder for each architecture. ``<arch>/fmha_v3_fwd/fmha_fwd.csv`` lists the forward
kernels; the code objects of gfx950 lie beside it, those of gfx942 one folder deeper, in ``MI300``
and ``MI308``. AITER's trees have this form, and so has the one that this package ships; ours has
more columns, which are optional. Whatever is odd in a tree is told by name and left out.
"""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from ..problem import BF16_CVTS
from ..resources import hsa_dir
from ..target import Arch, Chip

KernelDtype = Literal["bf16", "fp16", "fp8bf16"]

HSA_DIR, AITER_ASM_DIR = "JITFMHA_HSA_DIR", "AITER_ASM_DIR"

_MANIFEST = Path("fmha_v3_fwd", "fmha_fwd.csv")
_COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "mode", "bf16_cvt"),
    *("ts_qo", "ts_kv", "knl_name", "co_name"),
)
_CHIP_FOLDERS: Mapping[Arch, tuple[Chip, ...]] = {"gfx942": ("MI300", "MI308"), "gfx950": ()}
# Both end up inside C++ string literals; a file stays inside of its tree.
_SYMBOL = re.compile(r"[A-Za-z_$.][A-Za-z0-9_$.]*")
_FILE = re.compile(r"[A-Za-z0-9_+,=-][A-Za-z0-9_.+,=-]*(/[A-Za-z0-9_+,=-][A-Za-z0-9_.+,=-]*)*")
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
        sha256: of the file; None where the manifest has none.
        chip: the one that the row names; None where it holds for all of the architecture.
        combine_symbol: of the kernel that makes the output where keys are split; None where the
            manifest has none.
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
    sha256: str | None
    chip: Chip | None
    combine_symbol: str | None = None

    @property
    def name(self) -> str:
        """The kernel's name without the decoration of its symbol."""
        decorated = re.fullmatch(r"_ZN5aiter\d+(\w+)E", self.symbol)
        return decorated[1] if decorated else self.symbol

    @property
    def serves(self) -> tuple[object, ...]:
        """What two rows of one manifest must not have in common."""
        return (
            *(self.dtype, self.hdim_q, self.hdim_v),
            *(self.mask, self.mode, self.bf16_cvt, self.chip),
        )


@dataclass(frozen=True)
class Tree:
    """The forward kernels of one tree for one chip.

    Attributes:
        origin: how a message names the tree.
        folder: of the manifest.
        is_shipped: whether it is the one that came with the package.
        rows: the usable ones; rows for this very chip come before those for the architecture.
        oddities: a sentence for everything that was left out.
    """

    origin: str
    folder: Path
    is_shipped: bool
    rows: tuple[KernelRow, ...] = field(repr=False)
    oddities: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        return self.origin


def trees_of(arch: Arch, chip: Chip) -> tuple[Tree, ...]:
    """The trees for a chip, the preferred one first: what the environment names, then ours.

    The environment and the files are read once in a process. Oddities are warned of once.
    """
    return _trees_of(arch, chip)


@lru_cache(maxsize=8)
def _trees_of(arch: Arch, chip: Chip) -> tuple[Tree, ...]:
    trees = []
    for variable in (HSA_DIR, AITER_ASM_DIR):
        given = os.environ.get(variable, "")
        if given:
            folder = _architecture_folder(Path(given), arch)
            if folder is not None:
                trees.append(read_tree(f"{variable}={given}", folder, arch, chip))
    shipped = hsa_dir() / arch
    if (shipped / _MANIFEST).is_file():
        trees.append(read_tree("the kernels of this package", shipped, arch, chip, shipped=True))
    for tree in trees:
        for oddity in tree.oddities:
            warn_of(oddity)
    return tuple(trees)


def _architecture_folder(given: Path, arch: Arch) -> Path | None:
    """The folder of ``arch`` where ``given`` is a whole tree or one architecture's folder.

    None where it is the folder of another architecture, which is nothing odd.
    """
    if given.name in _CHIP_FOLDERS:
        return given if given.name == arch else None
    if (given / _MANIFEST).exists() and not (given / arch).exists():
        return given
    if not (given / arch).exists() and any((given / other).exists() for other in _CHIP_FOLDERS):
        return None
    return given / arch


def warn_of(oddity: str) -> None:
    """Warn of something odd in a tree, once in a process."""
    if oddity not in _warned_of:
        _warned_of.add(oddity)
        warnings.warn(f"jitfmha: {oddity}", RuntimeWarning, stacklevel=3)


_warned_of: set[str] = set()


def read_tree(origin: str, folder: Path, arch: Arch, chip: Chip, *, shipped: bool = False) -> Tree:
    """Read the manifest below an architecture's folder, as far as it concerns ``chip``.

    Raises nothing: a manifest that cannot be read gives a tree without rows and the reason.
    """
    path = folder / _MANIFEST
    rows: list[KernelRow] = []
    oddities: list[str] = []
    try:
        lines = _lines(path)
    except (OSError, UnicodeDecodeError, csv.Error, _OddRow) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        oddities.append(f"{origin}: the manifest {path} cannot be read: {reason}")
        lines = []
    seen: dict[tuple[object, ...], int] = {}
    for number, cells in lines:
        where = f"{origin}: {path}, line {number}"
        try:
            row = _row(cells, arch, chip)
        except _OddRow as error:
            oddities.append(f"{where} is left out: {error}")
            continue
        if row.chip not in (None, chip):
            continue
        # Ours have tiles of several sizes; a plain manifest has no rule for choosing between rows.
        serves = (*row.serves, row.ts_qo) if shipped else row.serves
        if serves in seen:
            oddities.append(f"{where} is left out: it serves the same as line {seen[serves]}")
            continue
        seen[serves] = number
        if not (path.parent / row.file).is_file():
            oddities.append(f"{where} is left out: there is no file {path.parent / row.file}")
            continue
        rows.append(row)
    rows.sort(key=lambda row: row.chip is None)
    return Tree(origin, path.parent, shipped, tuple(rows), tuple(oddities))


class _OddRow(Exception):
    """Why a row, or a whole manifest, cannot be used."""


def _lines(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows of a manifest with their line numbers, as column -> cell."""
    text = path.read_text(encoding="utf-8-sig")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise _OddRow(f"it has no column {', '.join(missing)}")
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise _OddRow(f"it has the column {', '.join(twice)} more than once")
    lines = []
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        # A row that is too short lacks what its missing columns would say; _row says which.
        lines.append(
            (reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=False)))
        )
    return lines


def _row(cells: Mapping[str, str], arch: Arch, chip: Chip) -> KernelRow:
    short = [name for name in _COLUMNS if name not in cells]
    if short:
        raise _OddRow(f"it has no {', '.join(short)}")
    named_chip = _chip(cells.get("chip", ""), arch)
    file = _matching("co_name", cells["co_name"], _FILE, "a file name")
    if _CHIP_FOLDERS[arch]:
        file = f"{named_chip or chip}/{file}"
    sha256, combine = cells.get("sha256", "").lower(), cells.get("combine_name", "")
    return KernelRow(
        dtype=_dtype(cells["dtype"]),
        hdim_q=_positive("hdim_q", cells["hdim_q"]),
        hdim_v=_positive("hdim_v", cells["hdim_v"]),
        mask=_one_of("mask", cells["mask"], (0, 1, 2)),
        mode=_one_of("mode", cells["mode"], (0, 1)),
        bf16_cvt=_one_of("bf16_cvt", cells["bf16_cvt"], range(len(BF16_CVTS))),
        ts_qo=_positive("ts_qo", cells["ts_qo"]),
        ts_kv=_positive("ts_kv", cells["ts_kv"]),
        symbol=_matching("knl_name", cells["knl_name"], _SYMBOL, "a symbol"),
        file=file,
        sha256=_matching("sha256", sha256, _SHA256, "64 hexadecimal digits") if sha256 else None,
        chip=named_chip,
        combine_symbol=_matching("combine_name", combine, _SYMBOL, "a symbol") if combine else None,
    )


def _dtype(text: str) -> KernelDtype:
    for known in get_args(KernelDtype):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise _OddRow(f"dtype {text!r} is not known; {_listed(get_args(KernelDtype))} are")


def _chip(text: str, arch: Arch) -> Chip | None:
    if not text:
        return None
    known: tuple[Chip, ...] = _CHIP_FOLDERS[arch] or ("MI350",)
    for chip in known:
        if text == chip:
            return chip
    raise _OddRow(f"chip {text!r} is not known for {arch}; {_listed(known)} are")


def _number(name: str, text: str) -> int:
    # int() also takes "1_0" and digits of other scripts.
    if not (text.isascii() and text.isdecimal()):
        raise _OddRow(f"{name} {text!r} is not a number")
    return int(text)


def _positive(name: str, text: str) -> int:
    number = _number(name, text)
    if not 0 < number < 1 << 16:
        raise _OddRow(f"{name} {text!r} is not between 1 and 65535")
    return number


def _one_of(name: str, text: str, known: range | tuple[int, ...]) -> int:
    number = _number(name, text)
    if number not in known:
        raise _OddRow(f"{name} {text!r} is not known; {_listed(known)} are")
    return number


def _matching(name: str, text: str, form: re.Pattern[str], what: str) -> str:
    if not form.fullmatch(text):
        raise _OddRow(f"{name} {text!r} is not {what}")
    return text


def _listed(values: range | tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)
