"""Which calls compiled kernels serve: their features, and rules with their sources.

``explain`` and refusals say what these say. Which data types there are tiles for stands in the
data files that ``tiles.py`` reads.
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
        Feature.EIGHT_BIT_KEYS_AND_VALUES,
        Feature.INT8_PROBABILITIES,
        Feature.OUT_DTYPE,
        Feature.DESCALES,
        Feature.QUERY_HEAD_DESCALES,
        Feature.TOKEN_DESCALES,
        Feature.COLUMN_MAJOR_V,
        Feature.WINDOW_MASK,
        Feature.DROPOUT,
        Feature.PAGED_KEYS,
        Feature.PACKED_PAGES,
        Feature.NUM_SPLITS,
        Feature.SPLIT_RESULTS,
    }
)


def gradients_have_tiles_of_the_dtype(problem: Problem, arch: Arch) -> Iterator[Reason]:
    """Nothing in 8 bits has a gradient."""
    if problem.direction == "forward":
        return
    served = tile_table(arch).dtypes_of("backward")
    for dtype in dict.fromkeys((problem.dtype, problem.kv_dtype)):
        if dtype not in served:
            template = "Its backward pass serves {served}; the inputs are {dtype}."
            yield Reason(template, served=", ".join(served), dtype=dtype)


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


RULES = (
    DTYPE_RULE,
    *SIZE_RULES,
    Rule(
        gradients_have_tiles_of_the_dtype,
        "the architecture's file of tiles in jitfmha/kernels/compiled",
    ),
    Rule(strides_of_gradients_fit, "csrc_templates/amd/compiled_bwd.hip.in: Rows::stride"),
)
