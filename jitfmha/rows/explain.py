"""``explain_rows``: which kernel serves a call over rows, without building or launching it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.detection import planned_target
from ..call.explained import CallExplanation
from ..kernels.estimate import machine_of
from ..planning.target import AmdTarget
from ..problem.checks import not_a_tensor
from ..problem.dtypes import DTYPE_BYTES
from ..problem.problem import Direction
from .amd import (
    MOST_STRIDE,
    RowKernel,
    kernel_spec,
    planned_rows,
    refuse_form_of_fp8,
    width_of_loads,
)
from .cpu import cpu_spec
from .interface import MOST_OF_TORCH, MOST_WITH_GRADIENTS, TIMES_WITH_GRADIENTS
from .problem import Kind, RowArguments, RowTraits, as_rows, traits_of
from .structs import TEMPLATES

_OF_TORCH = (
    "Torch's own kernel serves plain calls of up to {} numbers for each thread, and with gradients "
    "of up to {}, or {} together."
)


def explain_rows(
    kind: Kind,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    direction: Direction = "forward",
    device: str | torch.device | None = None,
) -> CallExplanation:
    """What :func:`softmax`, :func:`rms_norm` or :func:`layer_norm` would do: kernel and reasons.

    Args:
        kind: "softmax", "rms_norm" or "layer_norm".
        x, weight, bias, residual, out_dtype: those of the function; the tensors may be on ``meta``.
        direction: "backward" asks for the gradients of all that is given.
        device: in place of ``x.device``; a GPU need not be here, as :func:`jitfmha.explain` has it.

    Returns:
        The explanation. On a GPU its estimate is what the bytes of all tensors take at the rate at
        which a kernel that only reads streams them.

    Builds and launches nothing and does not read the tensors' data. Raises ``TypeError`` or
    ``ValueError`` as the function does; a call that nothing serves is not an error here.
    """
    if direction not in TEMPLATES:
        raise ValueError(f"direction is {direction!r}; choose one of {', '.join(TEMPLATES)}")
    if not isinstance(x, Tensor):
        raise not_a_tensor("x", x)
    target = planned_target(x.device if device is None else device)
    words = [f"{kind}, {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"]
    given = {"weight": weight, "bias": bias, "residual": residual}
    words += [name for name, each in given.items() if each is not None]
    words += [] if out_dtype is None else [f"to {str(out_dtype).removeprefix('torch.')}"]
    words += ["backward"] if direction == "backward" else []

    def plan() -> dict[str, Any]:
        arguments = RowArguments(x, residual, weight, bias, kind, 0.0, out_dtype)
        traits = traits_of(arguments)
        if direction == "backward" and traits.is_quantised:
            raise NotImplementedError(f"results of out_dtype={out_dtype} have no gradient")
        if isinstance(target, AmdTarget):
            return _on_gpu(arguments, traits, direction, target)
        spec = cpu_spec(traits, direction, target.isa)
        return {
            "kernels": (spec.name,),
            "source": f"csrc_templates/cpu/{TEMPLATES[direction]}.cpp.in",
            "specs": (spec,),
            "remarks": _remarks_about_torch(arguments),
        }

    return CallExplanation.planned(target, ", ".join(words), "cpu", plan)


def _on_gpu(
    arguments: RowArguments, traits: RowTraits, direction: Direction, target: AmdTarget
) -> dict[str, Any]:
    x, residual, weight, bias, *_ = arguments
    kernel = _amd_kernel(arguments, traits, direction, target)
    # Forward reads x and writes the result, with a residual it reads that and writes the sum, too.
    # Backward reads x and its result's gradient and writes x's; with a residual it reads the sum's.
    has_residual = residual is not None
    if direction == "forward":
        moved = x.numel() * DTYPE_BYTES[traits.out_dtype] + x.nbytes * (1 + 2 * has_residual)
    else:
        moved = x.nbytes * (3 + has_residual)
    moved += sum(each.nbytes for each in (weight, bias) if each is not None)
    rate = machine_of(target).bytes_per_second
    of_row = f"{kernel.row_lanes} threads"
    if kernel.shares > 1:
        of_row = f"{kernel.shares} workgroups of {of_row}"
    remarks = (
        f"A row has {of_row}, which load {kernel.width} numbers at once.",
        f"The estimate is what {moved / 1e6:.4g} MB take at {rate / 1e12:.3g} TB/s.",
    )
    has_combined = kernel.combine_name and (traits.has_weight or traits.has_bias)
    return {
        "kernels": (kernel.name, *((kernel.combine_name,) if has_combined else ())),
        "source": f"csrc_templates/amd/{TEMPLATES[direction]}.hip.in",
        "specs": (kernel_spec(kernel),),
        "seconds": moved / rate,
        "remarks": remarks,
    }


def _remarks_about_torch(arguments: RowArguments) -> tuple[str, ...]:
    x, residual, _, _, kind, _, out_dtype = arguments
    if kind == "rms_norm" or residual is not None or out_dtype is not None:
        return ()
    most = MOST_OF_TORCH[x.dtype]
    if kind == "layer_norm" and x.dtype != torch.float32:
        return (f"Torch's own kernel serves plain calls of up to {most} numbers for each thread.",)
    return (_OF_TORCH.format(most, most * TIMES_WITH_GRADIENTS, MOST_WITH_GRADIENTS),)


def _amd_kernel(
    arguments: RowArguments, traits: RowTraits, direction: Direction, target: AmdTarget
) -> RowKernel:
    """The one for tensors where these lie; what is new lies at multiples of loads."""
    x, residual, weight, bias, kind, *_ = arguments
    refuse_form_of_fp8("out_dtype", traits.out_dtype, target)
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    (of_x, stride), (of_residual, residual_stride) = _place(x), _place(residual)
    of_weight, of_bias = (0 if each is None else each.data_ptr() for each in (weight, bias))
    places = [of_x, of_residual, of_weight, of_bias]
    if direction == "backward":
        # It has the result of a softmax, and with a residual the sum.
        if kind == "softmax" or residual is not None:
            of_x, stride, residual_stride = 0, columns, 0
        places = [0, of_x, 0, of_weight]
    width = width_of_loads(traits, direction, columns, places, (stride, residual_stride))
    return planned_rows(traits, direction, target, (rows, columns), width)[0]


def _place(x: Tensor | None) -> tuple[int, int]:
    """Where rows begin, 0 where they are copied, and their stride."""
    if x is None:
        return 0, 0
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    rows = as_rows(like, MOST_STRIDE)
    is_copied = rows is not like and rows._base is not like
    return 0 if is_copied else x.data_ptr(), rows.stride(0)
