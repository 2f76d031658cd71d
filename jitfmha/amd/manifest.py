"""What the manifests of a tree of code objects list, read row by row and checked cell by cell.

An architecture's folder has one folder for each form of manifest, with the code objects beside it:

* ``fmha_v3_fwd/fmha_fwd.csv`` lists forward kernels. AITER's trees have this form, and so has the
  one that this package ships, with more columns: ``abi``, ``threads`` and ``grid`` name the binary
  interface of a kernel. Where they are missing the kernel is one of AMD's, and the rules of its
  interface ("fmha v3") say the rest. AMD's code objects for gfx942 lie one folder deeper, in
  ``MI300`` and ``MI308``.
* ``fmha_v3_bwd`` is AITER's form for backward passes: a manifest for each kind of kernel, with the
  same columns, of which kernels other than those of gradients leave some at 0.
* ``fmha_bwd/fmha_bwd.csv`` is this package's: a row is a code object with three kernels, which run
  one after the other. ``hsa/src/fmha_bwd.hip`` says what each does, and
  ``hsa/src/fmha_bwd_hd192.hip`` for larger head dimensions.

Of every row, ``symbol`` is the kernel's, ``file`` the code object, relative to the manifest's
folder, ``sha256`` what its hash begins with, or None where the manifest has none, ``mode`` 0 for
gm0 and 1 for gm1, ``bf16_cvt`` an index of ``BF16_CVTS``, and ``threads`` are of a workgroup.

Whatever is odd in a manifest is told by file, line and value, and left out.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from ..jit.cache.trust import file_reason
from ..jit.regular_file import path_inside, read_regular_file
from ..jit.shared_struct import SharedStruct
from ..problem.problem import BF16_CVTS
from .chips import SIMDS, Arch, Chip, architecture
from .code_object import list_of_names
from .kernel_arguments import (
    AITER_DQ_ARGUMENTS,
    AITER_GRADIENT_ARGUMENTS,
    AITER_ROW_SUM_ARGUMENTS,
    ARGUMENTS_OF,
    READY_BACKWARD_ARGUMENTS,
    Abi,
)

KernelDtype = Literal["bf16", "fp16", "fp8bf16"]
BackwardDtype = Literal["bf16", "fp16"]
AiterKind = Literal["odo", "dqdkdv", "dq_convert", "dq_shuffle"]
"""Sums of o times do of each row; gradients; dq of float32 sums; dq of shuffled 16-bit sums."""

GridAxes = Literal[
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

FORWARD_MANIFEST = Path("fmha_v3_fwd", "fmha_fwd.csv")
AITER_BACKWARD_FOLDER = "fmha_v3_bwd"
READY_BACKWARD_MANIFEST = Path("fmha_bwd", "fmha_bwd.csv")
FORWARD_COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "mode", "bf16_cvt"),
    *("ts_qo", "ts_kv", "knl_name", "co_name"),
)
AITER_BACKWARD_COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "mask", "atomic32", "pssk", "pddv", "mode", "bf16_cvt"),
    *("ts", "knl_name", "co_name"),
)
READY_BACKWARD_COLUMNS = (
    *("dtype", "hdim_q", "hdim_v", "masked", "mode", "bf16_cvt", "deterministic"),
    *("keys", "queries", "knl_name", "co_name"),
    *("threads", "edge_threads", "sha256"),
)
ANY_BF16_CVT = len(BF16_CVTS)
_GRIDS_OF: Mapping[tuple[Abi, int], tuple[GridAxes, ...]] = {
    ("aiter", 0): ("tiles_heads_batches", "tile_pairs_heads_batches", "heads_tiles_batches"),
    ("aiter", 1): ("heads_batches_tiles", "heads_batches_tile_pairs"),
    ("jitfmha", 0): ("xcd_heads_tiles_splits",),
    ("jitfmha", 1): ("heads_batches_tiles_splits",),
}
_AITER_BACKWARD_ARGUMENTS: Mapping[AiterKind, SharedStruct] = {
    "odo": AITER_ROW_SUM_ARGUMENTS,
    "dqdkdv": AITER_GRADIENT_ARGUMENTS,
    "dq_convert": AITER_DQ_ARGUMENTS,
    "dq_shuffle": AITER_DQ_ARGUMENTS,
}
_WAVE, _MOST_THREADS = 64, 1024


class KernelRow(NamedTuple):
    """A forward kernel for one chip; also how a launcher is told of any other kernel of ours.

    Attributes:
        mask: 0 none, 1 top-left causal, 2 bottom-right causal.
        ts_qo, ts_kv: rows of q and of k in a tile.
        combine_symbol: of the kernel that makes the output where keys are split; None: this one
            cannot split them.
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
    grid: GridAxes
    combine_symbol: str | None = None
    sha256: str | None = None
    waves_of_simd: int = 2
    stacks_heads: bool = False

    @property
    def name(self) -> str:
        return plain_name(self.symbol)

    @property
    def workgroups_of_unit(self) -> int:
        """How many workgroups of a kernel of ours share a compute unit: of AMD's it is not known.

        With two waves a SIMD, a unit has 8 of our waves: two workgroups of four, or one of eight.
        """
        return self.waves_of_simd * SIMDS * _WAVE // self.threads

    @property
    def can_split_keys(self) -> bool:
        return self.combine_symbol is not None

    @property
    def folder(self) -> str:
        return FORWARD_MANIFEST.parent.name

    @property
    def kernels(self) -> dict[str, int]:
        combine = {self.combine_symbol: self.threads} if self.combine_symbol else {}
        return {self.symbol: self.threads, **combine}

    @property
    def arguments(self) -> SharedStruct:
        return ARGUMENTS_OF[self.abi]

    @property
    def serves(self) -> Hashable:
        """What two rows of one manifest must not have in common.

        Of our kernels there are tiles of several sizes to choose from; for AMD's there is no rule.
        """
        return (
            *(self.dtype, self.hdim_q, self.hdim_v, self.mask, self.mode, self.bf16_cvt),
            *((self.ts_qo,) if self.abi == "jitfmha" else ()),
        )


