"""The data types of attention, and the names that kernels and manifests have for them."""

from __future__ import annotations

import torch

FP8_NAMES = {
    torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e4m3fn: "fp8_e4m3fn",
}
BF8_NAMES = {
    torch.float8_e5m2fnuz: "bf8_e5m2fnuz",
    torch.float8_e5m2: "bf8_e5m2",
}
EIGHT_BIT_DTYPES = (*FP8_NAMES, *BF8_NAMES, torch.int8)
EIGHT_BIT_NAMES = (*FP8_NAMES.values(), *BF8_NAMES.values(), "int8")
DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    **FP8_NAMES,
    **BF8_NAMES,
    torch.int8: "int8",
}
DTYPE_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def out_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The output's dtype for queries of ``dtype``, where none is given: the same, and bfloat16 for
    8 bits.
    """
    return torch.bfloat16 if dtype in EIGHT_BIT_DTYPES else dtype


def plain_out_dtype(dtype: str) -> str:
    """The same by name."""
    return "bf16" if dtype in EIGHT_BIT_NAMES else dtype


def other_out_dtype(dtype: str, out_dtype: str) -> str:
    """``out_dtype`` where it is not that of a new output; else empty."""
    return "" if out_dtype == plain_out_dtype(dtype) else out_dtype


def out_dtypes_of(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Those that an output which is given may have."""
    if dtype in EIGHT_BIT_DTYPES:
        return torch.bfloat16, torch.float16, torch.float32
    return (dtype,)
