"""The kernel of heads for the CPU, compiled for a call's traits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from ...jit.render import render
from ...jit.shared_struct import HOST
from ...jit.spec import MAX_NAME, BuildSpec
from ...kernels.cpu import BESIDE_TILE_UNIT, CFLAGS, ISAS, load_kernel
from ...planning.target import CpuIsa
from .problem import MOST_HDIM, HeadTraits
from .structs import cpp

_HEADERS = ("eight_bits", "elements", "exponent", "intrinsics", "rows", "simd", "threads")


@cache
def cpu_spec(traits: HeadTraits, isa: CpuIsa) -> BuildSpec:
    """The sources and the flags of a kernel."""
    isa = BESIDE_TILE_UNIT.get(isa, isa)
    vectors, flags = ISAS[isa]
    name = f"cpu_heads_{traits.name}_{isa}"
    values = {
        "origin": f"csrc_templates/cpu/heads.cpp.in for {name}",
        "table_dtype": traits.table_dtype,
        "is_interleaved": str(traits.is_interleaved).lower(),
        "is_packed": str(traits.is_packed).lower(),
        "most_hdim": MOST_HDIM,
    }
    of_rows = {
        "dtype": traits.dtype,
        "weight_dtype": traits.weight_dtype,
        "out_dtype": traits.cache_dtype,
        "kind": "rms_norm",
        "direction": "forward",
        **dict.fromkeys(("has_weight", "has_bias", "has_residual"), "false"),
        "most_columns": MOST_HDIM,
        "shared_structs": cpp(HOST),
    }
    return BuildSpec(
        name=name[:MAX_NAME],
        sources={
            "heads.cpp": render("cpu/heads.cpp.in", values),
            "traits.h": render("cpu/rows_traits.h.in", of_rows),
            "vectors.h": render(f"cpu/simd_{vectors}.h", {}),
            **{f"{header}.h": render(f"cpu/{header}.h", {}) for header in _HEADERS},
        },
        # Its loops over pairs are left to the compiler.
        cflags=(*CFLAGS, *flags, "-O3"),
        why=f"the first call over heads of {traits.dtype}",
    )


@cache
def cpu_entry(traits: HeadTraits, isa: CpuIsa) -> Callable[[bytes, object], int]:
    """The function that runs a kernel: of the packed struct, and where it tells a number."""
    function: Callable[[bytes, object], int] = load_kernel(cpu_spec(traits, isa)).jitfmha_heads
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
