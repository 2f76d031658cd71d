"""A general kernel that is loaded, and its launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...amd.code_object import CodeObject
from ...amd.kernel_arguments import MODIFIERS
from ...amd.launcher import TENSORS, AmdLaunch, BoundKernel
from ...arguments import CuSeqlens, Dropout, Modifiers, Tensors
from ...dropout import largest_kept
from ...problem import Problem, Sizes, check_pages
from ...target import AmdTarget
from ..tuned.key_split import ONE_SPLIT, Splits
from .split_choice import SplitChoice
from .traits import GeneralTraits, row_of_built

# A side of a window that no sequence reaches; together with a row's number below 2^31.
_OPEN_SIDE = 1 << 30
_WORD = (1 << 32) - 1
_ELEMENT_BYTES = 2
_LARGEST_FLOAT = 3.4028234663852886e38  # of float32


class BoundGeneralKernel:
    """A general kernel loaded on a device, for calls that differ in lengths and strides only."""

    def __init__(
        self, problem: Problem, target: AmdTarget, traits: GeneralTraits, code_object: CodeObject
    ) -> None:
        """Build and load the launcher and the kernel, as far as that has not been done.

        Raises:
            HipError: the HIP runtime cannot be used, or refuses the code object.
            jitfmha.BuildError: the launcher does not compile.
        """
        row = row_of_built(traits, code_object.image)
        self.kernel = BoundKernel(problem, target, row, code_object)
        self._splits = SplitChoice(problem, target, row)
        self._batch = problem.batch
        self._constants = _constants(problem)
        self._is_paged = problem.is_paged

    def launch_for(self, sizes: Sizes) -> GeneralLaunch:
        """The launch for these lengths and strides."""
        pages = (0, 0)
        if self._is_paged:
            # The launcher is told of the rows of a page, the kernel of pages too.
            pages = sizes.k[0] * _ELEMENT_BYTES, sizes.v[0] * _ELEMENT_BYTES
            sizes = sizes._replace(k=sizes.k[1:], v=sizes.v[1:])
        kernel, seqlen_k = self.kernel, sizes.seqlen_k
        if kernel.is_group:
            # What the caller does not tell: sequences count as equally long.
            seqlen_k = -(-seqlen_k // self._batch)
        splits = ONE_SPLIT if kernel.is_group else self._splits.splits(sizes.seqlen_q, seqlen_k)
        launch = kernel.launch_for(sizes, splits, None)
        return GeneralLaunch(launch, self._splits, seqlen_k, pages, sizes.seqlen_k, self._constants)


class GeneralLaunch(NamedTuple):
    """A bound kernel with all that it needs but the tensors' addresses.

    Attributes:
        launch: what a tuned kernel would need; in gm0 with the splits of the keys.
        split_choice: gm1: decides about them by the longest sequences of each call.
        mean_seqlen_k: of gm1's sequences without pages.
        pages: strides between those of k and of v, in bytes.
        page_size: keys of a page, where they are in pages.
        constants: the numbers among the modifiers.
    """

    launch: AmdLaunch
    split_choice: SplitChoice
    mean_seqlen_k: int
    pages: tuple[int, int]
    page_size: int
    constants: tuple[float, ...]

    def __call__(self, tensors: Tensors) -> None:
        """Start the kernel on torch's current stream; ``out`` and ``lse`` are written later.

        Raises:
            HipError: the HIP runtime refuses the launch. On the emulator also where the kernel does
                what it must not, such as touching anything but these tensors.
        """
        kernel, sizes, seqlen_q, splits, _ = self.launch
        q, k, v, out, lse, cu_seqlens, _, modifiers, dropout, _, keys = tensors
        table = None if keys is None else keys.block_table
        sums: tuple[Tensor | None, ...] = (None,) * 4
        max_seqlen_q = 0
        if cu_seqlens is not None:
            sums, given = cu_seqlens[:4], cu_seqlens.max_seqlen_q
            # No sequence is longer than all rows together; workgroups without a tile end at once.
            max_seqlen_q = seqlen_q if given is None else min(given, seqlen_q)
            splits = self._splits_of_sequences(max_seqlen_q, cu_seqlens, table)
        num_splits, workspace_floats = splits
        workspace = None
        if num_splits > 1:
            workspace = q.new_empty(workspace_floats, dtype=torch.float32)
        addresses = TENSORS.packer.pack(
            *(_address(x) for x in (q, k, v, out, lse, workspace, *sums, None, None, None)),
            *(max_seqlen_q, num_splits),
        )
        if table is not None and cu_seqlens is not None and kernel.launching is not None:
            check_pages(cu_seqlens, table, k)
        modifying = _packed_modifiers(
            modifiers or _NO_MODIFIERS, dropout, self._packed_pages(table, k), self.constants
        )
        stream = kernel.current_stream(kernel.device_index)
        entry = kernel.launcher.jitfmha_general_fwd
        if kernel.launching is None:
            status = entry(kernel.call, sizes, addresses, modifying, stream)
        else:
            read = *sums, table, *_read(modifiers or _NO_MODIFIERS, dropout)
            with kernel.launching((q, k, v, out, lse, workspace, *read)):
                status = entry(kernel.call, sizes, addresses, modifying, stream)
        if status != 0:
            raise kernel.error(status)

    def _splits_of_sequences(
        self, max_seqlen_q: int, cu_seqlens: CuSeqlens, table: Tensor | None
    ) -> Splits:
        """By the longest sequences, as far as anybody tells."""
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


_NO_MODIFIERS = Modifiers()


def _constants(problem: Problem) -> tuple[float, ...]:
    """The numbers of ``MODIFIERS`` that follow the tensors, in order."""
    mask, softcap = problem.mask, problem.logit_softcap
    left, right = (
        _OPEN_SIDE if side is None else min(side, _OPEN_SIDE) for side in (mask.left, mask.right)
    )
    return (
        *(left, right, not mask.top_left, min(problem.sink_size, _OPEN_SIDE)),
        *(largest_kept(problem.dropout_p), 1 / (1 - problem.dropout_p)),
        min(problem.softmax_scale / softcap, _LARGEST_FLOAT) if softcap else 0.0,
        softcap,
    )


def _packed_modifiers(
    modifiers: Modifiers,
    dropout: Dropout | None,
    pages: tuple[int, ...],
    constants: tuple[float, ...],
) -> bytes:
    bias, slopes, sink = modifiers.bias, modifiers.alibi_slopes, modifiers.sink
    rng_state = None if dropout is None else dropout.rng_state
    return MODIFIERS.packer.pack(
        *(_address(bias), *((0,) * 4 if bias is None else _bias_strides(bias))),
        *(_address(slopes), *((0, 0) if slopes is None else _slope_strides(slopes))),
        *(_address(sink), 0 if sink is None else sink.stride(0)),
        _address(rng_state),
        *pages,
        0 if bias is None else bias.shape[-1],
        *constants,
    )


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    """Between batches, heads, queries and keys, in bytes; 0 where one serves all."""
    pairs = zip(bias.shape, bias.stride(), strict=True)
    strides = [0 if size == 1 else stride * bias.element_size() for size, stride in pairs]
    return (*(0,) * (4 - len(strides)), *strides)


def _slope_strides(slopes: Tensor) -> tuple[int, ...]:
    """Between batches and heads, in elements."""
    return (*(0,) * (2 - slopes.dim()), *slopes.stride())


def _read(modifiers: Modifiers, dropout: Dropout | None) -> tuple[Tensor | None, ...]:
    rng_state = None if dropout is None else dropout.rng_state
    return modifiers.bias, modifiers.alibi_slopes, modifiers.sink, rng_state


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
