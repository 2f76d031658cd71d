"""Which kernels a library gets: those that come ready, and compiled backward passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .. import jit
from ..ahead.combination import Combination
from ..amd.chips import Arch, architecture, chip
from ..amd.code_object import CodeObjectError
from ..amd.manifest import AnyRow, KernelRow
from ..amd.tree import Tree, trees_of
from ..kernels.compiled.backward_launch import BackwardKernel
from ..kernels.compiled.backward_traits import BackwardTraits, backward_spec
from ..kernels.compiled.rules import RULES
from ..kernels.compiled.traits import far_stride_bytes
from ..kernels.ready.backward.kernels import kernels_of
from ..kernels.ready.backward.limits import FAR_STRIDE_BYTES
from ..kernels.rules import reasons_of
from ..problem.arguments import Bf16Cvt
from ..problem.mask import CAUSAL_MASK, NO_MASK
from ..problem.problem import BF16_CVTS, Direction, Mode

DTYPES = ("bf16", "fp16", "fp8")
"""What exported calls take: of fp8 forward calls, in the form that the chip has."""
MASKS = {"none": NO_MASK, "causal": CAUSAL_MASK}
"""Kernels with a mask take both corners, but for those of forward with a tile, which have one."""
_MODES: tuple[Mode, ...] = ("gm0", "gm1")
_DTYPES_OF_BACKWARD = ("bf16", "fp16")
_HDIMS_OF_COMPILED = ((64, 64), (128, 128))
_CVTS_OF_COMPILED: tuple[Bf16Cvt, ...] = ("rtne",)


class Selection(NamedTuple):
    """Which kernels are exported.

    Attributes:
        hdims: of q and k, and of v. None: all that come ready, and of compiled kernels 64 and 128.
        bf16_cvts: where there is a choice. None: all that come ready, and of compiled kernels rtne.
    """

    arches: tuple[Arch, ...]
    directions: tuple[Direction, ...] = ("forward", "backward")
    dtypes: tuple[str, ...] = DTYPES
    hdims: tuple[tuple[int, int], ...] | None = None
    masks: tuple[str, ...] = tuple(MASKS)
    modes: tuple[Mode, ...] = _MODES
    bf16_cvts: tuple[Bf16Cvt, ...] | None = None


class ForwardKernel(NamedTuple):
    """A row of a manifest and its code object."""

    arch: Arch
    row: KernelRow
    image: bytes

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def has_roundings(self) -> bool:
        return architecture(self.arch).has_roundings(self.row.dtype)


class BackwardKernels(NamedTuple):
    """The kernels of a backward pass, in the order of their launches.

    Attributes:
        row: of the one that the pass is named after.
        has_roundings: whether ``bf16_cvt`` makes a difference.
        adds_dq_up: whether dq is added up in float32, by all workgroups together.
        is_deterministic: whether its order is always one.
        far_stride_bytes: from where on rows are too far apart.
    """

    arch: Arch
    row: KernelRow
    has_roundings: bool
    adds_dq_up: bool
    is_deterministic: bool
    far_stride_bytes: int
    name: str
    kernels: tuple[BackwardKernel, ...]
    image: bytes


def forward_kernels(selection: Selection) -> Iterator[ForwardKernel]:
    """Choose the kernels that come ready and serve what is selected.

    Raises ``CodeObjectError`` for a file that is not what its manifest says.
    """
    if "forward" not in selection.directions:
        return
    for arch in selection.arches:
        for tree in _shipped_trees(arch):
            for row in tree.forward.rows:
                if _is_selected(row, arch, selection):
                    yield ForwardKernel(arch, row, _image(tree, row))


def ready_backward_kernels(selection: Selection) -> Iterator[BackwardKernels]:
    """The backward passes that come ready, and serve what is selected.

    Raises ``CodeObjectError`` for a file that is not what its manifest says.
    """
    if "backward" not in selection.directions:
        return
    for arch in selection.arches:
        found = ((tree, row) for tree in _shipped_trees(arch) for row in tree.ready_backward.rows)
        for tree, listed in found:
            kernels = kernels_of(listed)
            row = next(kernel.row for kernel in kernels if kernel.row.symbol == listed.symbol)
            if not _is_selected(row, arch, selection):
                continue
            yield BackwardKernels(
                arch=arch,
                row=row,
                has_roundings=architecture(arch).has_roundings(row.dtype),
                adds_dq_up=True,
                is_deterministic=listed.is_deterministic,
                far_stride_bytes=FAR_STRIDE_BYTES,
                name=row.name,
                kernels=kernels,
                image=_image(tree, listed),
            )


def _shipped_trees(arch: Arch) -> list[Tree]:
    return [x for x in trees_of(chip(architecture(arch).unlisted_chip)) if x.is_shipped]


def _image(tree: Tree, row: AnyRow) -> bytes:
    code_object = tree.code_object(row)
    if isinstance(code_object, CodeObjectError):
        raise code_object
    return code_object.image


def _is_selected(row: KernelRow, arch: Arch, selection: Selection) -> bool:
    hdims, cvts = selection.hdims, selection.bf16_cvts
    has_choice = cvts is not None and architecture(arch).has_roundings(row.dtype)
    return (
        ("fp8" if row.dtype == "fp8bf16" else row.dtype) in selection.dtypes
        and (hdims is None or (row.hdim_q, row.hdim_v) in hdims)
        and ("causal" if row.mask else "none") in selection.masks
        and _MODES[row.mode] in selection.modes
        and (not has_choice or BF16_CVTS[row.bf16_cvt] in (cvts or ()))
    )


def backward_passes(selection: Selection) -> tuple[BackwardTraits, ...]:
    """What is compiled for the backward passes that are selected, each once.

    Raises ``NotImplementedError`` for one that no kernel serves.
    """
    if "backward" not in selection.directions:
        return ()
    passes: dict[BackwardTraits, None] = {}
    for arch, dtype, (hdim_q, hdim_v), mask, mode, cvt in itertools.product(
        selection.arches,
        [dtype for dtype in _DTYPES_OF_BACKWARD if dtype in selection.dtypes],
        selection.hdims or _HDIMS_OF_COMPILED,
        selection.masks,
        selection.modes,
        selection.bf16_cvts or _CVTS_OF_COMPILED,
    ):
        wanted = Combination(dtype, dtype, hdim_q, hdim_v, MASKS[mask], mode, "backward")
        problem = wanted.problem()._replace(bf16_cvt=cvt)
        for reason in reasons_of(RULES, problem, arch):
            raise NotImplementedError(str(reason))
        passes[BackwardTraits.of(problem, arch)] = None
    return tuple(passes)


def compiled(traits: BackwardTraits) -> BackwardKernels:
    """A backward pass's kernels, from the build cache or compiled.

    Raises ``jitfmha.BuildError`` where they cannot be.
    """
    kernels = traits.kernels()
    return BackwardKernels(
        arch=traits.arch,
        row=kernels[0].row,
        has_roundings=architecture(traits.arch).has_roundings(traits.dtype),
        adds_dq_up=False,
        is_deterministic=True,
        far_stride_bytes=far_stride_bytes(traits.tile),
        name=traits.name,
        kernels=kernels,
        image=jit.read(backward_spec(traits)),
    )
