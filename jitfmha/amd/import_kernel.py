"""Adds a forward kernel of AMD's interface to a tree of code objects, from its assembly listing.

The listing's kernel gets the symbol that AITER's trees have, is assembled and linked, and checked
as a call would check it. What runs it once (`trial.py`) gets it as a tree of its own. Then the file
and its row of the manifest are put into the tree, each by one rename.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..jit.elf import Elf
from ..jit.regular_file import path_inside, read_regular_file, write_whole
from ..jit.toolchain.device_compiler import assemble
from ..problem.arguments import Bf16Cvt
from ..problem.problem import BF16_CVTS
from .assembly_listing import (
    ListingError,
    decorated,
    kernels_of,
    refuse_files,
    renamed,
    target_of_listing,
)
from .chips import Arch, Chip, architecture, chips_of_folders
from .code_object import CodeObject, CodeObjectError, kernel_descriptors, read_code_object
from .kernel_arguments import AITER_ARGUMENTS
from .manifest import (
    FORWARD_COLUMNS,
    FORWARD_MANIFEST,
    UNREADABLE,
    Cells,
    KernelDtype,
    KernelRow,
    OddRow,
    default_threads,
    forward_row,
    manifest_lines,
    manifest_text,
    plain_name,
)
from .tree import Tree, architecture_folder

_MODES = ("gm0", "gm1")
# What every kernel of a mode reads, the last of it in the argument block.
_LAST_ARGUMENTS = {"gm0": "s_o_Bs", "gm1": "ptr_kseq"}
# What one row of AMD's may not have in common with another.
_SERVES = ("dtype", "hdim_q", "hdim_v", "mask", "mode", "bf16_cvt")
Lines = list[tuple[int, Cells]]

_FILE_MODE, _FOLDER_MODE = 0o644, 0o755


class ImportRefused(ValueError):
    """A kernel that cannot be added as it is asked for; the text names what is in the way."""


@dataclass(frozen=True)
class KernelFacts:
    """What the caller says of a kernel: it cannot be read from the listing.

    Attributes:
        variants: of the architecture, such as MI308; empty where it has none.
        dtype: bf16, fp16, or fp8bf16 (fp8 in, bf16 out).
        hdim: of q and k, and of v.
        mask: 0 none, 1 top-left causal, 2 bottom-right causal.
        tile: rows of q and of k.
        threads: of a workgroup; None: as many as AMD's have.
        name: of the kernel; None: as the listing calls it.
    """

    arch: Arch
    variants: tuple[str, ...]
    dtype: KernelDtype
    hdim: tuple[int, int]
    mask: int
    mode: str
    bf16_cvt: Bf16Cvt
    tile: tuple[int, int]
    threads: int | None = None
    name: str | None = None

    def check(self) -> None:
        known = architecture(self.arch).kernel_folders
        unknown = [each for each in self.variants if each not in known]
        if unknown and not known:
            raise ImportRefused(f"variant {unknown[0]}: {self.arch} has no variants")
        if unknown:
            raise ImportRefused(f"variant {unknown[0]} is none of {', '.join(known)}")
        if known and not self.variants:
            raise ImportRefused(f"{self.arch} needs a variant: {' or '.join(known)}, or both")
        if self.mode == "gm1" and self.mask == 1:
            raise ImportRefused("mask 1 with gm1: packed sequences have no top-left mask")

    @property
    def chips(self) -> tuple[Chip, ...]:
        of_arch = chips_of_folders(self.arch)
        return tuple(x for x in of_arch if not self.variants or x.kernel_folder in self.variants)

    @property
    def workgroup_threads(self) -> int:
        return default_threads(*self.hdim) if self.threads is None else self.threads


@dataclass(frozen=True)
class ImportedKernel:
    """A kernel that is assembled and checked, and its row.

    Attributes:
        listing_symbol: what the listing calls it.
        code_object: of which the path is where it will be in its tree.
        lds_bytes, vgprs: that a workgroup and a wave take.
        cells: of its row in a manifest, by column.
    """

    facts: KernelFacts
    listing_symbol: str
    code_object: CodeObject
    lds_bytes: int
    vgprs: int
    cells: Mapping[str, str]


def import_listing(listing: str, facts: KernelFacts, symbol: str | None = None) -> ImportedKernel:
    """Rename, assemble, link and check a listing's kernel; ``symbol`` may be None where it has one.

    Raises:
        ImportRefused: the listing is for another architecture, has no such kernel, or its kernel
            does not honour the interface.
        DeviceCompilerNotFound, DeviceCompileError: it cannot be assembled.
    """
    facts.check()
    try:
        refuse_files(listing)
    except ListingError as error:
        raise ImportRefused(str(error)) from error
    found = kernels_of(listing)
    if symbol is None and len(found) == 1:
        (symbol,) = found
    if symbol is None or symbol not in found:
        asked = "no kernel was named" if symbol is None else f"there is no kernel {symbol}"
        raise ImportRefused(f"{asked}; the listing has {', '.join(found) or 'none at all'}")
    named = target_of_listing(listing)
    if named is not None and named.split(":")[0] != facts.arch:
        raise ImportRefused(f"the listing is for {named} (.amdgcn_target), not for {facts.arch}")
    try:
        name = plain_name(symbol) if facts.name is None else facts.name
        new_symbol, cells = decorated(name), _cells(name, facts)
        for each in facts.chips:
            forward_row(Cells(cells), each)  # what no manifest can say is refused
        image = assemble(renamed(listing, symbol, new_symbol), facts.arch, is_limited=True)
    except (ListingError, OddRow) as error:
        raise ImportRefused(str(error)) from error
    code_object, lds_bytes, vgprs = _checked(image, new_symbol, facts)
    return ImportedKernel(facts, symbol, code_object, lds_bytes, vgprs, cells)


def _cells(name: str, facts: KernelFacts) -> dict[str, str]:
    values = (
        *(facts.dtype, *facts.hdim, facts.mask, _MODES.index(facts.mode)),
        *(BF16_CVTS.index(facts.bf16_cvt), *facts.tile),
        *(decorated(name), f"{name.removeprefix('fmha_')}.co"),
    )
    cells = dict(zip(FORWARD_COLUMNS, map(str, values), strict=True))
    if facts.workgroup_threads != default_threads(*facts.hdim):
        cells["threads"] = str(facts.workgroup_threads)
    return cells


def _checked(image: bytes, symbol: str, facts: KernelFacts) -> tuple[CodeObject, int, int]:
    with tempfile.TemporaryDirectory(prefix="jitfmha-") as folder:
        path = Path(folder, "imported.co")
        path.write_bytes(image)
        try:
            found = read_code_object(
                path,
                arch=facts.arch,
                kernels={symbol: facts.workgroup_threads},
                kernarg_bytes=AITER_ARGUMENTS.size,
                sha256=None,
            )
        except CodeObjectError as error:
            raise ImportRefused(str(error).replace(f"{path}", "the assembled kernel")) from error
    descriptor = kernel_descriptors(Elf(image))[symbol]
    last = _LAST_ARGUMENTS[facts.mode]
    needed = AITER_ARGUMENTS.offsets[last] + 4
    if found.kernarg_bytes < needed:
        raise ImportRefused(
            f"kernel {symbol} declares {found.kernarg_bytes} bytes of arguments; one for "
            f"{facts.mode} reads {last}, which ends at {needed} of {AITER_ARGUMENTS.size}"
        )
    room = architecture(facts.arch).lds_bytes
    if descriptor.lds_bytes > room:
        raise ImportRefused(
            f"kernel {symbol} takes {descriptor.lds_bytes} bytes of LDS; {facts.arch} has {room}"
        )
    return found, descriptor.lds_bytes, descriptor.vgprs


# ---- Into a tree ---------------------------------------------------------------------------------


def add_to_tree(kernel: ImportedKernel, root: Path, *, replaces: bool = False) -> list[Path]:
    """Put the kernel's files and its row into a tree; returns the files.

    Each file gets its place by one rename, and the manifest comes last: until then nothing refers
    to the new ones. Others who add to the tree wait.

    Args:
        root: a whole tree, or one architecture's folder of it. It is made where it is missing.
        replaces: whether a kernel that serves the same may be replaced.

    Raises:
        ImportRefused: the tree is for another architecture, its manifest cannot be read, or has a
            kernel that serves the same.
        OSError: it cannot be written.
    """
    arch = kernel.facts.arch
    folder = architecture_folder(root, arch)
    if folder is None:
        raise ImportRefused(f"{root} is a tree of another architecture, not of {arch}")
    manifest = folder / FORWARD_MANIFEST
    places = [manifest.parent / (each.kernel_folder or "") for each in kernel.facts.chips]
    for place in places:
        _make_folder(place)
        try:
            path_inside(manifest.parent, os.path.relpath(place / "file", manifest.parent))
        except ValueError as error:
            raise ImportRefused(f"a kernel has no place in {place}: {error}") from error
    with _turn(manifest.parent):
        lines = _lines_of(manifest)
        text, outdated = _manifest_text(kernel, manifest, lines, replaces=replaces)
        files = [place / kernel.cells["co_name"] for place in places]
        _refuse_foreign_file(kernel, manifest, lines, files, replaces=replaces)
        new = [path for path in files if not path.exists()]
        try:
            for path in files:
                write_whole(path, kernel.code_object.image, _FILE_MODE)
            write_whole(manifest, text.encode(), _FILE_MODE)
        except BaseException:
            for path in new:
                path.unlink(missing_ok=True)
            raise
        for name in outdated:
            for place in places:
                with suppress(FileNotFoundError):
                    (place / name).unlink()
    return files


def rows_of(kernel: ImportedKernel, root: Path) -> list[tuple[Chip, KernelRow | None, str]]:
    """How a call on each chip finds the kernel in the tree: its row, or why there is none."""
    folder = architecture_folder(root, kernel.facts.arch)
    assert folder is not None
    answers: list[tuple[Chip, KernelRow | None, str]] = []
    for each in kernel.facts.chips:
        forward = Tree(str(root), folder, each).forward
        mine = [row for row in forward.rows if row.symbol == kernel.cells["knl_name"]]
        answers.append((each, mine[0] if mine else None, "; ".join(forward.oddities)))
    return answers


def _lines_of(manifest: Path) -> list[tuple[int, Cells]]:
    if not manifest.exists():
        return []
    try:
        return manifest_lines(manifest, FORWARD_COLUMNS)
    except UNREADABLE as error:
        raise ImportRefused(f"the manifest {manifest} cannot be read: {error}") from error


def _manifest_text(
    kernel: ImportedKernel, manifest: Path, lines: Lines, *, replaces: bool
) -> tuple[str, list[str]]:
    cells = kernel.cells
    columns: list[str] = [*FORWARD_COLUMNS, *(["threads"] if "threads" in cells else [])]
    if not manifest.exists():
        return _csv([columns, [cells.get(name, "") for name in columns]]), []
    text = manifest_text(manifest)
    columns = _header(text)
    lacking = [name for name in cells if name not in columns]
    if lacking:
        raise ImportRefused(
            f"the manifest {manifest} has no column {', '.join(lacking)}, which the kernel needs"
        )
    same = [(number, row) for number, row in lines if _serves(row) == _serves(Cells(cells))]
    if any(_given(row, columns) == _given(Cells(cells), columns) for _, row in same):
        return text, []
    if same and not replaces:
        number, row = same[0]
        raise ImportRefused(
            f"{manifest}, line {number} serves the same: {plain_name(row.text('knl_name'))}; "
            "replace it with --replace"
        )
    outdated = []
    for number, row in same:
        try:
            outdated.append(row.file("co_name"))
        except OddRow as error:
            raise ImportRefused(f"{manifest}, line {number} cannot be replaced: {error}") from error
        _refuse_left_behind(kernel, manifest, outdated[-1])
    gone = {number for number, _ in same}
    kept = [line for number, line in enumerate(text.splitlines(), 1) if number not in gone]
    kept.append(_csv([[cells.get(name, "") for name in columns]]).rstrip("\n"))
    return "\n".join(kept) + "\n", [name for name in outdated if name != cells["co_name"]]


def _refuse_left_behind(kernel: ImportedKernel, manifest: Path, file: str) -> None:
    """Variants share rows, so a row that is replaced is gone for all of them."""
    facts = kernel.facts
    for variant in architecture(facts.arch).kernel_folders:
        path = manifest.parent / variant / file
        if variant not in facts.variants and path.exists():
            raise ImportRefused(
                f"{path} has the row that would be replaced, too: give --variant {variant} as well"
            )


def _serves(row: Cells) -> tuple[str, ...]:
    """What two rows of AMD's must not have in common; kernels of ours beside them are others."""
    return (*map(row.text, _SERVES), row.text("abi") or "aiter")


