"""The kernel of heads for the CPU, compiled for a call's traits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from ...jit.shared_struct import cpp_of
from ...kernels.cpu import load_entry
from ...planning.target import CpuIsa
from ..cpu import spec_of_rows
from ..problem import RowTraits
from .problem import MOST_HDIM, STRUCTS, HeadTraits


@cache
def cpu_entry(traits: HeadTraits, isa: CpuIsa) -> Callable[[bytes, object], int]:
    """The function that runs a kernel: of the packed struct, and where it tells a number."""
    values = {
        "table_dtype": traits.table_dtype,
        "is_interleaved": traits.is_interleaved,
        "is_packed": traits.is_packed,
        "most_hdim": MOST_HDIM,
    }
    dtypes = traits.dtype, traits.weight_dtype, traits.cache_dtype
    of_rows = {
        **RowTraits("rms_norm", *dtypes, False, False, False)._asdict(),
        "direction": "forward",
        "most_columns": MOST_HDIM,
        "shared_structs": cpp_of(STRUCTS),
    }
    why = f"the first call over heads of {traits.dtype}"
    # Its loops over pairs are left to the compiler.
    spec = spec_of_rows("heads", traits.name, isa, values, of_rows, "-O3", why)
    return load_entry(spec, "jitfmha_heads", ctypes.c_char_p, ctypes.c_void_p)
