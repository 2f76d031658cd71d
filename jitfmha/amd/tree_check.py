"""Checks a whole tree of code objects: manifests, rows, files, symbols, metadata, architecture."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from ..jit.elf import Elf
from .backward_manifest import read_backward_tree
from .chips import Arch, Chip, architecture, chip, chips
from .code_object import CodeObjectError, kernel_descriptors, read_code_object
from .gradient_manifest import FOLDER as GRADIENT_FOLDER
from .gradient_manifest import gradient_tree_in
from .kernel_arguments import ARGUMENTS_OF
from .manifest import (
    BACKWARD_FOLDER,
    COLUMNS,
    MANIFEST,
    KernelRow,
    architecture_folder,
    read_tree,
    row_of,
)
from .manifest_cells import OddRow, distrust, manifest_lines

_DECORATED = re.compile(r"_ZN5aiter(\d+)(\w+)E")


@dataclass
class TreeCheck:
    """What was looked at, and what is wrong.

    Attributes:
        rows: of all manifests.
        files: code objects that were read and checked.
        problems: a sentence for everything because of which a kernel is not used, or should not be.
        remarks: what is unusual and does no harm.
    """

    rows: int = 0
    files: int = 0
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_tree(root: Path) -> TreeCheck:
    """Check a whole tree, or one architecture's folder of it.

    Raises:
        FileNotFoundError: there is no manifest of any architecture.
    """
    check = TreeCheck()
    for arch, folder in manifest_folders(root).items():
        used: set[Path] = set()
        if (folder / MANIFEST).exists():
            used |= _check_forward(folder, arch, check)
        if (folder / BACKWARD_FOLDER).is_dir():
            used |= _check_backward(folder, arch, check)
        used |= _check_gradients(folder, arch, check)
        places = (MANIFEST.parent, BACKWARD_FOLDER, GRADIENT_FOLDER)
        present = {path for place in places for path in (folder / place).rglob("*.co")}
        check.remarks += [f"{path}: no row names it" for path in sorted(present - used)]
    return check


def manifest_folders(root: Path) -> dict[Arch, Path]:
    """The folders of a tree that have manifests, by architecture.

    Raises:
        FileNotFoundError: there is none.
    """
    folders = {arch: folder for arch in get_args(Arch) if (folder := _folder(root, arch))}
    if not folders:
        raise FileNotFoundError(
            f"{root} has no manifest: neither <arch>/{MANIFEST} nor <arch>/{BACKWARD_FOLDER} or "
            f"<arch>/{GRADIENT_FOLDER}, with {' or '.join(get_args(Arch))} for <arch>"
        )
    return folders


def _folder(root: Path, arch: Arch) -> Path | None:
    folder = architecture_folder(root, arch)
    if folder is None:
        return None
    places = (MANIFEST, Path(BACKWARD_FOLDER), Path(GRADIENT_FOLDER))
    return folder if any((folder / place).exists() for place in places) else None


def chips_of_folders(arch: Arch) -> tuple[Chip, ...]:
    """One chip for each folder that an architecture's code objects may be in."""
    folders = architecture(arch).kernel_folders
    if not folders:
        return (chip(architecture(arch).unlisted_chip),)
    mine = [each for each in chips() if each.architecture.name == arch]
    return tuple(next(each for each in mine if each.kernel_folder == name) for name in folders)


def _check_forward(folder: Path, arch: Arch, check: TreeCheck) -> set[Path]:
    """The files that the manifest names."""
    path = folder / MANIFEST
    reason = distrust(path)
    if reason:
        check.problems.append(f"{path} is not used: {reason}")
    try:
        lines = manifest_lines(path, COLUMNS)
    except (OSError, UnicodeDecodeError, csv.Error, OddRow) as error:
        check.problems.append(f"the manifest {path} cannot be read: {error}")
        return set()
    used: set[Path] = set()
    seen: dict[tuple[object, ...], int] = {}
    for number, cells in lines:
        check.rows += 1
        where = f"{path}, line {number}"
        try:
            rows = [row_of(cells, each) for each in chips_of_folders(arch)]
        except OddRow as error:
            check.problems.append(f"{where}: {error}")
            continue
        if rows[0].serves in seen:
            check.problems.append(f"{where}: it serves the same as line {seen[rows[0].serves]}")
        seen.setdefault(rows[0].serves, number)
        check.remarks += [f"{where}: {each}" for each in _oddities_of_symbol(rows[0].symbol)]
        files = {path.parent / row.file: row for row in rows}
        there = {file: row for file, row in files.items() if file.is_file()}
        used |= there.keys()
        if not there:
            check.problems.append(f"{where}: there is no file {_either(files)}")
        for file in (files.keys() - there.keys()) if there else ():
            check.remarks.append(f"{where}: for some chips only, as there is no file {file}")
        for file, row in there.items():
            check.files += 1
            check.problems += [f"{where}: {each}" for each in _problems_of(file, row, arch)]
    return used


def _either(files: Iterable[Path]) -> str:
    return " or ".join(str(file) for file in files)


def _oddities_of_symbol(symbol: str) -> list[str]:
    """Some published symbols count wrong; what loads a kernel does not count."""
    match = _DECORATED.fullmatch(symbol)
    if match and int(match[1]) != len(match[2]):
        return [f"symbol {symbol} says {match[1]} letters, and {match[2]} has {len(match[2])}"]
    return []


def _problems_of(file: Path, row: KernelRow, arch: Arch) -> list[str]:
    """Everything that is wrong with the code object of one row, up to the first that hides more."""
    problems = []
    reason = distrust(file)
    if reason:
        problems.append(f"{file} is not used: {reason}")
    try:
        found = read_code_object(
            file,
            arch=arch,
            symbol=row.symbol,
            threads=row.threads,
            kernarg_bytes=ARGUMENTS_OF[row.abi].size,
            sha256=row.sha256,
            combine_symbol=row.combine_symbol,
        )
    except CodeObjectError as error:
        return [*problems, str(error)]
    lds_bytes, room = (
        kernel_descriptors(Elf(found.image))[row.symbol].lds_bytes,
        architecture(arch).lds_bytes,
    )
    if lds_bytes > room:
        problems.append(f"{file}: the kernel takes {lds_bytes} bytes of LDS; {arch} has {room}")
    return problems


def _check_backward(folder: Path, arch: Arch, check: TreeCheck) -> set[Path]:
    """The files that the manifests name."""
    one = chip(architecture(arch).unlisted_chip)
    tree = read_backward_tree(read_tree(str(folder.parent), folder, one), one)
    assert tree is not None
    check.problems += tree.oddities
    check.rows += tree.kernel_count
    used: set[Path] = set()
    for row in (row for rows in tree.rows.values() for row in rows):
        used.add(tree.folder / row.file)
        check.files += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is said here
            found = tree.code_object(row)
        if isinstance(found, CodeObjectError):
            check.problems.append(str(found))
        check.remarks += [f"{row.file}: {each}" for each in _oddities_of_symbol(row.symbol)]
    return used


def _check_gradients(folder: Path, arch: Arch, check: TreeCheck) -> set[Path]:
    """The files that the manifest of this package's backward kernels names."""
    try:
        tree = gradient_tree_in(folder, arch)
    except ValueError as error:
        check.problems.append(f"the manifest {error}")
        return set()
    if tree is None:
        return set()
    for row in tree.rows:
        check.rows += 1
        check.files += 1
        try:
            tree.code_object(row)
        except CodeObjectError as error:
            check.problems.append(str(error))
    return {tree.folder / row.file for row in tree.rows}