class AiterBackwardRow(NamedTuple):
    """One kernel of AITER's for backward passes.

    Attributes:
        hdim_q, hdim_v: that it was made for; smaller ones are padded.
        mask: 0 none, 1 top-left causal, 2 bottom-right causal, 3 a window.
        has_atomic_fp32: whether dq is added up in float32, not in q's dtype.
        takes_any_seqlen: and strides of every tensor (``pssk``).
        takes_smaller_hdim: than that it was made for (``pddv``).
        bf16_cvt: may be ``ANY_BF16_CVT``, too.
        ts: rows of a workgroup: keys of a kernel of gradients, else queries.
    """

    kind: AiterKind
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
    sha256: str | None = None
    threads: int = 256

    @property
    def name(self) -> str:
        return plain_name(self.symbol)

    @property
    def folder(self) -> str:
        return AITER_BACKWARD_FOLDER

    @property
    def kernels(self) -> dict[str, int]:
        return {self.symbol: self.threads}

    @property
    def arguments(self) -> SharedStruct:
        return _AITER_BACKWARD_ARGUMENTS[self.kind]

    @property
    def serves(self) -> Hashable:
        """None: AITER has a rule for each choice between rows."""
        return None

    def rounds(self, bf16_cvt: str) -> bool:
        """Whether the kernel is for this rounding to bf16, or for any."""
        return self.bf16_cvt == ANY_BF16_CVT or BF16_CVTS[self.bf16_cvt] == bf16_cvt


