"""What Python packs for a kernel of products."""

from __future__ import annotations

from ..jit.shared_struct import INT64, Pointer, SharedStruct

# Strides in elements; float32.
VECTOR = SharedStruct("Vector", {"at": Pointer("const void"), "batch": INT64, "stride": INT64})
# Strides of a and b are in bytes: between matrices, and between lines of them.
CALL = SharedStruct(
    "GemmCall",
    {
        **dict.fromkeys(("a", "b"), Pointer("const void")),
        "out": Pointer("void"),
        **dict.fromkeys(("bias", "scale_a", "scale_b"), VECTOR),
        **dict.fromkeys(("a_batch", "b_batch", "a_stride", "b_stride"), INT64),
        **dict.fromkeys(("m", "n", "k", "tiles_m", "tiles_n"), INT64),
        # Steps of k; tiles that a workgroup has alone; steps of those that some share.
        **dict.fromkeys(("steps", "workgroups", "whole", "shared_steps", "sharing"), INT64),
        "has_two_tiles": INT64,  # whether these leave parts of more than one
        "parts": Pointer("void"),  # of shared tiles
    },
)
