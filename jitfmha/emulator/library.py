"""Builds the emulator on first use and loads it, in three variants: plain, check, profile."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Literal

from .. import jit
from ..resources import templates_dir
from ..target import CpuIsa, cpu_target

Variant = Literal["plain", "check", "profile"]

_FOLDER = "emulator"
_SUFFIXES = (".cpp", ".h", ".inc")
_CFLAGS = (
    "-std=c++17",
    "-O2",
    # -O2 alone vectorises only what cannot be slower.
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fPIC",
    "-fvisibility=hidden",
    # A lane of a register is read as whatever type the instruction says.
    "-fno-strict-aliasing",
    # An instruction rounds exactly where the ISA says.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)
_AVX512 = (
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
)
_ISA_FLAGS: dict[CpuIsa, tuple[str, ...]] = {
    "avx512_bf16": _AVX512,
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": (),
    "generic": (),
}
_VARIANT_FLAGS: dict[Variant, tuple[str, ...]] = {
    "plain": (),
    "check": ("-DJITFMHA_EMULATOR_CHECK=1",),
    "profile": ("-DJITFMHA_EMULATOR_PROFILE=1",),
}


@cache
def launcher_spec(variant: Variant) -> jit.BuildSpec:
    """The sources and flags of one variant."""
    isa = cpu_target().isa
    folder = templates_dir() / _FOLDER
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in _SUFFIXES
    )
    return jit.BuildSpec(
        name=f"emulator_{variant}_{isa}",
        sources={name: jit.render(f"{_FOLDER}/{name}", {}) for name in names},
        cflags=(*_CFLAGS, *_ISA_FLAGS[isa], *_VARIANT_FLAGS[variant]),
        ldflags=("-pthread",),
        why=f"the first use of the emulator ({variant})",
    )


@cache
def load(variant: Variant = "plain") -> ctypes.CDLL:
    """The loaded library, built where the cache lacks it (about half a minute)."""
    return jit.load(launcher_spec(variant))