class ReadyBackwardRow(NamedTuple):
    """One code object of ours for backward passes.

    Attributes:
        is_masked: whether there may be a mask: causal of both corners, or a window.
        bf16_cvt: 0 where the chip has one way only.
        is_deterministic: whether dq is added up in one order.
        keys: of a workgroup of the kernel ``symbol``, which makes dk and dv, and adds dq up.
        queries: of a workgroup of the two others.
        threads, edge_threads: of a workgroup of the first, and of the two others.
    """

    dtype: BackwardDtype
    hdim_q: int
    hdim_v: int
    is_masked: bool
    mode: int
    bf16_cvt: int
    is_deterministic: bool
    keys: int
    queries: int
    symbol: str
    threads: int
    edge_threads: int
    file: str
    sha256: str

    @property
    def name(self) -> str:
        return self.symbol

    @property
    def folder(self) -> str:
        return READY_BACKWARD_MANIFEST.parent.name

    @property
    def row_sums_symbol(self) -> str:
        """Of the kernel before that in the middle."""
        return f"{self.symbol}_row_sums"

    @property
    def round_dq_symbol(self) -> str:
        """Of the kernel after it."""
        return f"{self.symbol}_round_dq"

    @property
    def kernels(self) -> dict[str, int]:
        edges = dict.fromkeys((self.row_sums_symbol, self.round_dq_symbol), self.edge_threads)
        return {self.symbol: self.threads, **edges}

    @property
    def arguments(self) -> SharedStruct:
        return READY_BACKWARD_ARGUMENTS

    @property
    def serves(self) -> Hashable:
        """What two rows must not have in common: all but the kernels themselves."""
        return (
            *(self.dtype, self.hdim_q, self.hdim_v, self.is_masked, self.mode, self.bf16_cvt),
            *(self.is_deterministic, self.keys, self.queries),
        )

    def rounds(self, bf16_cvt: str, arch: Arch) -> bool:
        """Whether the kernels round as asked; where there is one way, it is for all."""
        has_roundings = architecture(arch).has_roundings(self.dtype)
        return not has_roundings or BF16_CVTS[self.bf16_cvt] == bf16_cvt


AnyRow = KernelRow | AiterBackwardRow | ReadyBackwardRow
Row = TypeVar("Row", KernelRow, AiterBackwardRow, ReadyBackwardRow)


@dataclass(frozen=True)
class Manifest(Generic[Row]):
    """What a tree lists of one form.

    Attributes:
        origin: how a message names the tree.
        rows: the usable ones, in their order.
        places: the file and line of each.
        left_out: why everything else is not there, by file and line.
    """

    origin: str
    rows: tuple[Row, ...] = field(repr=False)
    places: tuple[str, ...] = field(repr=False)
    left_out: Mapping[str, str] = field(repr=False)

    @property
    def oddities(self) -> tuple[str, ...]:
        """A sentence for everything that was left out; one for all that is for the same reason."""
        places: dict[str, list[str]] = {}
        for place, why in self.left_out.items():
            places.setdefault(why, []).append(place)
        return tuple(
            f"{self.origin}: {first}{f' (and {len(others)} more)' if others else ''} {why}"
            for why, (first, *others) in places.items()
        )

    @property
    def why_empty(self) -> tuple[str, ...]:
        return () if self.rows else self.oddities