def _given(row: Cells, columns: Sequence[str]) -> list[str]:
    known = *FORWARD_COLUMNS, "abi", "threads", "grid"
    return [row.text(name) for name in columns if name in known]


def _refuse_foreign_file(
    kernel: ImportedKernel, manifest: Path, lines: Lines, files: Sequence[Path], *, replaces: bool
) -> None:
    """A file of that name may be that of another kernel."""
    name = kernel.cells["co_name"]
    others = [row for _, row in lines if row.text("co_name") == name]
    if any(_serves(row) != _serves(Cells(kernel.cells)) for row in others):
        raise ImportRefused(
            f"{name} is the file of another kernel in {manifest}; give this one another --name"
        )
    image = kernel.code_object.image
    for path in files:
        if path.exists() and not replaces and read_regular_file(path) != image:
            raise ImportRefused(f"{path} is there already; replace it with --replace")


def _header(text: str) -> list[str]:
    lines = (line for line in text.splitlines() if line.strip())
    first = next(line for line in lines if not line.lstrip().startswith(("#", "//", ";")))
    return [name.strip() for name in next(csv.reader([first]))]


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents; whatever the umask is, only the user can write to it."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        each.chmod(_FOLDER_MODE)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Inside, nobody else adds to the tree; file systems without locks have no turns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
