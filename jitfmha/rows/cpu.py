"""Kernels of rows for the CPU: a C++ template for each direction, compiled for a call's traits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache

from ..jit.render import render
from ..jit.spec import BuildSpec
from ..kernels.cpu import BESIDE_TILE_UNIT, kernel_build, load_entry
from ..planning.target import CpuIsa
from ..problem.problem import Direction
from .problem import MOST_COLUMNS, RowTraits
from .structs import CALLS, TEMPLATES

_HEADERS = (
    *("eight_bits", "elements", "exponent", "intrinsics", "library", "rows", "simd", "threads"),
)


def spec_of_rows(
    template: str,
    traits: str,
    isa: CpuIsa,
    values: Mapping[str, object],
    of_rows: Mapping[str, object],
    flag: str,
    why: str,
) -> BuildSpec:
    """The sources and the flags of a kernel, by what its traits are called.

    The template takes ``values``, and ``rows_traits.h.in`` those ``of_rows``.
    """
    isa = BESIDE_TILE_UNIT.get(isa, isa)
    sources = {"traits.h": render("cpu/rows_traits.h.in", of_rows)}
    name = f"cpu_{template}_{traits}_{isa}"
    return kernel_build(template, name, isa, values, _HEADERS, sources, (flag,), why)


def cpu_spec(traits: RowTraits, direction: Direction, isa: CpuIsa) -> BuildSpec:
    """The sources and the flags of a kernel."""
    of_rows = {
        **traits._asdict(),
        "direction": direction,
        "most_columns": MOST_COLUMNS,
        "shared_structs": CALLS[direction].cpp(),
    }
    why = f"the first {direction} {traits.kind} of {traits.dtype} rows"
    of_kernel = TEMPLATES[direction], traits.name, isa
    return spec_of_rows(*of_kernel, {}, of_rows, "-fno-math-errno", why)


@cache
def cpu_entry(traits: RowTraits, direction: Direction, isa: CpuIsa) -> Callable[[bytes], int]:
    """The function that runs a kernel, which takes the packed struct of its call."""
    return load_entry(cpu_spec(traits, direction, isa), "jitfmha_rows", ctypes.c_char_p)
