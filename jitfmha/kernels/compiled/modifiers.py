"""What changes scores, packed as compiled kernels take it."""

from __future__ import annotations

from torch import Tensor

from ...amd.kernel_arguments import MODIFIERS
from ...problem.arguments import Dropout
from ...problem.dropout import largest_kept
from ...problem.problem import Problem
from ...problem.score_features import Modifiers

# A side of a window that no sequence reaches; together with a row's number below 2^31.
_OPEN_SIDE = 1 << 30
_LARGEST_FLOAT = 3.4028234663852886e38  # of float32
_NO_MODIFIERS = Modifiers()
_NOTHING_BESIDE = (0,) * 6


def modifier_constants(problem: Problem) -> tuple[float, ...]:
    """The numbers of ``MODIFIERS`` that follow the tensors, in order."""
    mask, softcap = problem.mask, problem.modifiers.logit_softcap
    left, right = (
        _OPEN_SIDE if side is None else min(side, _OPEN_SIDE) for side in (mask.left, mask.right)
    )
    return (
        *(left, right, not mask.top_left, min(problem.modifiers.sink_size, _OPEN_SIDE)),
        *(largest_kept(problem.dropout_p), 1 / (1 - problem.dropout_p)),
        min(problem.softmax_scale / softcap, _LARGEST_FLOAT) if softcap else 0.0,
        softcap,
        problem.has_query_head_descale,
    )


def packed_modifiers(
    modifiers: Modifiers | None,
    dropout: Dropout | None,
    pages: tuple[int, ...],
    constants: tuple[float, ...],
    beside: tuple[int, ...] = _NOTHING_BESIDE,
) -> bytes:
    """``MODIFIERS`` of one call.

    ``pages``, ``constants`` and ``beside``, the scale of probabilities and the columns of values
    and output, are what it has of these, in order.
    """
    modifiers = modifiers or _NO_MODIFIERS
    bias, slopes, sink = modifiers.bias, modifiers.alibi_slopes, modifiers.sink
    rng_state = None if dropout is None else dropout.rng_state
    return MODIFIERS.packer.pack(
        *(address(bias), *((0,) * 4 if bias is None else _bias_strides(bias))),
        *(address(slopes), *((0, 0) if slopes is None else _slope_strides(slopes))),
        *(address(sink), 0 if sink is None else sink.stride(0)),
        address(rng_state),
        *pages,
        0 if bias is None else bias.shape[-1],
        *constants,
        *beside,
    )


def packed_p_descale(p_descale: Tensor | None) -> tuple[int, ...]:
    """Whether it lies between the heads of q, where it is, and its strides in bytes."""
    if p_descale is None:
        return (0,) * 4
    sizes = zip(p_descale.shape, p_descale.stride(), strict=True)
    strides = [0 if size == 1 else stride * p_descale.element_size() for size, stride in sizes]
    batch, head = (0, *strides)[-2:]
    return p_descale.dim() == 1, p_descale.data_ptr(), batch, head


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    """Between batches, heads, queries and keys, in bytes; 0 where one serves all."""
    pairs = zip(bias.shape, bias.stride(), strict=True)
    strides = [0 if size == 1 else stride * bias.element_size() for size, stride in pairs]
    return (*(0,) * (4 - len(strides)), *strides)


def _slope_strides(slopes: Tensor) -> tuple[int, ...]:
    """Between batches and heads, in elements."""
    return (*(0,) * (2 - slopes.dim()), *slopes.stride())


def modifier_tensors(
    modifiers: Modifiers | None, dropout: Dropout | None
) -> tuple[Tensor | None, ...]:
    """What kernels read of them."""
    modifiers = modifiers or _NO_MODIFIERS
    rng_state = None if dropout is None else dropout.rng_state
    return modifiers.bias, modifiers.alibi_slopes, modifiers.sink, rng_state


def address(x: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if x is None else x.data_ptr()
