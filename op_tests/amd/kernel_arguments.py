"""The kernels' arguments, packed from the tensors of a call by the table of the interface.

Written from that table alone, and from torch's own strides: it shares nothing with the launcher.
"""

from __future__ import annotations

import struct

from torch import Tensor

BYTES = 656


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    ts_qo: int,
    s_opt: int,
    cu_seqlens: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    max_seqlen_q: int = 0,
    descales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> bytes:
    """All 656 bytes; what no field covers is 0."""
    segment = bytearray(BYTES)

    def put(offset: int, form: str, value: float) -> None:
        struct.pack_into(f"<{form}", segment, offset, value)

    def strides(x: Tensor) -> tuple[int, int, int]:
        """Between tokens, heads and batches, in bytes."""
        *batch, seq, head, _ = (stride * x.element_size() for stride in x.stride())
        return seq, head, batch[0] if batch else 0

    for i, x in enumerate((out, q, k, v, lse)):
        put(16 * i, "Q", 0 if x is None else x.data_ptr())
    put(80, "f", scale)
    put(96, "I", q.shape[1] if cu_seqlens is None else max_seqlen_q)
    seq, head, batch = strides(q)
    for offset, value in ((112, seq), (128, ts_qo * seq), (144, head), (160, batch)):
        put(offset, "I", value)
    put(176, "I", q.shape[-2] // k.shape[-2])
    for first, x in ((192, k), (336, v), (384, out)):
        for i, value in enumerate(strides(x)):
            put(first + 16 * i, "I", value)
    put(240, "I", s_opt)
    put(256, "I", lse is not None)
    put(272, "I", k.shape[-3])
    put(288, "I", q.shape[-1])
    put(304, "I", v.shape[-1])
    put(320, "I", q.shape[-2])
    # (b, hq, sq) and (hq, total_q), both contiguous: a head's lse is as long as q has rows.
    put(464, "I", 4 * q.shape[-3])
    if cu_seqlens is not None:
        for offset, x in zip((432, 448, 480, 496), cu_seqlens, strict=True):
            put(offset, "Q", x.data_ptr())
    if descales is not None:
        for i, x in enumerate(descales):
            put(512 + 16 * i, "Q", x.data_ptr())
            if x.dim() == 2:
                put(560 + 32 * i, "I", 4 * x.stride(0))
                put(576 + 32 * i, "I", 4 * x.stride(1))
    return bytes(segment)
