"""What the kernels of a compiled backward pass are compiled for, and the build that makes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ... import jit
from ...amd.chips import Arch
from ...amd.kernel_arguments import backward_structs
from ...problem.dtypes import DTYPE_BYTES
from ...problem.problem import Problem
from ..modifiers import ModifierTraits
from .backward_launch import BackwardKernel, Rows
from .device_spec import device_spec
from .tile_table import KernelPart, Tile
from .tiles import tile_for, tile_table, waves_in_cpp
from .traits import Access, SharedTraits, far_stride_bytes

_TEMPLATE = "compiled_bwd.hip"
_HEADERS = (
    *("dropout.h", "elements.h", "gradients.h"),
    *("row_tiles.h", "score_pairs.h", "scores.h", "streamed_rows.h"),
)
_OF_KEYS: tuple[KernelPart, ...] = ("dk_and_dv", "dk", "dv")
_SLICED: tuple[KernelPart, ...] = ("dq", "dk", "dv")
_WIDEST_ROW_BYTES = 512  # for which registers and LDS have room


@dataclass(frozen=True)
class BackwardTraits(SharedTraits):
    """Everything that the kernels of a backward pass are specialised on.

    The sink is none of the modifiers, as it is in the lse. Rows are "near" or "far".

    Attributes:
        has_column_major_v: whether keys lie side by side in v.
    """

    has_column_major_v: bool = False

    @classmethod
    def of(cls, problem: Problem, arch: Arch) -> BackwardTraits:
        """What a problem asks for; there have to be tiles with room for it."""
        tile = tile_for(arch, "dq", problem.dtype, problem.hdim_q, problem.hdim_v)
        assert tile is not None
        without_sink = problem._replace(modifiers=problem.modifiers._replace(sink=None))
        modifiers = ModifierTraits.of(without_sink, "compiled")
        return cls._of(
            *(problem, arch, _access_of(problem, tile), modifiers),
            has_column_major_v=problem.has_column_major_v,
        )

    @property
    def name(self) -> str:
        return self._name("bwd", ("column_major_v",) if self.has_column_major_v else ())

    @property
    def streams(self) -> bool:
        """Whether rows come from memory whenever a product takes them."""
        return max(self.hdim_q, self.hdim_v) * DTYPE_BYTES[self.dtype] > _WIDEST_ROW_BYTES

    @property
    def tile(self) -> Tile:
        """The shape of the first kernel's work, which is that of the others with sides swapped."""
        tile = self.tile_of("dq")
        assert tile is not None
        return tile

    def tile_of(self, kernel: KernelPart) -> Tile | None:
        """The tile of one of the kernels; None where it has none for these head dimensions."""
        return tile_for(self.arch, kernel, self.dtype, self.hdim_q, self.hdim_v)

    @property
    def makes_dk_with_dv(self) -> bool:
        """Whether one kernel makes both, which it does where it has a tile, or each has its own."""
        return self.tile_of("dk_and_dv") is not None

    def kernels(self) -> tuple[BackwardKernel, ...]:
        of_keys: tuple[KernelPart, ...] = ("dk", "dv")
        if self.makes_dk_with_dv:
            of_keys = ("dk_and_dv",)
        named: tuple[tuple[KernelPart, Rows], ...]
        named = (("dq", "q"), *((each, "k") for each in of_keys))
        return tuple(
            BackwardKernel(
                *(self.row_of(f"{self.name}_{made}"), rows, self.tile.own_rows),
                slices=self.slices_of(made),
            )
            for made, rows in named
        )

    def slices_of(self, kernel: KernelPart) -> int:
        """Slices of the gradient's columns; 1 of a kernel that is not compiled."""
        tile = self.tile_of(kernel)
        return 1 if tile is None else tile.slices


def part_of(symbol: str) -> KernelPart:
    """Which gradients the kernel with such a symbol makes."""
    return next(part for part in ("dq", "dk_and_dv", "dk", "dv") if symbol.endswith(f"_{part}"))


def _access_of(problem: Problem, tile: Tile) -> Access:
    """How rows are reached; far ones are more than a buffer's offsets apart."""
    gradients = problem.gradients
    assert gradients is not None
    dout = gradients.dout[-3] if problem.seqlen_q > 1 else 0
    strides = problem.q.seq, problem.k.seq, problem.v.seq, dout
    return "far" if max(strides) * DTYPE_BYTES[problem.dtype] >= far_stride_bytes(tile) else "near"


def _lds_bytes(traits: BackwardTraits, kernel: KernelPart) -> int:
    """The LDS of a kernel; 0 where it is not compiled."""
    tile = traits.tile_of(kernel)
    return 0 if tile is None else tile.lds_bytes


@cache
def backward_spec(traits: BackwardTraits) -> jit.BuildSpec:
    """The sources and the flags of the kernels."""
    values = {
        "shared_structs": backward_structs(),
        "kernel": traits.name,
        "waves_with_features": waves_in_cpp(traits.arch, "backward", "any"),
        "makes_dk_with_dv": int(traits.makes_dk_with_dv),
        "streams": traits.streams,
        "column_major_v": traits.has_column_major_v,
        **{f"{kernel}_slices": traits.slices_of(kernel) for kernel in _SLICED},
        "dtype": tile_table(traits.arch).elements_of(traits.dtype).products,
        **{f"lds_bytes_of_{kernel}": _lds_bytes(traits, kernel) for kernel in _OF_KEYS},
        **traits.template_values(),
    }
    why = traits.why_built("backward pass")
    return device_spec(
        *(traits.name, traits.arch, _TEMPLATE, values, _HEADERS, why), streams=traits.streams
    )
