"""What must hold of a call for this package's backward kernels, each with its reason and source."""

from __future__ import annotations

from collections.abc import Iterator

from ....amd.chips import Arch
from ....planning.plan import Reason
from ....problem.problem import Problem
from ...rules import Rule
from ..limits import DTYPE_RULE, SIZE_RULES

_ELEMENT_BYTES = 2
# What is loaded through one buffer, so many rows at most, lies within its reach.
_BUFFER_REACH, _MOST_ROWS = 1 << 31, 128
FAR_STRIDE_BYTES = _BUFFER_REACH // _MOST_ROWS
"""From where on rows are too far apart."""


def rows_are_within_reach(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """The rows of a tile are reached by the offsets of one buffer."""
    strides = {"q": problem.q.seq, "k": problem.k.seq, "v": problem.v.seq}
    strides["dout"] = problem.row_stride("dout")
    for name, stride in strides.items():
        size = stride * _ELEMENT_BYTES
        if size >= FAR_STRIDE_BYTES:
            template = "Rows are to be less than {most} bytes apart; those of {name} are {bytes}."
            yield Reason(template, most=FAR_STRIDE_BYTES, name=name, bytes=size)


_SOURCE = "buffer_of in hsa/src/tiles.h"
RULES = (DTYPE_RULE, *SIZE_RULES, Rule(rows_are_within_reach, _SOURCE))
