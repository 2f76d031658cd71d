"""Huge pages for large outputs on the CPU.

The C library maps a block of more than 32 MiB afresh for every allocation (the upper limit of its
``M_MMAP_THRESHOLD``), so that the kernel's first write to each of its pages is a page fault. Linux
serves a fault with 2 MiB at a time where it is asked to, which "madvise", its usual setting for
transparent huge pages, waits for.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

from torch import Tensor

LEAST_BYTES = 32 << 20
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
