"""Rows transposed to pairs for tile units, in the vectors that these are compiled beside."""

import ctypes

import pytest
import torch
from header_library import header_library

from jitfmha.planning.target import CpuIsa, cpu_isas_here

HDIMS = (6, 31, 32, 33, 40, 48, 72, 80, 128)
BLOCK, PAIRS = 32, 33  # keys that are staged at least, and the stride of an element's pairs
SOURCE = """
#include "transposed_pairs.h"
"""
FUNCTION = """
JITFMHA_EXPORT void stage_@DTYPE_@HDIM(const @DTYPE::Element* rows, long stride, int count,
                                       float* to) {
  stage_transposed_pairs<@DTYPE, @HDIM, @PAIRS, @BLOCK>(rows_from(rows, stride), count, to);
}
"""
DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3fn": torch.float8_e4m3fn}


def library(isa: CpuIsa) -> ctypes.CDLL:
    sizes = {"@PAIRS": str(PAIRS), "@BLOCK": str(BLOCK)}
    source = SOURCE
    for dtype in DTYPES:
        for hdim in HDIMS:
            function = FUNCTION
            for name, value in {"@DTYPE": dtype, "@HDIM": str(hdim), **sizes}.items():
                function = function.replace(name, value)
            source += function
    return header_library("transposed_pairs", source, "bf16", isa)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ["amx", "amx_emulated"])
def test_rows_become_pairs(rng, isa, dtype):
    # No instruction of AMX is in it.
    if isa == "amx" and "avx512_bf16" not in cpu_isas_here():
        pytest.skip("there is no AVX512_BF16")
    functions = library(isa)
    for hdim in HDIMS:
        for count in (1, 2, 31, 32, 33, 64):
            rows = torch.randn(count, hdim + 3, generator=rng).to(DTYPES[dtype])
            staged = torch.full((hdim + 1, PAIRS), torch.nan)
            getattr(functions, f"stage_{dtype}_{hdim}")(
                ctypes.c_void_p(rows.data_ptr()),
                ctypes.c_long(rows.stride(0)),
                count,
                ctypes.c_void_p(staged.data_ptr()),
            )
            keys = -(-count // BLOCK) * BLOCK
            expected = torch.zeros(hdim, keys, dtype=torch.bfloat16)
            expected[:, :count] = rows[:, :hdim].to(torch.bfloat16).T
            pairs = staged[:hdim, : keys // 2].contiguous().view(torch.bfloat16)
            assert torch.equal(pairs, expected), (hdim, count)
            assert staged[:, keys // 2 :].isnan().all()
            assert staged[hdim].isnan().all()
