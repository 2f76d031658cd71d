"""What ``torch.autocast`` does to attention: the same as to ``scaled_dot_product_attention``.

Queries, keys and values of 16 and 32 bits are cast to the dtype of the region. A float32 bias stays
as it is, as kernels add it in float32 anyway, and so do slopes, sinks and the scales of 8-bit
inputs. A call with ``out`` is not changed: the dtype of ``out`` says what is wanted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...problem.arguments import Arguments
from ...problem.torch_parts import without_autocast
from .ops import NAMES, library

_REGIONS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def under_autocast(arguments: Arguments) -> Arguments:
    """The arguments as the region of ``torch.autocast`` wants them; the same outside of one."""
    dtype = dtype_of_region(arguments.q)
    if dtype is None or arguments.out is not None:
        return arguments
    q, k, v = (_cast(x, dtype) for x in arguments[:3])
    modifiers = arguments.modifiers
    if modifiers is not None and modifiers.bias is not None:
        modifiers = modifiers._replace(bias=_cast_bias(modifiers.bias, dtype))
    return arguments._replace(q=q, k=k, v=v, modifiers=modifiers)


def dtype_of_region(q: object) -> torch.dtype | None:
    """None outside of every region for the device of q, and for what is no tensor."""
    if not isinstance(q, Tensor) or q.device.type not in _REGIONS:
        return None
    device = q.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x


def _cast_bias(bias: Any, dtype: torch.dtype) -> Any:
    is_float32 = isinstance(bias, Tensor) and bias.dtype == torch.float32
    return bias if is_float32 else _cast(bias, dtype)


def _fmha_fwd(device_type: str, *given: Any) -> tuple[Tensor, Tensor]:
    flat = dict(zip(NAMES, given, strict=False))
    dtype = dtype_of_region(flat["q"])
    if dtype is not None:
        flat |= {name: _cast(flat[name], dtype) for name in ("q", "k", "v")}
        if "bias" in flat:
            flat["bias"] = _cast_bias(flat["bias"], dtype)
    with without_autocast(device_type):
        results: tuple[Tensor, Tensor] = torch.ops.jitfmha.fmha_fwd.default(*flat.values())
    return results


for _device_type, _region in _REGIONS.items():
    library.impl("fmha_fwd", partial(_fmha_fwd, _device_type), _region)
