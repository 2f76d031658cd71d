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
        # Steps of k; tiles that workgroups have alone; those that share the others, of which each
        # has `share_steps`, and `longer_shares` one more.
        **dict.fromkeys(("steps", "workgroups", "whole"), INT64),
        **dict.fromkeys(("sharing", "share_steps", "longer_shares"), INT64),
        "parts": Pointer("void"),  # of shared tiles
    },
)