def read_manifests(
    origin: str,
    columns: tuple[str, ...],
    row_of: Mapping[Path, Callable[[Cells], Row]],
    *,
    is_trusted: bool,
) -> Manifest[Row]:
    """Read the manifests of one form; each row of ``row_of`` says how the rows of one are read.

    Raises nothing: a manifest that cannot be read, or that somebody else could change, is left out.
    With ``is_trusted`` it does not matter who could change the files.
    """
    rows: list[Row] = []
    places: list[str] = []
    left_out: dict[str, str] = {}
    for path, read in row_of.items():
        reason = None if is_trusted else distrust(path)
        if reason:
            left_out[f"the manifest {path}"] = (
                f"is not used: {reason}. Copy the tree to a directory that belongs to you and that "
                "only you can write to"
            )
            continue
        try:
            lines = manifest_lines(path, columns)
        except UNREADABLE as error:
            why = error.strerror if isinstance(error, OSError) else error
            left_out[f"the manifest {path}"] = f"cannot be read: {why}"
            continue
        seen: dict[Hashable, int] = {}
        for number, cells in lines:
            place = f"{path}, line {number}"
            try:
                cells.refuse_short(columns)
                row = read(cells)
                _refuse_twin(row, number, seen)
                if not os.path.isfile(path.parent / row.file):
                    raise OddRow(f"there is no file {path.parent / row.file}")
                if not is_trusted:
                    path_inside(path.parent, row.file)
            except (OddRow, ValueError) as error:
                left_out[place] = f"is left out: {error}"
                continue
            rows.append(row)
            places.append(place)
    return Manifest(origin, tuple(rows), tuple(places), left_out)


def _refuse_twin(row: AnyRow, number: int, seen: dict[Hashable, int]) -> None:
    if row.serves is not None and seen.setdefault(row.serves, number) != number:
        raise OddRow(f"it serves the same as line {seen[row.serves]}")


# ---- Rows ----------------------------------------------------------------------------------------


def forward_row(cells: Cells, chip: Chip) -> KernelRow:
    """A row of the forward kernels' manifest, for a chip. Raises :class:`OddRow`."""
    hdims = cells.positive("hdim_q"), cells.positive("hdim_v")
    mask, mode = cells.number("mask", 3), cells.number("mode", 2)
    abi = cells.word("abi", ARGUMENTS_OF) if cells.text("abi") else "aiter"
    threads, grid = cells.text("threads"), cells.text("grid")
    if abi == "jitfmha" and not (threads and grid):
        raise OddRow(
            f"abi 'jitfmha' needs threads and a grid; they are {shown(threads)} and {shown(grid)}"
        )
    if abi == "jitfmha":
        cells.refuse_other_layout(ARGUMENTS_OF[abi])
    folder = f"{chip.kernel_folder}/" if abi == "aiter" and chip.kernel_folder is not None else ""
    takes_pairs = (chip.architecture.name, hdims) not in _WITHOUT_PAIRS
    return KernelRow(
        dtype=cells.word("dtype", get_args(KernelDtype)),
        hdim_q=hdims[0],
        hdim_v=hdims[1],
        mask=mask,
        mode=mode,
        bf16_cvt=cells.number("bf16_cvt", len(BF16_CVTS)),
        ts_qo=cells.positive("ts_qo"),
        ts_kv=cells.positive("ts_kv"),
        symbol=cells.symbol("knl_name"),
        file=folder + cells.file("co_name"),
        abi=abi,
        threads=cells.threads("threads") if threads else default_threads(*hdims),
        grid=(
            cells.word("grid", _GRIDS_OF[abi, mode], f" for abi {abi} and mode {mode}")
            if grid
            else _aiter_grid(mode, mask, takes_pairs=takes_pairs)
        ),
        combine_symbol=cells.symbol("combine_name") if cells.text("combine_name") else None,
        sha256=cells.sha256(),
    )


_AITER_WIDE = (192, 128)
# AMD's kernels of which a workgroup has no pair of tiles under a mask.
_WITHOUT_PAIRS: frozenset[tuple[Arch, tuple[int, int]]] = frozenset({("gfx942", _AITER_WIDE)})


def default_threads(hdim_q: int, hdim_v: int) -> int:
    """Threads of a workgroup of a kernel of AMD's."""
    return 256 if (hdim_q, hdim_v) == _AITER_WIDE else 512


def _aiter_grid(mode: int, mask: int, *, takes_pairs: bool) -> GridAxes:
    if mode == 1:
        return "heads_batches_tile_pairs" if mask and takes_pairs else "heads_batches_tiles"
    if not takes_pairs:
        return "heads_tiles_batches"
    return "tile_pairs_heads_batches" if mask else "tiles_heads_batches"


