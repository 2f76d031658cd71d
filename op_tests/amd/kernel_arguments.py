"""Kernels' arguments, packed from the tensors of a call by the tables of AITER's interfaces.

Written from those tables alone, and from torch's own strides: it shares nothing with the launcher.
"""

import struct

from rigs.recording_runtime import Launch
from torch import Tensor

FORWARD = 656  # bytes
Slots = list[tuple[str, float]]


def pointers(*tensors: Tensor | None) -> Slots:
    return [("Q", 0 if x is None else x.data_ptr()) for x in tensors]


def numbers(*values: int) -> Slots:
    return [("I", x) for x in values]


def strides(x: Tensor) -> tuple[int, int, int]:
    """Between batches, rows and heads, in bytes."""
    *batch, row, head, _ = (stride * x.element_size() for stride in x.stride())
    return (batch[0] if batch else 0), row, head


def block(size: int, slots: dict[int, Slots]) -> bytes:
    """Slots of 16 bytes, one behind the other from each of these offsets on; all others are 0."""
    packed = bytearray(size)
    for offset, group in slots.items():
        for i, (form, value) in enumerate(group):
            struct.pack_into(f"<{form}", packed, offset + 16 * i, value)
    return bytes(packed)


def differing_slots(launch: Launch, expected: bytes) -> list[int]:
    """The offsets of those that differ: a readable failure."""
    assert launch.kernarg_bytes == len(expected)
    actual = bytes(launch.kernarg)
    slots = range(0, len(expected), 16)
    return [i for i in slots if actual[i : i + 16] != expected[i : i + 16]]


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
    """Those of a forward kernel."""
    (q_batch, q_row, q_head), (k_batch, k_row, k_head) = strides(q), strides(k)
    (v_batch, v_row, v_head), (o_batch, o_row, o_head) = strides(v), strides(out)
    slots = {
        0: [*pointers(out, q, k, v, lse), ("f", scale)],
        96: numbers(q.shape[1] if cu_seqlens is None else max_seqlen_q),
        112: numbers(q_row, ts_qo * q_row, q_head, q_batch, q.shape[-2] // k.shape[-2]),
        192: numbers(k_row, k_head, k_batch, s_opt, lse is not None),
        272: numbers(k.shape[-3], q.shape[-1], v.shape[-1], q.shape[-2]),
        336: numbers(v_row, v_head, v_batch, o_row, o_head, o_batch),
        # (b, hq, sq) and (hq, total_q), both contiguous: a head's lse is as long as q has rows.
        464: numbers(4 * q.shape[-3]),
    }
    if cu_seqlens is not None:
        slots |= {432: pointers(*cu_seqlens[:2]), 480: pointers(*cu_seqlens[2:])}
    if descales is not None:
        slots[512] = pointers(*descales)
        for i, x in enumerate(descales):
            slots[560 + 32 * i] = numbers(*(4 * stride for stride in x.stride() if x.dim() == 2))
    return block(FORWARD, slots)
