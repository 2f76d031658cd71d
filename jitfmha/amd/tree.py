"""Trees of code objects: where they are, and what each has for one chip.

Code objects are code. So what the environment names has to be in the hands of this user or of root,
as the build cache has; the tree of this package is as safe as the package.
"""

from __future__ import annotations

import os
import warnings
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

from ..jit.resources import hsa_dir
from .chips import Arch, Chip
from .code_object import CodeObject, CodeObjectError, read_code_object
from .manifest import (
    AITER_BACKWARD_COLUMNS,
    AITER_BACKWARD_FOLDER,
    FORWARD_COLUMNS,
    FORWARD_MANIFEST,
    READY_BACKWARD_COLUMNS,
    READY_BACKWARD_MANIFEST,
    AiterBackwardRow,
    AiterKind,
    AnyRow,
    KernelRow,
    Manifest,
    ReadyBackwardRow,
    aiter_backward_row,
    distrust,
    forward_row,
    read_manifests,
    ready_backward_row,
)

HSA_DIR, AITER_ASM_DIR = "JITFMHA_HSA_DIR", "AITER_ASM_DIR"
# Without these kinds of AITER's backward kernels there is nothing to serve.
_NEEDED: tuple[AiterKind, ...] = ("odo", "dqdkdv")


class Tree:
    """The kernels of one tree for one chip; a manifest is read when it is first asked for.

    Attributes:
        origin: how a message names the tree.
        folder: of the architecture.
        is_shipped: whether it is a part of this package, and so as safe as that.
    """

    def __init__(self, origin: str, folder: Path, chip: Chip, *, is_shipped: bool = False) -> None:
        self.origin = origin
        self.folder = folder
        self.chip = chip
        self.is_shipped = is_shipped
        self._warned_of: set[str] = set()
        self._code_objects: dict[AnyRow, CodeObject | CodeObjectError] = {}

    def __str__(self) -> str:
        return self.origin

    @property
    def arch(self) -> Arch:
        return self.chip.architecture.name

    @cached_property
    def forward(self) -> Manifest[KernelRow]:
        path = self.folder / FORWARD_MANIFEST
        others = AITER_BACKWARD_FOLDER, READY_BACKWARD_MANIFEST.parent
        # A tree may have backward kernels only.
        has_others = any(os.path.isdir(self.folder / other) for other in others)
        paths = () if has_others and not os.path.exists(path) else (path,)
        row_of = dict.fromkeys(paths, partial(forward_row, chip=self.chip))
        return read_manifests(self.origin, FORWARD_COLUMNS, row_of, is_trusted=self.is_shipped)

    @cached_property
    def aiter_backward(self) -> Manifest[AiterBackwardRow]:
        """AITER's backward kernels of all kinds, in the order of their manifests."""
        folder = self.folder / AITER_BACKWARD_FOLDER
        paths = {folder / f"fmha_bwd_{kind}.csv": kind for kind in get_args(AiterKind)}
        row_of = {
            path: partial(aiter_backward_row, kind=kind)
            for path, kind in paths.items()
            if os.path.isdir(folder) and (kind in _NEEDED or os.path.exists(path))
        }
        columns = AITER_BACKWARD_COLUMNS
        return read_manifests(self.origin, columns, row_of, is_trusted=self.is_shipped)

    @cached_property
    def ready_backward(self) -> Manifest[ReadyBackwardRow]:
        """Our code objects for backward passes; more keys come first where there is a choice."""
        path = self.folder / READY_BACKWARD_MANIFEST
        row_of = {path: ready_backward_row} if os.path.exists(path) else {}
        columns = READY_BACKWARD_COLUMNS
        return read_manifests(self.origin, columns, row_of, is_trusted=self.is_shipped)

    @property
    def manifests(self) -> tuple[Manifest[Any], ...]:
        return self.forward, self.aiter_backward, self.ready_backward

    def path_of(self, row: AnyRow) -> Path:
        return self.folder / row.folder / row.file

    def code_object(self, row: AnyRow) -> CodeObject | CodeObjectError:
        """The code object of a row, read and checked once, or why it must not be loaded.

        The latter is warned of.
        """
        found = self._code_objects.get(row)
        if found is None:
            path = self.path_of(row)
            try:
                reason = None if self.is_shipped else distrust(path)
                if reason:
                    raise CodeObjectError(f"{path} is not used: {reason}")
                found = read_code_object(
                    path,
                    arch=self.arch,
                    kernels=row.kernels,
                    kernarg_bytes=row.arguments.size,
                    sha256=row.sha256,
                )
            except CodeObjectError as error:
                found = error
                self._warn_of(f"{self}: {error}")
            self._code_objects[row] = found
        return found

    def warn_of(self, manifest: Manifest[Any]) -> None:
        for oddity in manifest.oddities:
            self._warn_of(oddity)

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
                trees.append(Tree(f"{variable}={given}", folder, chip))
        elif variable == HSA_DIR:
            own = default_user_tree()
            if own is not None and os.path.isdir(own / arch):
                trees.append(Tree(f"your tree {own}", own / arch, chip))
    shipped = hsa_dir() / arch
    if (shipped / FORWARD_MANIFEST).is_file():
        trees.append(Tree("the kernels of this package", shipped, chip, is_shipped=True))
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
    if exists(given / FORWARD_MANIFEST) and not exists(given / arch):
        return given
    if not exists(given / arch) and any(exists(given / other) for other in get_args(Arch)):
        return None
    return given / arch
