"""8-bit elements become operands of the CPU kernel's products as torch converts them.

Every code of every format, in every instruction set that this processor has.
"""

import ctypes

import pytest
import torch
from header_library import header_library

from jitfmha.kernels.cpu import BESIDE_TILE_UNIT
from jitfmha.planning.target import CpuIsa

DTYPES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "bf8_e5m2": torch.float8_e5m2,
    "bf8_e5m2fnuz": torch.float8_e5m2fnuz,
    "int8": torch.int8,
}
CODES = 256
# An operand is one element as a float, or two of them as bf16.
SOURCE = """
#include "elements.h"

template <class D>
void convert(const void* from, float* floats, float* along_row, float* down_columns) {
  const auto* codes = static_cast<const typename D::Element*>(from);
  for (int i = 0; i < @CODES; i += kLanes) simd::store(floats + i, D::load(codes + i));
  for (int i = 0; i < @CODES; i += kLanes * kOperandElements) {
    simd::store(along_row, Operands::load_along_row<D>(codes + i));
    const typename D::Element* rows[kOperandElements];
    for (int r = 0; r < kOperandElements; ++r) rows[r] = codes + i + r * kLanes;
    simd::store(down_columns, Operands::load_down_columns<D>(rows));
    along_row += kLanes, down_columns += kLanes;
  }
}

JITFMHA_EXPORT int operand_elements() { return kOperandElements; }
JITFMHA_EXPORT int lanes() { return kLanes; }
"""
FUNCTION = """
JITFMHA_EXPORT void convert_@DTYPE(const void* from, float* floats, float* along_row,
                                   float* down_columns) {
  convert<@DTYPE>(from, floats, along_row, down_columns);
}
"""


def library(isa: CpuIsa) -> ctypes.CDLL:
    """The conversions that are in the headers of a kernel."""
    source = SOURCE.replace("@CODES", str(CODES))
    source += "".join(FUNCTION.replace("@DTYPE", name) for name in DTYPES)
    return header_library("elements", source, "fp8_e4m3fn", BESIDE_TILE_UNIT.get(isa, isa))


def as_floats(operands: torch.Tensor, elements: int) -> torch.Tensor:
    return operands if elements == 1 else operands.view(torch.bfloat16).float()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(isa, dtype):
    conversions = library(isa)
    elements, lanes = conversions.operand_elements(), conversions.lanes()
    # In another order each time: a code must not depend on its neighbours.
    for shift in (0, 1, 37):
        codes = torch.arange(CODES).add(shift).mul(5).to(torch.uint8)
        floats, along_row, down_columns = torch.full((3, CODES), -77.0).unbind()
        getattr(conversions, f"convert_{dtype}")(
            *(ctypes.c_void_p(x.data_ptr()) for x in (codes, floats, along_row, down_columns))
        )
        expected = codes.view(DTYPES[dtype]).float()
        used = CODES // elements
        along_row, down_columns = along_row[:used], down_columns[:used]
        # What lies down the columns are the rows' elements with the same number side by side.
        rows = as_floats(down_columns.clone(), elements).view(-1, lanes, elements)
        for actual in (floats, as_floats(along_row.clone(), elements), rows.mT.flatten()):
            torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)
            is_number = ~expected.isnan()
            assert torch.equal(actual.signbit()[is_number], expected.signbit()[is_number])
