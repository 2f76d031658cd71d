"""What changes scores, packed as compiled kernels take it."""

from __future__ import annotations

from torch import Tensor

from ...amd.kernel_arguments import MODIFIERS, WINDOW
from ...problem.arguments import Descales, Dropout, KeyOptions, is_of_tokens
from ...problem.mask import Mask
from ...problem.problem import Problem
from ...problem.score_features import Modifiers
from ..modifiers import address, packed_dropout, packed_numbers, packed_tensors, packed_window

# A side of a window that no sequence reaches; together with a row's number below 2^31.
OPEN_SIDE = 1 << 30
_LARGEST_FLOAT = 3.4028234663852886e38  # of float32
_NO_SCALE, NO_PARTS = (0,) * 4, (0,) * 3
NO_TOKENS = (0,) * 8


def modifier_constants(problem: Problem) -> tuple[float, ...]:
    """The numbers of ``MODIFIERS`` that follow the tensors, in order."""
    softcap = problem.modifiers.logit_softcap
    return (
        *packed_window(problem.mask, OPEN_SIDE),
        *packed_numbers(problem, OPEN_SIDE),
        *packed_dropout(problem),
        min(problem.softmax_scale / softcap, _LARGEST_FLOAT) if softcap else 0.0,
        problem.has_query_head_descale,
    )


def window_of(mask: Mask) -> bytes:
    """Pack the ``WINDOW`` of a mask."""
    return WINDOW.packer.pack(*packed_window(mask, OPEN_SIDE))


def packed_modifiers(
    modifiers: Modifiers | None,
    dropout: Dropout | None,
    pages: tuple[int, ...],
    constants: tuple[float, ...],
    beside: tuple[int, ...],
) -> bytes:
    """``MODIFIERS`` of one call.

    ``pages``, ``constants`` and ``beside``, the scale of probabilities, the columns of values and
    output, the results of splits, and the scales of tokens, are what it has of these, in order.
    """
    bias = None if modifiers is None else modifiers.bias
    return MODIFIERS.packer.pack(
        *packed_tensors(modifiers, has_strides_in_bytes=True),
        address(None if dropout is None else dropout.rng_state),
        *pages,
        0 if bias is None else bias.shape[-1],
        *constants,
        *beside,
    )


def values_beside(v_column: int) -> tuple[int, ...]:
    """What backward has of it: the bytes between columns of values."""
    return *_NO_SCALE, 1, v_column, *NO_PARTS, *NO_TOKENS


def packed_p_descale(p_descale: Tensor | None) -> tuple[int, ...]:
    """Whether it lies between the heads of q, where it is, and its strides in bytes."""
    if p_descale is None:
        return _NO_SCALE
    sizes = zip(p_descale.shape, p_descale.stride(), strict=True)
    strides = [0 if size == 1 else stride * p_descale.element_size() for size, stride in sizes]
    batch, head = (0, *strides)[-2:]
    return p_descale.dim() == 1, p_descale.data_ptr(), batch, head


def packed_tokens(descales: Descales) -> tuple[int, ...]:
    """Where the scales of tokens of k and v are, and their strides in bytes."""
    packed: tuple[int, ...] = ()
    for x in (descales.k, descales.v):
        if is_of_tokens(x):
            *batch, seq, head, _ = (stride * x.element_size() for stride in x.stride())
            packed += (x.data_ptr(), *(batch or (0,)), seq, head)
        else:
            packed += _NO_SCALE
    return NO_TOKENS if packed == NO_TOKENS else packed


def packed_parts(keys: KeyOptions | None) -> tuple[int, int, int]:
    """Where the results of splits go, where they are wanted, and how many rows one has."""
    if keys is None or keys.out_accum is None or keys.lse_accum is None:
        return NO_PARTS
    out, lse = keys.out_accum, keys.lse_accum
    return out.data_ptr(), lse.data_ptr(), lse[0].numel()
