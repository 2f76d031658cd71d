"""``softmax``, ``rms_norm`` and ``layer_norm``: the public functions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..planning.target import TARGET_HERE
from ..problem.arguments import new_tuple
from ..problem.checks import with_clear_errors
from ..problem.torch_parts import is_traced, is_watched
from .ops import EagerRows, call_operator
from .problem import ROW_DTYPES, Kind, RowArguments
from .run import run_rows

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
            have no gradient.

    Returns:
        ``out``, contiguous; or of ``(out, sum, scale)`` what was asked for: ``sum`` with a
        residual, ``scale``, float32 ``(...)``, with a result of 8 bits.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text names it and its value.
        NotImplementedError: nothing serves the call. Also for second derivatives and derivatives in
            forward mode, but of small calls, and any of a result of 8 bits.
        jitfmha.BuildError: the kernel could not be compiled on first use.
    """
    if residual is None and out_dtype is None and _is_small(x):
        return torch.softmax(x, -1)
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
    return _results("layer_norm", x, residual, weight, bias, eps, out_dtype)


# Of a softmax of so few numbers, and of so few with gradients, Python takes longer in front of the
# kernel than torch's own takes, which computes the same but for last bits.
MOST_OF_TORCH, MOST_WITH_GRADIENTS = 1 << 13, 1 << 17


def _is_small(x: Tensor) -> bool:
    if type(x) is not Tensor or not x.is_cpu or is_traced() or TARGET_HERE.get() is not None:
        return False
    most = MOST_WITH_GRADIENTS if x.requires_grad and _is_grad_enabled() else MOST_OF_TORCH
    return 0 < x.numel() <= most and x.dtype in ROW_DTYPES and x.dim() > 0 and x.is_contiguous()


def _results(
    kind: Kind,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> Result:
    arguments = new_tuple(RowArguments, (kind, x, residual, weight, bias, eps, out_dtype))
    # Where one is missing x stands for it, which takes less than a list of those that are there.
    w, b, r = x if weight is None else weight, x if bias is None else bias, residual
    if is_watched(x, w, b) or (r is not None and is_watched(r, r, r)):
        out, total, scale = call_operator(arguments)
    elif _is_grad_enabled() and (
        x.requires_grad or w.requires_grad or b.requires_grad or (r is not None and r.requires_grad)
    ):
        out, total, scale = EagerRows.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        out, total, scale = run_rows(arguments)
    if total is None and scale is None:
        return out
    return tuple(each for each in (out, total, scale) if each is not None)


_is_grad_enabled = torch.is_grad_enabled
