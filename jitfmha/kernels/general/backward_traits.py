"""What the kernels of a general backward pass are compiled for, and the build that makes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from ... import jit
from ...amd.kernel_arguments import backward_structs
from ...amd.manifest import KernelRow
from ...chips import Arch
from ...problem import Problem
from .device_spec import device_spec
from .traits import FAR_STRIDE_BYTES, Access, GeneralModifiers, SharedTraits, has_roundings

Rows = Literal["q", "k"]
"""Whose rows the workgroups of a kernel have."""

_TEMPLATE = "general_bwd.hip"
_HEADERS = (
    *("dropout.h", "elements.h", "gradients.h", "half_waves.h"),
    *("row_tiles.h", "score_pairs.h", "scores.h"),
)
ELEMENT_BYTES = 2  # of all tensors
# Up to here the operands and sums of dk and dv together fit into a wave's registers.
_MOST_HDIMS_TOGETHER = 320


@dataclass(frozen=True)
class BackwardTraits(SharedTraits):
    """Everything that the kernels of a backward pass are specialised on.

    The sink is none of the modifiers, as it is in the lse. Rows are "near" or "far".
    """

    @classmethod
    def of(cls, problem: Problem, arch: Arch) -> BackwardTraits:
        """What a problem asks for."""
        return cls(
            arch=arch,
            dtype=problem.dtype,
            hdim_q=problem.hdim_q,
            hdim_v=problem.hdim_v,
            mode=problem.mode,
            bf16_cvt=problem.bf16_cvt if has_roundings(arch, problem.dtype) else "rtne",
            is_masked=not problem.mask.is_none,
            access=_access_of(problem),
            modifiers=GeneralModifiers.of(problem._replace(has_sink=False)),
        )

    @property
    def name(self) -> str:
        """What the kernels' symbols begin with."""
        words = (
            f"fmha_bwd_general_hd{self.hdim_q}x{self.hdim_v}_{self.dtype}",
            self.bf16_cvt if has_roundings(self.arch, self.dtype) else "",
            "window" if self.is_masked else "",
            *self.modifiers.words(),
            "" if self.access == "near" else self.access,
            self.mode,
            self.arch,
        )
        return "_".join(word for word in words if word)

    @property
    def makes_dk_with_dv(self) -> bool:
        """Whether one kernel makes both, or each has its own."""
        return _rounded_up(self.hdim_q) + _rounded_up(self.hdim_v) <= _MOST_HDIMS_TOGETHER

    def kernels(self) -> tuple[tuple[str, Rows], ...]:
        """Symbols in the order of their launches, and whose rows each has."""
        of_keys = ("dk_and_dv",) if self.makes_dk_with_dv else ("dk", "dv")
        return ((f"{self.name}_dq", "q"), *((f"{self.name}_{each}", "k") for each in of_keys))

    def row(self, symbol: str) -> KernelRow:
        """One of the kernels as a row of a manifest, as the launcher knows kernels."""
        return self.row_of(symbol, f"{self.name}.co")


def _rounded_up(hdim: int) -> int:
    """To what operands and sums take registers for."""
    return -(-hdim // 32) * 32


def _access_of(problem: Problem) -> Access:
    """How rows are reached; far ones are more than a buffer's offsets apart."""
    gradients = problem.gradients
    assert gradients is not None
    dout = gradients.dout[-3] if problem.seqlen_q > 1 else 0
    strides = problem.q.seq, problem.k.seq, problem.v.seq, dout
    return "far" if max(strides) * ELEMENT_BYTES >= FAR_STRIDE_BYTES else "near"


@cache
def backward_spec(traits: BackwardTraits) -> jit.BuildSpec:
    """The sources and the flags of the kernels."""
    values = {
        "shared_structs": backward_structs(),
        "kernel": traits.name,
        "makes_dk_with_dv": int(traits.makes_dk_with_dv),
        "dtype": traits.dtype.upper(),
        **traits.template_values(),
        **{name: x for name, x in traits.modifiers.values().items() if name != "sink"},
    }
    why = traits.why_built("backward pass")
    return device_spec(traits.name, traits.arch, _TEMPLATE, values, _HEADERS, why)
