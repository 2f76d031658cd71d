"""From the arguments of a call over heads to its kernel, once slowly and from then on quickly."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from ...call.detection import target_of
from ...call.known_calls import Run, keeps_calls
from ...planning.target import AmdTarget
from ...problem.checks import refuse_jit_trace
from ...problem.memory import Apart
from ...problem.packed_pages import (
    are_packed,
    shape_of_keys,
    strides_of_keys,
    strides_of_values,
)
from .amd import AmdHeads
from .cpu import cpu_entry
from .problem import CALL, N_TENSORS, HeadArguments, traits_of


@keeps_calls("heads", N_TENSORS)
def prepared_heads(arguments: HeadArguments) -> Run:
    """Make all checks, or find that they were made; what launches the kernel for such tensors.

    That raises ``ValueError`` for numbers that are out of range, on the CPU before anything is
    written.

    Raises what ``traits_of`` does, and ``jitfmha.BuildError`` where the kernel does not compile.
    """
    refuse_jit_trace()
    traits = traits_of(arguments)
    apart = _places_apart(arguments)
    copies = _with_copies(arguments.tensors, apart)
    arguments = HeadArguments._make((*copies, *arguments[N_TENSORS:]))
    first, cos, k_cache = arguments.first, arguments.cos, arguments.k_cache
    target = target_of(first.device)
    tokens = first.shape[:-2].numel()
    has_heads = any(x is not None and x.shape[:-1].numel() for x in arguments[:3])
    amd = entry = None
    if isinstance(target, AmdTarget):
        amd = AmdHeads(traits, target, arguments)
    elif has_heads:
        entry = cpu_entry(traits, target.isa)
    limits = Limits.of(cos, k_cache, arguments.block_table)
    table = arguments.block_table
    fixed = (
        *[n for part in range(3) for n in _of_part(arguments, part)],
        *(0 if x is None else x.stride(0) for x in (cos, arguments.sin, table)),
        *(tokens, first.shape[-3], limits.positions, 0 if cos is None else cos.shape[1]),
        *(limits.pages, limits.page_size, limits.table_pages, arguments.eps),
    )
    options, apart_in_memory = arguments[N_TENSORS:], Apart(copies, _APART)
    there = apart_in_memory.places
    written = [at for at in _WRITTEN if copies[at] is not None]
    # Of the addresses of what is there, and of the null behind them.
    in_order = itemgetter(*[there.index(at) if at in there else -1 for at in _PLACES])
    behind = _pack((0,) * len(_FIELDS), fixed, (0, 0, 0))[_ADDRESSES.size :]

    def run(*tensors: Tensor | None) -> None:
        if apart:
            tensors = _with_copies(tensors, apart)
        pointers = tuple([tensors[at].data_ptr() for at in there])  # type: ignore[union-attr]
        for pair in apart_in_memory.shared(tensors, pointers):
            _refuse_shared(*pair, HeadArguments._make((*tensors, *options)))
        addresses = in_order((*pointers, 0))
        if entry is not None:
            value = ctypes.c_int64()
            status = entry(_ADDRESSES.pack(*addresses) + behind, ctypes.addressof(value))
            if status:
                raise limits.fault(status, value.value)
        elif amd is not None and has_heads:
            kernel = amd.kernel_for([0 if x is None else x.data_ptr() for x in tensors])
            counts = sum(kernel.workgroups), 0, 0
            packed = _pack(addresses, fixed, (*kernel.workgroups[1:], kernel.turns))
            amd.start(kernel.address, counts, packed, tensors)
        # As the dispatcher does: what autograd has kept of these is not taken for what it was.
        increment_version([tensors[at] for at in written])  # type: ignore[misc]

    return run


def _pack(addresses: tuple[int, ...], fixed: tuple[float, ...], of_gpus: tuple[int, ...]) -> bytes:
    return CALL.packer.pack(*addresses, *fixed, *of_gpus)


# What kernels read one number behind the other.
_VECTORS = "q_weight", "k_weight", "positions", "slots", "cache_seqlens", "cache_batch_idx"


def _places_apart(arguments: HeadArguments) -> list[int]:
    """Where tensors are whose numbers do not lie as kernels read them; tables have rows."""
    table = arguments.block_table
    names = [name for name in _VECTORS if not _is_dense(getattr(arguments, name))]
    if table is not None and table.stride(1) != 1 and not table.is_contiguous():
        names.append("block_table")
    return [arguments._fields.index(name) for name in names]


def _is_dense(x: Tensor | None) -> bool:
    return x is None or x.is_contiguous()


def _with_copies(
    tensors: Sequence[Tensor | None], places: Sequence[int]
) -> tuple[Tensor | None, ...]:
    copied = list(tensors)
    for at in places:
        x = copied[at]
        copied[at] = None if x is None else x.contiguous()
    return tuple(copied)


# The fields of the call that have tensors' addresses, in their order; "" is null.
_FIELDS = (
    *("q", "k", "v", "q_weight", "k_weight", "", "q_out", "k_out", ""),
    *("", "k_cache", "v_cache", "", "k_scale", "v_scale", "cos", "sin", "positions", "slots"),
    *("cache_seqlens", "block_table", "cache_batch_idx"),
)
_ADDRESSES = struct.Struct(f"={len(_FIELDS)}Q")  # which lie first, without gaps
_PLACES = [HeadArguments._fields.index(name) if name else -1 for name in _FIELDS]
_WRITTEN = [HeadArguments._fields.index(name) for name in ("q_out", "k_out", "k_cache", "v_cache")]

# What is written, and what it must not share memory with; a result may lie where it comes from.
_APART = [
    (to, other)
    for at, to in enumerate(_WRITTEN)
    for other in (*(each for each in range(N_TENSORS) if each not in _WRITTEN), *_WRITTEN[at + 1 :])
    if HeadArguments._fields[to] != f"{HeadArguments._fields[other]}_out"
]


def _refuse_shared(to: int, other: int, arguments: HeadArguments) -> None:
    """Raise ``ValueError``, but where values are the first columns of keys, as of a latent."""
    names = [HeadArguments._fields[at] for at in (to, other)]
    k, v, k_scale, v_scale = (arguments.k, arguments.v, arguments.k_scale, arguments.v_scale)
    if names == ["k_cache", "v_cache"] and arguments.k_weight is arguments.cos is None:
        pairs = (arguments.k_cache, arguments.v_cache), (k, v), (k_scale, v_scale)
        if all(map(_lie_together, *zip(*pairs, strict=True))):
            return
    one, other_name = (name.removesuffix("_out") for name in names)
    raise ValueError(f"{one} is written and shares memory with {other_name}; give it its own")


def _lie_together(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


def _of_part(arguments: HeadArguments, part: int) -> tuple[int, ...]:
    """The numbers of queries, keys or values in the struct."""
    x = (arguments.q, arguments.k, arguments.v)[part]
    if x is None:
        return (0,) * 15
    out = (arguments.q_out, arguments.k_out, None)[part]
    cache = (None, arguments.k_cache, arguments.v_cache)[part]
    scale = (None, arguments.k_scale, arguments.v_scale)[part]
    page = key = head = piece = 0
    if cache is not None:
        strides = strides_of_keys(cache) if part == 1 else strides_of_values(cache)
        page, key, head = strides[:3]
        piece = cache.stride(2) if are_packed(cache) else 0
    return (
        *(*_strides(x), *_strides(out), page, key, head, piece),
        0 if scale is None or scale.shape[0] == 1 else scale.stride(0),
        *x.shape[-2:],
        *(arguments.cos is not None and part < 2, arguments.q_moves or part > 0),
    )


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Between sequences, tokens and heads."""
    if x is None:
        return 0, 0, 0
    return x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])


class Limits(NamedTuple):
    """What numbers in tensors have to be less than."""

    positions: int
    pages: int
    page_size: int
    table_pages: int

    @classmethod
    def of(cls, cos: Tensor | None, k_cache: Tensor | None, table: Tensor | None) -> Limits:
        pages, page_size = (0, 1) if k_cache is None else shape_of_keys(k_cache)[:2]
        ends = 0 if cos is None else cos.shape[0], 0 if table is None else table.shape[1]
        return cls(ends[0], pages, max(page_size, 1), ends[1])

    def fault(self, status: int, value: int) -> Exception:
        """The error for what a kernel returned."""
        pages, room = f"k_cache has {self.pages} pages", max(self.table_pages, 1) * self.page_size
        texts = {
            2: f"the table of cosines has {self.positions} rows; a token is at position {value}",
            3: f"a token has slot {value}; k_cache has {self.pages * self.page_size} of them",
            4: f"a token is key {value}; there is room for {room}",
            5: f"block_table names page {value}; {pages}",
            6: f"cache_batch_idx names sequence {value}; {pages}",
        }
        if status not in texts:
            return MemoryError("the CPU kernel of heads could not allocate its scratch memory")
        return ValueError(texts[status])
