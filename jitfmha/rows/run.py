"""From the arguments of a call over rows to its kernel, once slowly and from then on quickly."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.detection import target_of
from ..planning.target import CALLS_HERE, TARGET_HERE, AmdTarget, CpuTarget
from ..problem.memory import HUGE_PAGES_FROM_BYTES, request_huge_pages
from .amd import MOST_STRIDE, AmdRows
from .cpu import cpu_entry
from .problem import RowArguments, as_rows, traits_of
from .structs import CALLS


class RowResults(NamedTuple):
    """What a call gives; None is what it was not asked for."""

    out: Tensor
    sum: Tensor | None
    scale: Tensor | None


Run = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], RowResults]


def run_rows(arguments: RowArguments) -> RowResults:
    """Make all checks, or find that they were made, and launch the kernel.

    Raises what ``traits_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    kind, x, residual, weight, bias, eps, out_dtype = arguments
    target = TARGET_HERE.get()
    calls = (CALLS_HERE if target is None else target.calls)["rows"]
    try:
        key: Hashable = (
            *(kind, eps, out_dtype, x.shape, x.stride(), x.dtype, x.is_cpu or x.device),
            *(None if residual is None else _layout(residual),),
            *(None if weight is None else _layout(weight),),
            *(None if bias is None else _layout(bias),),
        )
        run = calls.prepared.get(key)
    except (AttributeError, TypeError):  # the checks say of what
        run = None
    if run is None:
        run = _prepare(arguments)
        calls.keep(key, run)
    results: RowResults = run(x, residual, weight, bias)
    return results


def _layout(x: Tensor) -> tuple[Hashable, ...]:
    return x.shape, x.stride(), x.dtype, x.is_cpu or x.device


def _prepare(arguments: RowArguments) -> Run:
    _, x, residual, weight, bias, eps, out_dtype = arguments
    traits = traits_of(arguments)
    shape, columns = x.shape, x.shape[-1]
    batch = shape[:-1]
    rows = batch.numel()
    dtype = out_dtype or x.dtype
    wants_huge_pages = x.device.type == "cpu" and x.nbytes >= HUGE_PAGES_FROM_BYTES
    given = (x, residual, weight, bias)
    are_plain = all(each is None or each.is_contiguous() for each in given)
    entry = amd = None
    target = target_of(x.device)
    if isinstance(target, AmdTarget):
        amd = AmdRows(traits, "forward", target, rows, columns)
    elif rows:
        entry = cpu_entry(traits, "forward", target.isa)
    pack = CALLS["forward"].packer.pack
    most = None if isinstance(target, CpuTarget) else MOST_STRIDE

    def run(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> RowResults:
        device = x.device
        out = torch.empty(shape, dtype=dtype, device=device)
        total = scale = None
        of_residual = of_weight = of_bias = of_sum = of_scale = 0
        stride = residual_stride = columns
        if not are_plain:
            x, weight, bias = as_rows(x, most), _contiguous(weight), _contiguous(bias)
            stride = x.stride(0)
        if traits.is_quantised:
            scale = torch.empty(batch, dtype=torch.float32, device=device)
            of_scale = scale.data_ptr()
        if residual is not None:
            total = torch.empty(shape, dtype=x.dtype, device=device)
            of_sum = total.data_ptr()
            if not are_plain:
                residual = as_rows(residual, most)
                residual_stride = residual.stride(0)
            of_residual = residual.data_ptr()
        if wants_huge_pages:
            for each in (out, total):
                if each is not None:
                    request_huge_pages(each)
        if weight is not None:
            of_weight = weight.data_ptr()
        if bias is not None:
            of_bias = bias.data_ptr()
        pointers = x.data_ptr(), of_residual, of_weight, of_bias, out.data_ptr(), of_sum, of_scale
        packed = pack(*pointers, stride, residual_stride, rows, columns, eps)
        if entry and entry(packed):
            raise MemoryError(NO_MEMORY)
        if amd and rows:
            tensors = x, residual, weight, bias, out, total, scale
            amd.launch(packed, pointers, (stride, residual_stride), tensors)
        return RowResults(out, total, scale)

    return run


NO_MEMORY = "the CPU kernel of rows could not allocate its scratch memory"


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
