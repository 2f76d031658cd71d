"""The launch of a compiled kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...problem.arguments import CuSeqlens, Descales, Tensors
from ...problem.problem import check_pages
from ..launcher import TENSORS, AmdLaunch
from ..modifiers import address, read_tensors
from ..ready.key_split import Splits
from .modifiers import packed_modifiers, packed_p_descale, packed_parts
from .split_choice import SplitChoice

_WORD = (1 << 32) - 1


class ForwardLaunch(NamedTuple):
    """A bound kernel with all that it needs but the tensors' addresses.

    Attributes:
        launch: what a ready kernel would need; in gm0 with the splits of the keys.
        split_choice: gm1: decides about them by the longest sequences of each call.
        mean_seqlen_k: of gm1's sequences without pages.
        pages: strides between those of k and of v, in bytes.
        page_size: keys of a page, where they are in pages.
        constants: the numbers among the modifiers.
        columns: slices of the output's, and bytes between those of v.
    """

    launch: AmdLaunch
    split_choice: SplitChoice
    mean_seqlen_k: int
    pages: tuple[int, int]
    page_size: int
    constants: tuple[float, ...]
    columns: tuple[int, int]

    def __call__(self, tensors: Tensors) -> None:
        kernel, splits, cu_seqlens = self.launch.kernel, self.launch.splits, tensors.cu_seqlens
        q, k, v, out, lse = tensors[:5]
        modifiers, dropout = tensors.modifiers, tensors.dropout
        keys = tensors.keys
        table = None if keys is None else keys.block_table
        sums: tuple[Tensor | None, ...] = (None,) * 4
        scales = tensors.descales or _NO_DESCALES
        max_seqlen_q = 0
        if cu_seqlens is not None:
            sums, given = cu_seqlens[:4], cu_seqlens.max_seqlen_q
            # No sequence is longer than all rows together; workgroups without a tile end at once.
            rows = self.launch.seqlen_q
            max_seqlen_q = rows if given is None else min(given, rows)
            splits = self._splits_of_sequences(max_seqlen_q, cu_seqlens, table)
        num_splits, workspace_floats = splits
        workspace = None
        if workspace_floats:
            workspace = q.new_empty(workspace_floats, dtype=torch.float32)
        addresses = TENSORS.packer.pack(
            *(address(x) for x in (q, k, v, out, lse, workspace, *sums, *scales[:3])),
            *(max_seqlen_q, num_splits, kernel.current_stream(kernel.device_index)),
        )
        if table is not None and cu_seqlens is not None and kernel.launching is not None:
            check_pages(cu_seqlens, table, k)
        pages = self._packed_pages(table, k)
        beside = *packed_p_descale(scales.p), *self.columns, *packed_parts(keys)
        modifying = packed_modifiers(modifiers, dropout, pages, self.constants, beside)
        entry, sizes = kernel.entry, self.launch.sizes
        if kernel.launching is None:
            status = entry(kernel.call, sizes, addresses, modifying)
        else:
            parts = () if keys is None else (keys.out_accum, keys.lse_accum)
            read = *sums, table, *scales, *read_tensors(modifiers, dropout)
            with kernel.launching((q, k, v, out, lse, workspace, *parts, *read)):
                status = entry(kernel.call, sizes, addresses, modifying)
        if status != 0:
            raise kernel.error(status)

    def _splits_of_sequences(
        self, max_seqlen_q: int, cu_seqlens: CuSeqlens, table: Tensor | None
    ) -> Splits:
        """Choose the splits by the longest sequences, as far as anybody tells."""
        seqlen_k = cu_seqlens.max_seqlen_k
        if seqlen_k is None:
            seqlen_k = self.mean_seqlen_k
            if table is not None:
                seqlen_k = table.shape[1] * self.page_size
        return self.split_choice.splits(max_seqlen_q, seqlen_k)

    def _packed_pages(self, table: Tensor | None, k: Tensor) -> tuple[int, ...]:
        """What ``MODIFIERS`` has of pages, in order."""
        if table is None:
            return (0,) * 7
        size = self.page_size
        return table.data_ptr(), table.stride(0), *self.pages, size, _WORD // size, k.shape[0]


_NO_DESCALES = Descales()
