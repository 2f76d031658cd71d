"""AITER's names of dtypes.

Source: ``aiter/utility/dtypes.py`` of github.com/ROCm/aiter. ``fp8`` is that of the GPU, and where
there is none that of the emulated one: float8_e4m3fnuz on gfx942, float8_e4m3fn elsewhere.
"""

from __future__ import annotations

import torch

from ..amd.chips import architecture
from ..call.detection import target_of
from ..planning.target import AmdTarget
from ..problem.dtypes import DTYPE_NAMES

fp16 = torch.float16
bf16 = torch.bfloat16
fp32 = torch.float32
i8 = torch.int8
i16 = torch.int16
i32 = torch.int32
i64 = torch.int64
u8 = torch.uint8
u32 = torch.uint32
u64 = torch.uint64


def fp8_of(device: torch.device) -> torch.dtype:
    """The dtype of 8-bit floats that is served there."""
    target = target_of(device)
    if not isinstance(target, AmdTarget):
        return torch.float8_e4m3fn
    named = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return named[architecture(target.arch).fp8_dtype]


def __getattr__(name: str) -> torch.dtype:
    if name == "fp8":
        return fp8_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
