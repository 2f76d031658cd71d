"""Which calls compiled kernels serve: their features, and rules with their sources.

``explain`` and refusals say what these say. Which data types and head dimensions there are tiles
for stands in the data files that ``tiles.py`` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from ...amd.chips import Arch
from ...planning.plan import Reason
from ...problem.dtypes import DTYPE_BYTES
from ...problem.features import DTYPE_FEATURES, Feature
from ...problem.problem import Problem
from ..modifiers import served_features
from ..ready.limits import DTYPE_RULE, FIELD_END, SIZE_RULES
from ..rules import ATTENTION, BACKWARD, Rule
from .tiles import tile_table

SERVES = (
    ATTENTION
    | BACKWARD
    | served_features("compiled")
    | {
        *(
            DTYPE_FEATURES[dtype]
            for arch in get_args(Arch)
            for dtype in tile_table(arch).dtypes_of("forward")
        ),
        Feature.INT8_KEYS_AND_VALUES,
        Feature.INT8_PROBABILITIES,
        Feature.DESCALES,
        Feature.QUERY_HEAD_DESCALES,
        Feature.COLUMN_MAJOR_V,
        Feature.WINDOW_MASK,
        Feature.DROPOUT,
        Feature.PAGED_KEYS,
        Feature.NUM_SPLITS,
        Feature.SPLIT_RESULTS,
    }
)


def hdims_have_a_tile(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Queries are kept in registers, and a tile's rows in LDS: wider ones have no room."""
    widest = tile_table(arch).widest(problem.direction, problem.dtype)
    if widest is None:
        return  # the rules of data types say so
    template = "It serves {dtype} with head dimensions of {name} up to {most}; here is {hdim}."
    if problem.direction == "backward":
        template = (
            "Its backward pass serves head dimensions up to {most}; that of {name} is {hdim}."
        )
    for name, most, hdim in (
        ("q and k", widest.hdim_q, problem.hdim_q),
        ("v", widest.hdim_v, problem.hdim_v),
    ):
        if hdim > most:
            yield Reason(template, dtype=problem.dtype, most=most, name=name, hdim=hdim)


def gradients_have_tiles_of_the_dtype(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Backward's two products take probabilities and their gradients as 16-bit numbers."""
    if problem.direction == "forward":
        return
    served = tile_table(arch).dtypes_of("backward")
    for dtype in dict.fromkeys((problem.dtype, problem.kv_dtype)):
        if dtype not in served:
            template = "Its backward pass serves {served}; the inputs are {dtype}."
            yield Reason(template, served=", ".join(served), dtype=dtype)


def gradients_are_of_values_in_rows(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Backward loads values row by row."""
    if problem.direction == "backward" and problem.has_column_major_v:
        yield Reason("Its backward pass does not serve values with contiguous keys.")


def strides_of_gradients_fit(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """A row's stride has 32 bits in a tile's source."""
    if problem.gradients is None:
        return
    for name in ("dout", "dq", "dk", "dv"):
        size = problem.row_stride(name) * DTYPE_BYTES[problem.dtype]
        if size >= FIELD_END:
            template = (
                "The kernels take strides below 4 GiB; rows of {name} are {size} bytes apart."
            )
            yield Reason(template, name=name, size=size)


_TILES = "the architecture's file of tiles in jitfmha/kernels/compiled"
RULES = (
    DTYPE_RULE,
    *SIZE_RULES,
    Rule(hdims_have_a_tile, _TILES),
    Rule(gradients_have_tiles_of_the_dtype, _TILES),
    Rule(gradients_are_of_values_in_rows, "csrc_templates/amd/compiled_bwd.hip.in: VRows"),
    Rule(strides_of_gradients_fit, "csrc_templates/amd/compiled_bwd.hip.in: Rows::stride"),
)
