"""Between a batch of padded sequences and sequences that are packed one after the other.

The names, arguments and results are those of ``flash_attn/bert_padding.py`` of
github.com/Dao-AILab/flash-attention. All functions have gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.peer_values import as_int
from ..problem.checks import check_layout, describe, not_a_tensor, with_clear_errors
from ..problem.torch_parts import can_be_read

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


@with_clear_errors
def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 - flash-attn's name
    """The rows of ``input (rows, ...)`` that ``indices (n,)`` name, as ``(n, ...)``.

    Raises:
        TypeError, ValueError: input is no tensor of two dimensions or more; indices is not int64 of
            one dimension, or, on the CPU, out of range.
    """
    _check_rows("input", input, at_least=2)
    _check_indices(indices, len(input), input)
    return input.index_select(0, indices)


@with_clear_errors
def index_first_axis_residual(
    input: Tensor,  # noqa: A002 - flash-attn's name
    indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """:func:`index_first_axis`, and a view of ``input``, for a sum that skips a layer.

    Raises:
        TypeError, ValueError: as :func:`index_first_axis`.
    """
    return index_first_axis(input, indices), input.view_as(input)


@with_clear_errors
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros ``(first_axis_dim, ...)``, with ``values (n, ...)`` in the rows ``indices (n,)``.

    Raises:
        TypeError, ValueError: values is no tensor of two dimensions or more; indices is not int64
            ``(n,)``, or, on the CPU, out of range.
    """
    return _put("values", values, indices, _as_count("first_axis_dim", first_axis_dim))


def _put(name: str, values: Tensor, indices: Tensor, rows: int) -> Tensor:
    _check_rows(name, values, at_least=2)
    _check_indices(indices, rows, values)
    if len(indices) != len(values):
        raise ValueError(
            f"indices is {describe(indices)}; there is one for each row of {name}, which is "
            f"{describe(values)}"
        )
    return values.new_zeros(rows, *values.shape[1:]).index_put((indices,), values)


def _as_count(name: str, value: object) -> int:
    count = as_int(name, value)
    if count < 0:
        raise ValueError(f"{name}={value!r} must not be negative")
    return count


@with_clear_errors
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, packed.

    Args:
        hidden_states: ``(b, s, ...)``.
        attention_mask: ``(b, s)``, bool or an integer: where there is a token.
        unused_mask: ``(b, s)`` of the same kind: where there is room for a token, which is kept but
            does not count as used. No place has both.

    Returns:
        ``(packed, indices, cu_seqlens, max_seqlen, used_seqlens)``: packed ``(total, ...)``;
        indices int64 ``(total,)``, where its rows lie among the ``b * s`` places; cu_seqlens int32
        ``(b + 1,)``; the longest length; and int32 ``(b,)``, how many tokens of each sequence
        ``attention_mask`` has.

    Raises:
        TypeError, ValueError: a mask or hidden_states has another shape.
    """
    _check_rows("hidden_states", hidden_states, at_least=2)
    _check_mask("attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    packed, indices, cu_seqlens, max_seqlen = _packed(
        hidden_states, kept, kept.sum(dim=-1, dtype=torch.int32)
    )
    return packed, indices, cu_seqlens, max_seqlen, attention_mask.sum(dim=-1, dtype=torch.int32)


@with_clear_errors
def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of a padded batch whose rows hold several sequences one after the other, packed.

    Args:
        hidden_states: ``(b, s, ...)``.
        attention_mask_in_length: integers ``(b, s)``: the lengths of the sequences of a row, in
            their order, the rest being 0. ``[2, 3, 0, 0, 0, 0]`` is a row of two sequences, of 2
            and 3 tokens, with one place of padding behind them.

    Returns:
        ``(packed, indices, cu_seqlens, max_seqlen)`` as :func:`unpad_input`, with an entry of
        cu_seqlens for each of these sequences.

    Raises:
        TypeError, ValueError: the lengths or hidden_states have another shape; a row's lengths are
            more than its places.
    """
    _check_rows("hidden_states", hidden_states, at_least=2)
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    places = hidden_states.shape[1]
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    if tokens.numel() > 0 and int(tokens.max()) > places:
        raise ValueError(
            f"attention_mask_in_length has {int(tokens.max())} tokens in a row; hidden_states "
            f"({describe(hidden_states)}) has {places} places"
        )
    kept = torch.arange(places, device=tokens.device) < tokens
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _packed(hidden_states, kept, lengths)


@with_clear_errors
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens in their places of a padded batch, whose other places are 0.

    Args:
        hidden_states: ``(total, ...)``.
        indices: int64 ``(total,)``, as :func:`unpad_input` returns them.

    Returns:
        ``(batch, seqlen, ...)``.

    Raises:
        TypeError, ValueError: as :func:`index_put_first_axis`.
    """
    shape = _as_count("batch", batch), _as_count("seqlen", seqlen)
    padded = _put("hidden_states", hidden_states, indices, shape[0] * shape[1])
    return padded.view(*shape, *padded.shape[1:])


def _packed(
    hidden_states: Tensor, kept: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero()[:, 0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() > 0 else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def _check_rows(name: str, x: Tensor, at_least: int) -> None:
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    check_layout(name, x)
    if x.dim() < at_least:
        raise ValueError(f"{name} is {describe(x)}; it has at least {at_least} dimensions")


def _check_indices(indices: Tensor, rows: int, of: Tensor) -> None:
    if not isinstance(indices, Tensor):
        raise not_a_tensor("indices", indices)
    check_layout("indices", indices)
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise ValueError(f"indices is {describe(indices)}; expected int64 of one dimension")
    if indices.device != of.device:
        raise ValueError(f"indices is on {indices.device}, the rows are on {of.device}")
    if can_be_read(indices) and len(indices):
        least, most = int(indices.min()), int(indices.max())
        if least < 0 or most >= rows:
            raise ValueError(f"indices is from {least} to {most}; there are {rows} rows")


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise not_a_tensor(name, mask)
    check_layout(name, mask)
    if mask.device != hidden_states.device or mask.is_meta:
        raise ValueError(
            f"{name} is on {mask.device}, hidden_states on {hidden_states.device}; the values of "
            "the mask are read"
        )
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} is {describe(mask)}; expected {tuple(hidden_states.shape[:2])}, the first two "
            "dimensions of hidden_states"
        )
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{name} is {describe(mask)}; expected bool or an integer")
