"""Which kernels a library gets: rows of the shipped manifests, and compiled backward passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .. import jit
from ..amd.code_object import CodeObjectError
from ..amd.manifest import KernelRow, trees_of
from ..arguments import Bf16Cvt
from ..chips import Arch, architecture, chip
from ..combination import Combination
from ..kernels.general.backward_traits import BackwardTraits, Rows, backward_spec
from ..kernels.general.rules import RULES
from ..kernels.general.traits import far_stride_bytes, has_roundings
from ..kernels.rules import reasons_of
from ..kernels.tuned.policy import has_conversions
from ..mask import CAUSAL_MASK, NO_MASK
from ..problem import BF16_CVTS, Direction, Mode

DTYPES = ("bf16", "fp16")
"""What exported calls take. Those of 8 bits have scales, which the calls do not take."""
MASKS = {"none": NO_MASK, "causal": CAUSAL_MASK}
"""Kernels with a mask take both corners, but for those of forward with a tile, which have one."""
_MODES: tuple[Mode, ...] = ("gm0", "gm1")
_HDIMS_OF_BACKWARD = ((64, 64), (128, 128))
_CVTS_OF_BACKWARD: tuple[Bf16Cvt, ...] = ("rtne",)


class Selection(NamedTuple):
    """Which kernels are exported.

    Attributes:
        hdims: of q and k, and of v. None: all that come ready in forward, 64 and 128 in backward.
        bf16_cvts: where there is a choice. None: all that come ready in forward, rtne in backward.
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


class BackwardKernels(NamedTuple):
    """The kernels of a backward pass: symbols in order, and whose rows each has."""

    arch: Arch
    row: KernelRow
    has_roundings: bool
    far_stride_bytes: int
    name: str
    symbols: tuple[tuple[str, Rows], ...]
    image: bytes


def forward_kernels(selection: Selection) -> Iterator[ForwardKernel]:
    """Those that come ready, and serve what is selected.

    Raises ``CodeObjectError`` for a file that is not what its manifest says.
    """
    if "forward" not in selection.directions:
        return
    for arch in selection.arches:
        trees = trees_of(chip(architecture(arch).unlisted_chip))
        for tree in trees:
            for row in tree.rows if tree.is_shipped else ():
                if not _is_selected(row, arch, selection):
                    continue
                code_object = tree.code_object(row)
                if isinstance(code_object, CodeObjectError):
                    raise code_object
                yield ForwardKernel(arch, row, code_object.image)


def _is_selected(row: KernelRow, arch: Arch, selection: Selection) -> bool:
    hdims, cvts = selection.hdims, selection.bf16_cvts
    has_choice = cvts is not None and has_conversions(row.dtype, arch)
    return (
        row.dtype in selection.dtypes
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
        selection.dtypes,
        selection.hdims or _HDIMS_OF_BACKWARD,
        selection.masks,
        selection.modes,
        selection.bf16_cvts or _CVTS_OF_BACKWARD,
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
    symbols = traits.kernels()
    return BackwardKernels(
        arch=traits.arch,
        row=traits.row(symbols[0][0]),
        has_roundings=has_roundings(traits.arch, traits.dtype),
        far_stride_bytes=far_stride_bytes(traits.tile),
        name=traits.name,
        symbols=symbols,
        image=jit.read(backward_spec(traits)),
    )
