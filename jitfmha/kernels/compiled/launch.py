"""The launch of a compiled kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...problem.arguments import CuSeqlens, Descales, Tensors
from ...problem.page_lists import most_pages, stride_of_rows
from ...problem.problem import check_pages
from ..launcher import TENSORS, AmdLaunch
from ..modifiers import address, read_tensors
from ..ready.key_split import Splits
from .modifiers import (
    NO_PARTS,
    NO_TOKENS,
    packed_modifiers,
    packed_p_descale,
    packed_parts,
    packed_tokens,
)
from .split_choice import SplitChoice

_WORD = (1 << 32) - 1
_NO_PAGES = (0,) * 7
_pack_tensors = TENSORS.packer.pack


class NumberModifiers(NamedTuple):
    """What ``MODIFIERS`` has of calls that differ in addresses, lengths and strides only.

    Attributes:
        constants: the numbers among the modifiers.
        columns: slices of the output's, and bytes between those of v.
        packed: all of it, for calls without tensors that modify scores, pages, scales of
            probabilities or tokens, or results of splits that are wanted.
    """

    constants: tuple[float, ...]
    columns: tuple[int, int]
    packed: bytes

    @classmethod
    def of(cls, constants: tuple[float, ...], columns: tuple[int, int]) -> NumberModifiers:
        beside = *packed_p_descale(None), *columns, *NO_PARTS, *NO_TOKENS
        return cls(constants, columns, packed_modifiers(None, None, _NO_PAGES, constants, beside))


class ForwardLaunch(NamedTuple):
    """A bound kernel with all that it needs but the tensors' addresses.

    Attributes:
        launch: what a ready kernel would need; in gm0 with the splits of the keys.
        split_choice: gm1: decides about them by the longest sequences of each call; None where
            persistent workgroups share the work.
        mean_seqlen_k: of gm1's sequences without pages.
        pages: strides between those of k and of v, in bytes.
        page_size: keys of a page, where they are in pages.
        modifiers: those of calls with numbers alone among them.
    """

    launch: AmdLaunch
    split_choice: SplitChoice | None
    mean_seqlen_k: int
    pages: tuple[int, int]
    page_size: int
    modifiers: NumberModifiers

    def __call__(self, tensors: Tensors) -> None:
        kernel, sizes, seqlen_q, splits, _ = self.launch
        # Stars in place of names would take longer, here and below.
        q, k, v, out, lse, cu_seqlens, descales, modifiers, dropout, _, keys, _ = tensors
        table = None if keys is None else keys.block_table
        max_seqlen_q = 0
        sums_q = sums_k = padded_q = padded_k = 0
        if cu_seqlens is not None:
            q_sums, k_sums, q_padded, k_padded, given, _ = cu_seqlens
            # No sequence is longer than all rows together; workgroups without a tile end at once.
            max_seqlen_q = seqlen_q if given is None or given > seqlen_q else given
            choice = self.split_choice
            if choice is not None:
                splits = self._splits_of_sequences(choice, max_seqlen_q, cu_seqlens, table)
            sums_q, sums_k = q_sums.data_ptr(), k_sums.data_ptr()
            padded_q = sums_q if q_padded is q_sums else q_padded.data_ptr()
            padded_k = sums_k if k_padded is k_sums else k_padded.data_ptr()
        num_splits, workspace_floats = splits
        workspace = None
        if workspace_floats:
            workspace = q.new_empty(workspace_floats, dtype=torch.float32)
        scales = descales or _NO_DESCALES
        tokens = NO_TOKENS if descales is None else packed_tokens(descales)
        addresses = _pack_tensors(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0 if workspace is None else workspace.data_ptr(),
            sums_q,
            sums_k,
            padded_q,
            padded_k,
            0 if descales is None else address(scales[0]),
            # Those of tokens are elsewhere.
            0 if descales is None or tokens[0] else address(scales[1]),
            0 if descales is None or tokens[4] else address(scales[2]),
            max_seqlen_q,
            num_splits,
            kernel.current_stream(kernel.device_index),
        )
        launching = kernel.launching
        if table is not None and cu_seqlens is not None and launching is not None:
            check_pages(cu_seqlens, table, k)
        parts = packed_parts(keys)
        given_modifiers = self.modifiers
        has_numbers_alone = modifiers is None and dropout is None and scales.p is None
        has_numbers_alone &= tokens is NO_TOKENS
        if has_numbers_alone and table is None and parts is NO_PARTS:
            modifying = given_modifiers.packed
        else:
            pages = self._packed_pages(table, k)
            beside = *packed_p_descale(scales.p), *given_modifiers.columns, *parts, *tokens
            modifying = packed_modifiers(
                modifiers, dropout, pages, given_modifiers.constants, beside
            )
        if launching is None:
            status = kernel.entry(kernel.call, sizes, addresses, modifying)
        else:
            sums = () if cu_seqlens is None else cu_seqlens[:4]
            results = () if keys is None else (keys.out_accum, keys.lse_accum)
            read = *sums, table, *scales, *read_tensors(modifiers, dropout)
            with launching((q, k, v, out, lse, workspace, *results, *read)):
                status = kernel.entry(kernel.call, sizes, addresses, modifying)
        if status != 0:
            raise kernel.error(status)

    def _splits_of_sequences(
        self,
        choice: SplitChoice,
        max_seqlen_q: int,
        cu_seqlens: CuSeqlens,
        table: Tensor | None,
    ) -> Splits:
        """Choose the splits by the longest sequences, as far as anybody tells."""
        seqlen_k = cu_seqlens.max_seqlen_k
        if seqlen_k is None:
            seqlen_k = self.mean_seqlen_k
            if table is not None:
                seqlen_k = most_pages(table, cu_seqlens.q.shape[0] - 1) * self.page_size
        return choice.splits(max_seqlen_q, seqlen_k)

    def _packed_pages(self, table: Tensor | None, k: Tensor) -> tuple[int, ...]:
        """What ``MODIFIERS`` has of pages, in order."""
        if table is None:
            return _NO_PAGES
        size = self.page_size
        return table.data_ptr(), stride_of_rows(table), *self.pages, size, _WORD // size, k.shape[0]


_NO_DESCALES = Descales()
