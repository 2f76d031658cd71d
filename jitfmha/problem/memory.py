"""Where tensors lie in memory: extents, overlaps, and huge pages for large outputs on the CPU."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from .torch_parts import is_watched


def write_zeros(to: Tensor, where: Tensor | None = None) -> None:
    """Write zeros to a tensor of the caller's, everywhere or ``where`` a boolean tensor says."""
    with _may_write(to):
        if where is None:
            to.zero_()
        else:
            to.masked_fill_(where, 0)


def write_values(to: Tensor, values: Tensor, where: Tensor | None = None) -> None:
    """Copy values to a tensor of the caller's, likewise."""
    with _may_write(to):
        to.copy_(values if where is None else torch.where(where, values.to(to.dtype), to))


def _may_write(to: Tensor) -> AbstractContextManager[object]:
    """Where torch writes to a tensor that may have been made in inference mode.

    Outside of that mode it does so in kernels only. ``torch.compile`` can trace no question about
    it, and writes in kernels alone.
    """
    if not torch.compiler.is_compiling() and to.is_inference():
        return torch.inference_mode()
    return nullcontext()


def extent(x: Tensor) -> tuple[int, int]:
    """The address of a tensor's first element, and the bytes up to the end of its last one."""
    if x.numel() == 0:
        return x.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), (last + 1) * x.element_size()


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided views share memory.

    Exact for the views that attention sees (slices, permutations and packed buffers). A pair too
    tangled to decide in a bounded number of steps counts as overlapping, as do items that begin
    within each other.
    """
    (begin_a, bytes_a), (begin_b, bytes_b) = extent(a), extent(b)
    if not (begin_a < begin_b + bytes_b and begin_b < begin_a + bytes_a):
        return False
    item = a.element_size()
    if item != b.element_size():
        return may_overlap(_bytes(a), _bytes(b))
    # The views meet where  offset_a + sum(s_a * i) == offset_b + sum(s_b * j).  With every term
    # moved to one side, that is a sum of stride times a bounded integer equal to a constant.
    distance, rest = divmod(begin_b - begin_a, item)
    low = high = 0
    terms: dict[int, int] = {}
    for x, sign in ((a, 1), (b, -1)):
        for size, stride in zip(x.shape, x.stride(), strict=True):
            if size > 1 and stride > 0:
                terms[stride] = terms.get(stride, 0) + size - 1
                if sign > 0:
                    high += stride * (size - 1)
                else:
                    low -= stride * (size - 1)
    if not low <= distance <= high:
        return False
    if rest:
        return True
    # Shift every b term by its range, so that all integers run from 0 up to their bound.
    return _reachable(distance - low, sorted(terms.items(), reverse=True))


def refuse_shared_rooms(*read: tuple[str, object], **written: object) -> None:
    """Raise ``ValueError`` where what is written shares memory with what is read, or among itself.

    As far as it has some: None and what a mode or a transform stands for do not.
    """
    before = [(name, x) for name, x in read if _has_memory(x)]
    for name, x in written.items():
        if not _has_memory(x):
            continue
        for other, y in before:
            if may_overlap(x, y):
                raise ValueError(f"{name} shares memory with {other}; give it memory of its own")
        before.append((name, x))


def _has_memory(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.layout is torch.strided and not is_watched(x, x, x)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of items, behind all other dimensions."""
    strides = [stride * x.element_size() for stride in x.stride()]
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(
        x.untyped_storage(),
        x.storage_offset() * x.element_size(),
        (*x.shape, x.element_size()),
        (*strides, 1),
    )


# Of tensors of one layout: for how many of their addresses is kept which of them share memory, and
# for how many distances between two of them.
_MOST_ADDRESSES, _MOST_DISTANCES = 128, 256


class Apart:
    """Finds tensors of one layout that share memory, where one of each pair is written.

    Keeps what was found of addresses, which come again from step to step, and of the distance
    between two tensors whose extents meet, as parts of packed ones.
    """

    def __init__(self, tensors: Sequence[Tensor | None], pairs: Iterable[tuple[int, int]]) -> None:
        there = {at: extent(x)[1] for at, x in enumerate(tensors) if x is not None}
        self.places = [*there]
        self._pairs = [
            (i, j, there[i], there[j]) for i, j in pairs if there.get(i) and there.get(j)
        ]
        self._found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._shares: dict[tuple[int, int, int], bool] = {}

    def shared(
        self, tensors: Sequence[Tensor | None], pointers: tuple[int, ...]
    ) -> list[tuple[int, int]]:
        """The pairs that do, by where they stand among the tensors.

        ``pointers`` are the addresses of those that are there, which are at ``places``.
        """
        found = self._found.get(pointers)
        if found is None:
            found = self._pairs_shared(tensors, dict(zip(self.places, pointers, strict=True)))
            if len(self._found) >= _MOST_ADDRESSES:
                self._found.clear()
            self._found[pointers] = found
        return found

    def _pairs_shared(
        self, tensors: Sequence[Tensor | None], begins: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        found = []
        for i, j, span, other in self._pairs:
            distance = begins[j] - begins[i]
            if -other < distance < span and self._do_share(tensors, i, j, distance):
                found.append((i, j))
        return found

    def _do_share(self, tensors: Sequence[Tensor | None], i: int, j: int, distance: int) -> bool:
        key = i, j, distance
        do_share = self._shares.get(key)
        if do_share is None:
            a, b = tensors[i], tensors[j]
            if len(self._shares) >= _MOST_DISTANCES:
                self._shares.clear()
            do_share = a is not None and b is not None and may_overlap(a, b)
            self._shares[key] = do_share
        return do_share


def overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of a strided view name one element (an expanded ``out``, say)."""
    reach = 0
    if x.numel() == 0:
        return False
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _reachable(target: int, terms: list[tuple[int, int]], budget: int = 20_000) -> bool:
    """Whether ``target`` is a sum of ``stride * n`` with ``0 <= n <= bound`` for each term."""
    reach = [0] * (len(terms) + 1)
    for i in range(len(terms) - 1, -1, -1):
        reach[i] = reach[i + 1] + terms[i][0] * terms[i][1]
    stack = [(0, target)]
    while stack:
        budget -= 1
        if budget == 0:
            return True
        i, left = stack.pop()
        if left == 0:
            return True
        if i == len(terms) or not 0 < left <= reach[i]:
            continue
        stride, bound = terms[i]
        fewest = max(0, -(-(left - reach[i + 1]) // stride))
        most = min(bound, left // stride)
        stack.extend((i + 1, left - stride * n) for n in range(fewest, most + 1))
    return False


# The C library maps a block of more than 32 MiB afresh for every allocation (the upper limit of its
# M_MMAP_THRESHOLD), so that the kernel's first write to each of its pages is a page fault. Linux
# serves a fault with 2 MiB at a time where it is asked to, which "madvise", its usual setting for
# transparent huge pages, waits for.
HUGE_PAGES_FROM_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20


def request_huge_pages(fresh: Tensor) -> None:
    """Ask for huge pages under ``fresh``, a newly allocated contiguous tensor on the CPU.

    Only whole huge pages are asked for: nothing else can lie in them. It is no more than advice, so
    a refusal changes nothing. Other systems than Linux have no such advice.
    """
    if sys.platform != "linux":
        return
    begin = -(-fresh.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (fresh.data_ptr() + fresh.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if begin < end:
        _c_library().madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE
        )


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
