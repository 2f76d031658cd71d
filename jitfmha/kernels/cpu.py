"""The CPU family: one C++ template, compiled for exactly a call's traits.

The launcher and the kernel are one shared library here. It runs on torch's own thread pool and is
called through ctypes, so that it needs neither torch's nor Python's headers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from .. import jit
from ..problem import Problem, Strides
from ..target import CpuIsa, CpuTarget, Target

NAME = "cpu"

_TEMPLATE = "cpu/fmha_fwd.cpp.in"
_X86_AVX512 = (
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
)
_ISA_FLAGS: dict[CpuIsa, tuple[str, ...]] = {
    "avx512_bf16": (*_X86_AVX512, "-mavx512bf16"),
    "avx512": _X86_AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": (),
    "generic": (),
}
_ISA_HEADERS: dict[CpuIsa, str] = {
    "avx512_bf16": "cpu/simd_avx512.h",
    "avx512": "cpu/simd_avx512.h",
    "avx2": "cpu/simd_avx2.h",
    "neon": "cpu/simd_neon.h",
    "generic": "cpu/simd_generic.h",
}
_OPEN_SIDE = 1 << 40  # a window side that no sequence reaches


def reasons_not(problem: Problem, target: Target) -> list[str]:
    """Why the CPU kernel does not serve ``problem``: tensors elsewhere, or in fp8."""
    if not isinstance(target, CpuTarget):
        return [f"It needs tensors on the CPU; the target is {target}."]
    if problem.is_fp8:
        return [f"It computes in fp32, bf16 and fp16; the inputs are {problem.dtype}."]
    return []


def remarks(problem: Problem, target: Target) -> list[str]:
    """There is one kernel for each problem, and nothing odd about it."""
    return []


def plan(problem: Problem, target: Target) -> CpuPlan:
    """The kernel for ``problem``."""
    assert isinstance(target, CpuTarget)
    return CpuPlan(
        problem,
        CpuTraits(
            dtype=problem.dtype,
            hdim_q=problem.hdim_q,
            hdim_v=problem.hdim_v,
            masked=not problem.mask.is_none,
            mode=problem.mode,
            isa=target.isa,
        ),
    )


@dataclass(frozen=True)
class CpuTraits:
    """Everything that a CPU kernel is specialised on."""

    dtype: str
    hdim_q: int
    hdim_v: int
    masked: bool
    mode: str
    isa: CpuIsa

    @property
    def name(self) -> str:
        """The kernel's name."""
        return (
            f"cpu_fwd_{self.dtype}_{self.hdim_q}x{self.hdim_v}_{self.mask}_{self.mode}_{self.isa}"
        )

    @property
    def mask(self) -> str:
        """The mask kind that the template knows."""
        return "window" if self.masked else "none"


@lru_cache(maxsize=256)
def launcher_spec(traits: CpuTraits) -> jit.BuildSpec:
    """The source and the flags of the launcher for ``traits``."""
    values = {
        "origin": f"csrc_templates/{_TEMPLATE} for {traits.name}",
        "dtype": traits.dtype,
        "hdim_q": traits.hdim_q,
        "hdim_v": traits.hdim_v,
        "mask": traits.mask,
        "mode": traits.mode,
    }
    return jit.BuildSpec(
        name=traits.name,
        sources={
            "fmha_fwd.cpp": jit.render(_TEMPLATE, values),
            "simd.h": jit.render(_ISA_HEADERS[traits.isa], {}),
        },
        cflags=(
            "-std=c++17",
            "-O3",
            "-ffp-contract=fast",
            "-fvisibility=hidden",
            *_ISA_FLAGS[traits.isa],
        ),
        ldflags=(),
        why=(
            f"the first {traits.dtype} call in {traits.mode} with hdim "
            f"{traits.hdim_q}x{traits.hdim_v} and mask {traits.mask}"
        ),
    )


@dataclass(frozen=True)
class CpuPlan:
    """The CPU kernel for one problem."""

    problem: Problem
    traits: CpuTraits
    family: str = NAME

    @property
    def kernel(self) -> str:
        """The name of the kernel and of its cache entry."""
        return self.traits.name

    @property
    def is_built(self) -> bool:
        """True when the launcher is in the cache already."""
        return jit.is_built(launcher_spec(self.traits))

    @property
    def source(self) -> str:
        """The template."""
        return f"csrc_templates/{_TEMPLATE}"

    def bind(self) -> CpuLaunch:
        """Build and load the launcher where needed."""
        return CpuLaunch(_entry(self.traits), self.problem)


class CpuLaunch:
    """The loaded kernel with the constants of one problem."""

    __slots__ = ("_entry", "_shape", "_shape_address")

    def __init__(self, entry: Callable[..., int], problem: Problem) -> None:
        self._entry = entry
        self._shape = _fmha_shape(problem)
        self._shape_address = ctypes.addressof(self._shape)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        cu_seqlens: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        max_seqlen_q: int | None,
        descales: tuple[Tensor | None, Tensor | None, Tensor | None] | None,
    ) -> None:
        """Run the kernel; returns when ``out`` and ``lse`` are written."""
        lse_address = None if lse is None else lse.data_ptr()
        tensors = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address)
        if cu_seqlens is None:
            status = self._entry(self._shape_address, *tensors)
        else:
            ends = [x.data_ptr() for x in cu_seqlens]
            status = self._entry(self._shape_address, *tensors, *ends)
        if status != 0:
            raise MemoryError("the CPU kernel could not allocate its scratch memory")


@cache
def _entry(traits: CpuTraits) -> Callable[..., int]:
    function = getattr(jit.load(launcher_spec(traits)), f"jitfmha_fwd_{traits.mode}")
    function.argtypes = [ctypes.c_void_p] * (6 if traits.mode == "gm0" else 10)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


class _FmhaShape(ctypes.Structure):
    """``FmhaShape`` of the template: strides in elements, all integers 64 bits wide."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads_q", "heads_k")),
        *((name, ctypes.c_int64) for name in ("seqlen_q", "seqlen_k")),
        *(
            (f"{tensor}_{dimension}", ctypes.c_int64)
            for tensor in ("q", "k", "v", "o", "lse")
            for dimension in ("batch", "seq", "head")
        ),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("bottom_right", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    ]


def _fmha_shape(problem: Problem) -> _FmhaShape:
    mask = problem.mask
    lse = Strides(
        batch=problem.heads_q * problem.seqlen_q if problem.mode == "gm0" else 0,
        seq=1,
        head=problem.seqlen_q,
    )
    values: dict[str, Any] = {
        f"{tensor}_{dimension}": getattr(strides, dimension)
        for tensor, strides in (
            ("q", problem.q),
            ("k", problem.k),
            ("v", problem.v),
            ("o", problem.out),
            ("lse", lse),
        )
        for dimension in ("batch", "seq", "head")
    }
    return _FmhaShape(
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_k=problem.heads_k,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        **values,
        window_left=_OPEN_SIDE if mask.left is None else min(mask.left, _OPEN_SIDE),
        window_right=_OPEN_SIDE if mask.right is None else min(mask.right, _OPEN_SIDE),
        bottom_right=not mask.top_left,
        softmax_scale=problem.softmax_scale,
    )
