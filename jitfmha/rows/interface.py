"""``softmax``, ``rms_norm`` and ``layer_norm``: the public functions."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..call.detection import target_of
from ..planning.target import TARGET_HERE, CpuTarget
from ..problem.arguments import new_tuple
from ..problem.checks import requires_any_grad, with_clear_errors
from ..problem.torch_parts import is_traced, is_watched, plain_apply
from .ops import EagerRows, rows_fwd
from .problem import LARGEST_EPS, Kind, RowArguments
from .run import prepared_rows

Result = Tensor | tuple[Tensor, ...]


@with_clear_errors
def softmax(
    x: Tensor, *, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Result:
    """Softmax over the last dimension, computed in float32.

    Args:
        x: float32, bfloat16 or float16 ``(..., n)``, n from 1 to 131072, with any strides: rows
            that do not lie at one stride from each other, or whose numbers do not follow each
            other, are copied.
        residual: is added to x first, with its shape and dtype; the sum, rounded to that dtype, is
            a result, too.
        out_dtype: of the result: that of x, or ``torch.float8_e4m3fn``, ``torch.float8_e4m3fnuz``
            or ``torch.int8``. Results of 8 bits come with a scale for each row, its largest
            magnitude over the largest number of the dtype: the result is ``out * scale``. They
            have no gradient. The scale is NaN where a row has infinity, or in int8 NaN; in fp8
            NaN stays in its place.

    Returns:
        ``out``, contiguous; or of ``(out, sum, scale)`` what was asked for: ``sum`` with a
        residual, ``scale``, float32 ``(...)``, with a result of 8 bits.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call. Also for second derivatives and derivatives in
            forward mode, but of small calls, and any of a result of 8 bits.
        jitfmha.BuildError: the kernel could not be compiled on first use.
    """
    if (
        residual is None
        and out_dtype is None
        and type(x) is Tensor
        and _is_small(x, x.requires_grad and _is_grad_enabled())
    ):
        return _softmax_of_torch(x, -1)
    return _results("softmax", x, residual, None, None, 0.0, out_dtype)


@with_clear_errors
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Result:
    """RMSNorm over the last dimension: ``x / sqrt(mean(x * x) + eps) * weight``, in float32.

    Args:
        x, residual, out_dtype: as for :func:`softmax`. With a residual this is what others call
            ``fused_add_rms_norm``; the sum is rounded before it is normalised.
        weight: ``(n,)`` in the dtype of x, or float32; None is 1.
        eps: at least 0.

    Returns, Raises: as :func:`softmax`.
    """
    return _results("rms_norm", x, residual, weight, None, eps, out_dtype)


@with_clear_errors
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Result:
    """LayerNorm over the last dimension, in float32.

    It is ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, where the variance is that of the
    row's own numbers, as ``torch.nn.functional.layer_norm`` has it.

    Args:
        x, residual, out_dtype: as for :func:`softmax`.
        weight, bias: ``(n,)`` in the dtype of x, or float32, both in the same; None are 1 and 0.
        eps: at least 0.

    Returns, Raises: as :func:`softmax`.
    """
    if residual is None and out_dtype is None and type(x) is Tensor and type(eps) is float:
        wants_gradients = _is_grad_enabled() and requires_any_grad(x, weight, bias)
        # Torch rounds the mean of a row to the dtype of its weights, and takes it for gradients.
        if (x.dtype == _FLOAT32 or not wants_gradients) and _is_small(x, wants_gradients):
            try:
                if 0 <= eps <= LARGEST_EPS:
                    return _layer_norm_of_torch(x, x.shape[-1:], weight, bias, eps)
            except (TypeError, RuntimeError):
                pass  # the checks say more clearly what is wrong
    return _results("layer_norm", x, residual, weight, bias, eps, out_dtype)


# Of a softmax or a LayerNorm of so few numbers for each thread, torch's own takes less time than
# Python in front of the kernel; of so many times as few with gradients.
MOST_OF_TORCH = {torch.float32: 1 << 14, torch.bfloat16: 1 << 13, torch.float16: 1 << 13}
TIMES_WITH_GRADIENTS, MOST_WITH_GRADIENTS = 32, 1 << 21
_FLOAT32 = torch.float32
_softmax_of_torch, _layer_norm_of_torch = torch.softmax, torch.layer_norm


def _is_small(x: Tensor, wants_gradients: bool) -> bool:
    """Whether torch's own serves a right call with a plain x; one number may have no dimension."""
    if is_traced() or not x.is_cpu:
        return False
    most = MOST_OF_TORCH.get(x.dtype, 0) * _num_threads()
    if wants_gradients:
        most = min(most * TIMES_WITH_GRADIENTS, MOST_WITH_GRADIENTS)
    is_few = 1 < x.numel() <= most and x.is_contiguous()
    return is_few and TARGET_HERE.get() is None and _is_cpu_here()


@cache
def _is_cpu_here() -> bool:
    """Whether nothing stands in for the CPU in this process; the environment is asked once."""
    return isinstance(target_of(torch.device("cpu")), CpuTarget)


def _results(
    kind: Kind,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> Result:
    arguments = new_tuple(RowArguments, (x, residual, weight, bias, kind, eps, out_dtype))
    # Where one is missing x stands for it, which takes less than a list of those that are there.
    w, b, r = x if weight is None else weight, x if bias is None else bias, residual
    if is_watched(x, w, b) or (r is not None and is_watched(r, r, r)):
        results = rows_fwd.call(arguments)
    elif _is_grad_enabled() and (
        x.requires_grad or w.requires_grad or b.requires_grad or (r is not None and r.requires_grad)
    ):
        results = _differentiable(*arguments)
    else:
        results = prepared_rows(arguments)(x, residual, weight, bias)
    return results[0] if len(results) == 1 else tuple(results)


_differentiable = plain_apply(EagerRows)
_is_grad_enabled, _num_threads = torch.is_grad_enabled, torch.get_num_threads