def aiter_backward_row(cells: Cells, kind: AiterKind) -> AiterBackwardRow:
    """A row of one of AITER's backward manifests. Raises :class:`OddRow`."""
    return AiterBackwardRow(
        kind=kind,
        dtype=cells.word("dtype", get_args(BackwardDtype)),
        hdim_q=cells.positive("hdim_q"),
        hdim_v=cells.positive("hdim_v"),
        mask=cells.number("mask", 4),
        has_atomic_fp32=cells.is_set("atomic32"),
        takes_any_seqlen=cells.is_set("pssk"),
        takes_smaller_hdim=cells.is_set("pddv"),
        mode=cells.number("mode", 2),
        bf16_cvt=cells.number("bf16_cvt", ANY_BF16_CVT + 1),
        ts=cells.positive("ts"),
        symbol=cells.symbol("knl_name"),
        file=cells.file("co_name"),
        sha256=cells.sha256(),
    )


def ready_backward_row(cells: Cells) -> ReadyBackwardRow:
    """A row of this package's backward manifest. Raises :class:`OddRow`."""
    sha256 = cells.sha256()
    if sha256 is None:
        raise OddRow("it has no sha256")
    cells.refuse_other_layout(READY_BACKWARD_ARGUMENTS)
    return ReadyBackwardRow(
        dtype=cells.word("dtype", get_args(BackwardDtype)),
        hdim_q=cells.positive("hdim_q"),
        hdim_v=cells.positive("hdim_v"),
        is_masked=cells.is_set("masked"),
        mode=cells.number("mode", 2),
        bf16_cvt=cells.number("bf16_cvt", len(BF16_CVTS)),
        is_deterministic=cells.is_set("deterministic"),
        keys=cells.positive("keys"),
        queries=cells.positive("queries"),
        symbol=cells.symbol("knl_name"),
        threads=cells.threads("threads"),
        edge_threads=cells.threads("edge_threads"),
        file=cells.file("co_name"),
        sha256=sha256,
    )


# ---- Cells ---------------------------------------------------------------------------------------

# Both end up inside C++ string literals; a file stays inside of its folder.
_SYMBOL = re.compile(r"[A-Za-z_$.][A-Za-z0-9_$.]*")
_FILE = re.compile(r"[A-Za-z0-9_+,=-][A-Za-z0-9_.+,=-]*")
_SHA256 = re.compile(r"[0-9a-f]{32,64}")
_MOST_DIGITS = 18
_SHOWN_LETTERS = 100
Word = TypeVar("Word", bound=str)


class OddRow(Exception):
    """Why a row, or a whole manifest, cannot be used."""


UNREADABLE = OSError, UnicodeDecodeError, csv.Error, OddRow
"""What :func:`manifest_lines` raises."""


