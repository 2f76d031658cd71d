"""A general kernel that is loaded, and its launches."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...amd.code_object import CodeObject
from ...amd.kernel_arguments import MODIFIERS
from ...amd.launcher import TENSORS, AmdLaunch, BoundKernel
from ...arguments import Descales, Dropout, Modifiers, Tensors
from ...dropout import largest_kept
from ...problem import Problem, Sizes, check_pages, element_bytes
from ...target import AmdTarget
from .traits import GeneralTraits

_ONE_SPLIT = (1, 0)
# A side of a window that no sequence reaches; together with a row's number below 2^31.
_OPEN_SIDE = 1 << 30
_WORD = (1 << 32) - 1
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
        self.kernel = BoundKernel(problem, target, traits.row(), code_object)
        self._constants = _constants(problem)
        self._slices = traits.slices
        self._is_paged = problem.is_paged
        self._kv_bytes = element_bytes(problem).kv

    def launch_for(self, sizes: Sizes) -> GeneralLaunch:
        """The launch for these lengths and strides."""
        pages = (0, 0)
        columns = self._slices, sizes.v[-1] * self._kv_bytes
        if self._is_paged:
            # The launcher is told of the rows of a page, the kernel of pages too.
            pages = sizes.k[0] * self._kv_bytes, sizes.v[0] * self._kv_bytes
            sizes = sizes._replace(k=sizes.k[1:], v=sizes.v[1:])
        launch = self.kernel.launch_for(sizes, _ONE_SPLIT, None)
        return GeneralLaunch(launch, pages, sizes.seqlen_k, self._constants, columns)


class GeneralLaunch(NamedTuple):
    """A bound kernel with all that it needs but the tensors' addresses.

    Attributes:
        launch: what a tuned kernel would need.
        pages: strides between those of k and of v, in bytes.
        page_size: keys of a page, where they are in pages.
        constants: the numbers among the modifiers.
        columns: slices of the output's, and bytes between those of v.
    """

    launch: AmdLaunch
    pages: tuple[int, int]
    page_size: int
    constants: tuple[float, ...]
    columns: tuple[int, int]

    def __call__(self, tensors: Tensors) -> None:
        """Start the kernel on torch's current stream; ``out`` and ``lse`` are written later.

        Raises:
            HipError: the HIP runtime refuses the launch. On the emulator also where the kernel does
                what it must not, such as touching anything but these tensors.
        """
        kernel, sizes, seqlen_q, *_ = self.launch
        q, k, v, out, lse, cu_seqlens, descales, modifiers, dropout, _, keys = tensors
        table = None if keys is None else keys.block_table
        sums: tuple[Tensor | None, ...] = (None,) * 4
        scales = descales or _NO_DESCALES
        max_seqlen_q = 0
        if cu_seqlens is not None:
            sums, given = cu_seqlens[:4], cu_seqlens.max_seqlen_q
            # No sequence is longer than all rows together; workgroups without a tile end at once.
            max_seqlen_q = seqlen_q if given is None else min(given, seqlen_q)
        addresses = TENSORS.packer.pack(
            *(_address(x) for x in (q, k, v, out, lse, None, *sums, *scales[:3])),
            *(max_seqlen_q, 1),
        )
        if table is not None and cu_seqlens is not None and kernel.launching is not None:
            check_pages(cu_seqlens, table, k)
        modifying = _packed_modifiers(
            modifiers or _NO_MODIFIERS,
            dropout,
            self._packed_pages(table, k),
            self.constants,
            (*_packed_p_descale(scales.p), *self.columns),
        )
        stream = kernel.current_stream(kernel.device_index)
        entry = kernel.launcher.jitfmha_general_fwd
        if kernel.launching is None:
            status = entry(kernel.call, sizes, addresses, modifying, stream)
        else:
            read = *sums, table, *scales, *_read(modifiers or _NO_MODIFIERS, dropout)
            with kernel.launching((q, k, v, out, lse, *read)):
                status = entry(kernel.call, sizes, addresses, modifying, stream)
        if status != 0:
            raise kernel.error(status)

    def _packed_pages(self, table: Tensor | None, k: Tensor) -> tuple[int, ...]:
        """What ``MODIFIERS`` has of pages, in order."""
        if table is None:
            return (0,) * 7
        size = self.page_size
        return table.data_ptr(), table.stride(0), *self.pages, size, _WORD // size, k.shape[0]


_NO_MODIFIERS = Modifiers()
_NO_DESCALES = Descales()


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
        problem.has_query_head_descale,
    )


def _packed_modifiers(
    modifiers: Modifiers,
    dropout: Dropout | None,
    pages: tuple[int, ...],
    constants: tuple[float, ...],
    beside: tuple[int, ...],
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
        *beside,
    )


def _packed_p_descale(p_descale: Tensor | None) -> tuple[int, ...]:
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


def _read(modifiers: Modifiers, dropout: Dropout | None) -> tuple[Tensor | None, ...]:
    rng_state = None if dropout is None else dropout.rng_state
    return modifiers.bias, modifiers.alibi_slopes, modifiers.sink, rng_state


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
