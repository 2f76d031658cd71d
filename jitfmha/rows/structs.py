"""What Python packs for a kernel of rows, on the CPU and on GPUs."""

from __future__ import annotations

from ..jit.shared_struct import FLOAT, INT64, Pointer, SharedStruct
from ..problem.problem import Direction

TEMPLATES: dict[Direction, str] = {"forward": "rows_fwd", "backward": "rows_bwd"}
# Of each block of rows what it adds to dweight, then the same of dbias: forward has none. And what
# the workgroups of a row tell each other.
_WORKSPACE = {"partial": Pointer("float"), "words": Pointer("void")}
_SIZES = {**dict.fromkeys(("rows", "columns", "blocks"), INT64), "eps": FLOAT}
# Strides are in elements, between rows; results have none between theirs.
CALLS: dict[Direction, SharedStruct] = {
    "forward": SharedStruct(
        "RowsCall",
        {
            **dict.fromkeys(("x", "residual", "weight", "bias"), Pointer("const void")),
            **dict.fromkeys(("out", "sum", "scale"), Pointer("void")),
            **_WORKSPACE,
            **dict.fromkeys(("x_stride", "residual_stride"), INT64),
            **_SIZES,
        },
    ),
    "backward": SharedStruct(
        "RowsCall",
        {
            # x is the result of a softmax, and what was normalised otherwise.
            **dict.fromkeys(("dout", "x", "dsum", "weight"), Pointer("const void")),
            # The last two are null where nobody asks for them.
            **dict.fromkeys(("dx", "dweight", "dbias"), Pointer("void")),
            **_WORKSPACE,
            **dict.fromkeys(("dout_stride", "x_stride", "dsum_stride"), INT64),
            **_SIZES,
        },
    ),
}