class Cells:
    """The cells of a row. What reads one raises :class:`OddRow`, which names it and its value."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self._cells = cells

    def refuse_short(self, columns: Iterable[str]) -> None:
        missing = [name for name in columns if name not in self._cells]
        if missing:
            raise OddRow(f"it has no {_listed(missing)}")

    def refuse_other_layout(self, arguments: SharedStruct) -> None:
        """Refuse a row of ours whose code object reads another layout than is packed here."""
        layout = self.text("layout")
        if layout != arguments.layout:
            raise OddRow(
                f"it was built for another layout of {arguments.name}: {shown(layout)}, where this "
                f"version has {arguments.layout!r}; rebuild it with hsa/build.py, or reinstall "
                "jitfmha"
            )

    def text(self, name: str) -> str:
        """A cell as it is; "" where there is none."""
        return self._cells.get(name, "")

    def number(self, name: str, count: int) -> int:
        number = self._number(name)
        if number >= count:
            raise OddRow(f"{name} {self.text(name)!r} is not known; {_listed(range(count))} are")
        return number

    def is_set(self, name: str) -> bool:
        """Whether a cell is 1; it may be 0."""
        return self.number(name, 2) == 1

    def positive(self, name: str, most: int = (1 << 16) - 1) -> int:
        """Read a number from 1 to ``most``."""
        number = self._number(name)
        if not 0 < number <= most:
            raise OddRow(f"{name} {self.text(name)!r} is not between 1 and {most}")
        return number

    def threads(self, name: str) -> int:
        number = self._number(name)
        if number % _WAVE or not 0 < number <= _MOST_THREADS:
            raise OddRow(
                f"{name} {self.text(name)!r} is not a multiple of {_WAVE} up to {_MOST_THREADS}"
            )
        return number

    def word(self, name: str, known: Iterable[Word], of: str = "") -> Word:
        """One of the known words; ``of`` goes on from "is not known"."""
        text = self.text(name)
        for each in known:
            if text == each:
                return each
        raise OddRow(f"{name} {shown(text)} is not known{of}; {_listed(known)} are")

    def symbol(self, name: str) -> str:
        return self._matching(name, self.text(name), _SYMBOL, "a symbol")

    def file(self, name: str) -> str:
        """The name of a file in the manifest's folder."""
        return self._matching(name, self.text(name), _FILE, "a file name")

    def sha256(self) -> str | None:
        """The hash of the code object in small letters, or half of it, where the row has one."""
        text, digits = self.text("sha256").lower(), "32 to 64 hexadecimal digits"
        return self._matching("sha256", text, _SHA256, digits) if text else None

    def _number(self, name: str) -> int:
        text = self.text(name)
        # int() also takes "1_0" and digits of other scripts, and raises for very many digits.
        if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
            raise OddRow(f"{name} {shown(text)} is not a number of up to {_MOST_DIGITS} digits")
        return int(text)

    def _matching(self, name: str, text: str, form: re.Pattern[str], what: str) -> str:
        if not form.fullmatch(text):
            raise OddRow(f"{name} {shown(text)} is not {what}")
        return text


def manifest_text(path: Path) -> str:
    """A whole manifest. Raises ``OSError`` or ``UnicodeDecodeError``."""
    content = io.BytesIO(read_regular_file(path))
    return io.TextIOWrapper(content, encoding="utf-8-sig").read()


def manifest_lines(path: Path, columns: tuple[str, ...]) -> list[tuple[int, Cells]]:
    """The rows of a manifest with their line numbers.

    Lines that are comments in AITER's eyes are left out. Raises one of ``UNREADABLE`` where the
    manifest as a whole cannot be read.
    """
    # An empty line in the place of each keeps the numbers of the others.
    text = re.sub(r"(?m)^[ \t]*(#|//|;).*$", "", manifest_text(path))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    first = next((cells for cells in reader if cells), [])
    header = [name.strip() for name in first]
    missing = [name for name in columns if name not in header]
    if missing:
        raise OddRow(f"it has no column {', '.join(missing)}")
    twice = sorted(name for name, count in Counter(header).items() if name and count > 1)
    if twice:
        raise OddRow(f"it has the column {list_of_names(twice)} more than once")
    return [
        (reader.line_num, Cells(dict(zip(header, (x.strip() for x in cells), strict=False))))
        for cells in reader
        if any(cell.strip() for cell in cells)
    ]


def plain_name(symbol: str) -> str:
    """The name of a kernel without the decoration of its symbol."""
    decorated = re.fullmatch(r"_ZN5aiter\d+(\w+)E", symbol)
    return decorated[1] if decorated else symbol


def distrust(path: Path) -> str | None:
    """Why somebody else could have put the file there or change it; None if nobody could."""
    try:
        return file_reason(str(path.absolute()))
    except OSError:
        return None  # Who opens it says why it cannot be read.


def shown(text: str) -> str:
    """A cell as messages quote it, where it may be of any length."""
    return repr(text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}...")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
