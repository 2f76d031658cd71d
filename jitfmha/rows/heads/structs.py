"""What Python packs for a kernel that prepares heads, on the CPU and on GPUs."""

from __future__ import annotations

from ...jit.shared_struct import FLOAT, INT32, INT64, Array, Pointer, SharedStruct

_OF_TOKENS = SharedStruct("TokenStrides", dict.fromkeys(("batch", "token", "head"), INT64))
HEADS = SharedStruct(
    "Heads",
    {
        # In elements. Pieces, of packed pages, have 16 bytes of a row each, of values of a column.
        **dict.fromkeys(("x", "out"), _OF_TOKENS),
        **dict.fromkeys(("page", "key", "head", "piece"), INT64),
        "scale": INT32,  # between the scales of heads; 0: there is one
        **dict.fromkeys(("heads", "hdim"), INT32),
        # Whether heads are rotated, and whether each token of a sequence by a position of its own.
        **dict.fromkeys(("rotates", "moves"), INT32),
    },
)
# Queries, keys, values: what they lack is null.
_THREE = Array(Pointer("const void"), 3)
CALL = SharedStruct(
    "HeadsCall",
    {
        "x": _THREE,
        "weight": _THREE,
        **dict.fromkeys(("out", "cache"), Array(Pointer("void"), 3)),
        "scale": Array(Pointer("const float"), 3),
        **dict.fromkeys(("cos", "sin"), Pointer("const void")),
        **dict.fromkeys(("positions", "slots"), Pointer("const long")),
        **dict.fromkeys(("seqlens", "block_table", "batch_idx"), Pointer("const int")),
        "of": Array(HEADS, 3),
        **dict.fromkeys(("cos_stride", "sin_stride", "table_stride"), INT64),
        **dict.fromkeys(("tokens", "seqlen", "positions_end"), INT32),
        # Numbers of a row of cos and of sin; of the cache, and of the block table.
        **dict.fromkeys(("half", "pages", "page_size", "table_pages"), INT32),
        "eps": FLOAT,
        "blocks": Array(INT32, 2),  # that a GPU has for keys, and for values
    },
)
STRUCTS = _OF_TOKENS, HEADS, CALL
