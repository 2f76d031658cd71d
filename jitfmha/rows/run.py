"""From the arguments of a call over rows to its kernel, once slowly and from then on quickly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.detection import target_of
from ..call.known_calls import Run, looked_up
from ..planning.target import AmdTarget, CpuTarget
from ..problem.memory import HUGE_PAGES_FROM_BYTES, request_huge_pages
from .amd import MOST_STRIDE, AmdRows
from .cpu import cpu_entry
from .problem import RowArguments, as_rows, traits_of
from .structs import CALLS

# The result, the sum with a residual and the scales; None is what was not asked for.
RowResults = tuple[Tensor, Tensor | None, Tensor | None]


def run_rows(arguments: RowArguments) -> RowResults:
    """Make all checks, or find that they were made, and launch the kernel.

    Raises what ``traits_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    kind, x, residual, weight, bias, eps, out_dtype = arguments
    tensors = x, residual, weight, bias
    run = looked_up("rows", (kind, eps, out_dtype), tensors, _prepare, arguments)
    results: RowResults = run(*tensors)
    return results


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
        strides = stride, residual_stride
        if entry and entry(pack(*pointers, 0, *strides, rows, columns, 0, eps)):
            raise MemoryError(NO_MEMORY)
        if amd and rows:
            kernel = amd.loaded(pointers, strides)
            words = kernel.zeros(device)
            of_words = 0 if words is None else words.data_ptr()
            packed = pack(*pointers, of_words, *strides, rows, columns, kernel.blocks, eps)
            tensors = x, residual, weight, bias, out, total, scale, words
            amd.launch(kernel, packed, tensors, kernel.blocks)
        return out, total, scale

    def run_plain(
        x: Tensor, _: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> RowResults:
        # The same, with nothing left to ask: half of what a small call takes.
        out = _empty_like(x)
        packed = pack(
            *(x.data_ptr(), 0),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            *(out.data_ptr(), 0, 0, 0, columns, columns, rows, columns, 0, eps),
        )
        if entry(packed):  # type: ignore[misc]
            raise MemoryError(NO_MEMORY)
        return out, None, None

    asks_for_more = residual is not None or dtype != x.dtype or wants_huge_pages
    return run_plain if entry and are_plain and not asks_for_more else run


_empty_like = torch.empty_like
NO_MEMORY = "the CPU kernel of rows could not allocate its scratch memory"


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
