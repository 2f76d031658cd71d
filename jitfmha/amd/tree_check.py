"""Checks a whole tree of code objects: manifests, rows, files, symbols, metadata, architecture."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..jit.elf import Elf
from .chips import Arch, architecture, chips_of_folders
from .code_object import CodeObjectError, kernel_descriptors
from .manifest import (
    AITER_BACKWARD_FOLDER,
    FORWARD_MANIFEST,
    READY_BACKWARD_MANIFEST,
    AnyRow,
    Manifest,
)
from .tree import Tree, architecture_folder

_DECORATED = re.compile(r"_ZN5aiter(\d+)(\w+)E")
_FOLDERS = FORWARD_MANIFEST.parent, Path(AITER_BACKWARD_FOLDER), READY_BACKWARD_MANIFEST.parent


@dataclass
class TreeCheck:
    """What was looked at, and what is wrong.

    ``problems`` has a sentence for all because of which a kernel is not used, or should not be;
    ``remarks`` is what is unusual and does no harm.
    """

    rows: int = 0
    files: int = 0
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_tree(root: Path) -> TreeCheck:
    """Check a whole tree, or one architecture's folder of it; raises as `manifest_folders` does."""
    check = TreeCheck()
    for arch, folder in manifest_folders(root).items():
        trees = [Tree(str(root), folder, each) for each in chips_of_folders(arch)]
        named: set[Path] = set()
        _check(check, named, *((tree, tree.forward) for tree in trees))
        # Backward kernels are the same for all chips.
        _check(check, named, (trees[0], trees[0].aiter_backward))
        _check(check, named, (trees[0], trees[0].ready_backward))
        present = {path for place in _FOLDERS for path in (folder / place).rglob("*.co")}
        check.remarks += [f"{path}: no usable row names it" for path in sorted(present - named)]
    return check


def manifest_folders(root: Path) -> dict[Arch, Path]:
    """The folders of a tree with manifests, by architecture; ``FileNotFoundError`` without any."""
    found = {arch: architecture_folder(root, arch) for arch in get_args(Arch)}
    folders = {
        arch: folder
        for arch, folder in found.items()
        if folder is not None and any((folder / each).is_dir() for each in _FOLDERS)
    }
    if not folders:
        raise FileNotFoundError(
            f"{root} has no manifest: neither <arch>/{FORWARD_MANIFEST} nor "
            f"<arch>/{AITER_BACKWARD_FOLDER} or <arch>/{READY_BACKWARD_MANIFEST}, with "
            f"{' or '.join(get_args(Arch))} for <arch>"
        )
    return folders


def _check(check: TreeCheck, named: set[Path], *read: tuple[Tree, Manifest[Any]]) -> None:
    """Check what chips read of one form of manifest; adds the rows' files to ``named``."""
    symbols = {
        place: row.symbol
        for _, manifest in read
        for place, row in zip(manifest.places, manifest.rows, strict=True)
    }
    left_out = dict.fromkeys(x for _, manifest in read for x in manifest.left_out.items())
    check.rows += len(symbols.keys() | {place for place, _ in left_out if ", line " in place})
    for place, why in left_out:
        if place in symbols:
            check.remarks.append(f"{place}: for some chips only; for others it {why}")
        else:
            check.problems.append(f"{place} {why}")
    for place, symbol in symbols.items():
        check.remarks += [f"{place}: {each}" for each in _oddities_of_symbol(symbol)]
    for tree, manifest in read:
        for place, row in zip(manifest.places, manifest.rows, strict=True):
            named.add(tree.path_of(row))
            check.files += 1
            check.problems += [f"{place}: {each}" for each in _problems_of(tree, row)]


def _oddities_of_symbol(symbol: str) -> list[str]:
    """Some published symbols count wrong; what loads a kernel does not count."""
    match = _DECORATED.fullmatch(symbol)
    if match and int(match[1]) != len(match[2]):
        return [f"symbol {symbol} says {match[1]} letters, and {match[2]} has {len(match[2])}"]
    return []


def _problems_of(tree: Tree, row: AnyRow) -> list[str]:
    """Why a row's code object would not be loaded, or takes more than a compute unit has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is said here
        found = tree.code_object(row)
    if isinstance(found, CodeObjectError):
        return [str(found)]
    descriptors, room = kernel_descriptors(Elf(found.image)), architecture(tree.arch).lds_bytes
    return [
        f"{found.path}: kernel {symbol} takes {lds_bytes} bytes of LDS; {tree.arch} has {room}"
        for symbol in row.kernels
        if (lds_bytes := descriptors[symbol].lds_bytes) > room
    ]
