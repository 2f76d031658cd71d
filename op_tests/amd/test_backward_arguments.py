"""The arguments of AITER's three backward kernels byte by byte, and their grids.

Pointers to memory between the kernels are taken as they are.
"""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_calls import BackwardCall
from kernel_arguments import block, differing_slots, numbers, pointers, strides
from plain_backward_tree import TS, PlainGradients, PlainOther, write_backward_tree
from plain_tree import UseTree
from rigs.recording_runtime import Launch, RecordingRuntime
from torch import Tensor

from jitfmha import HipError

pytestmark = pytest.mark.usefixtures("ready_first")

CHIPS = {"gfx942": "MI300X", "gfx950": "MI355X"}
ROW_SUMS, GRADIENTS, DQ = 256, 704, 192  # bytes


def run(
    *, call: BackwardCall, arch: str, root: Path, use_tree: UseTree, runtime: RecordingRuntime
) -> list[Launch]:
    write_backward_tree(root, arch)
    use_tree(root)
    runtime.reset()
    with runtime.stands_for(runtime.target(CHIPS[arch], 1), stream=0xABCD0):
        call.run()
    launches = runtime.launches()
    for launch in launches:
        assert (launch.stream, launch.device, launch.dynamic_lds) == (0xABCD0, 1, 0)
        assert list(launch.block) == [256, 1, 1]
    return launches


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("arch", list(CHIPS))
def test_arguments(rng, tmp_path, use_tree, runtime, arch, is_group):
    is_gfx950 = arch == "gfx950"
    values: dict[str, Any] = {"dtype": torch.float16 if is_gfx950 else torch.bfloat16, "mask": 2}
    if not is_gfx950 and not is_group:
        values["mask"] = 0
    layouts = {"q": "packed", "k": "bhsd", "v": "every_other_row", "dout": "sbhd", "dq": "bhsd"}
    call = BackwardCall(
        rng,
        hdims=(8, 8),
        heads=(4, 2),
        lengths=((33, 170), (5, 9), (0, 12)) if is_group else ((33, 170),),
        batch=None if is_group else 3,
        layouts={} if is_group else layouts,
        gap=2 if is_group else 0,
        options={"softmax_scale": 0.3, "atomic_fp32": not (is_gfx950 and is_group)}
        | ({"max_seqlen_q": 40, "max_seqlen_k": 180} if is_group else {}),
        **values,
    )
    launches = run(call=call, arch=arch, root=tmp_path, use_tree=use_tree, runtime=runtime)
    row_sums, gradients = launches[:2]
    assert len(launches) == (3 if is_gfx950 else 2)
    rows_q, rows_k = call.q.shape[-3], call.k.shape[-3]
    longest_q, longest_k = (40, 180) if is_group else (33, 170)
    tiles = -(-longest_k // TS)
    assert list(row_sums.grid) == [1, 4, 3]
    assert list(gradients.grid) == [-(-tiles // 2) if call.mask else tiles, 4, 3]

    batch_o, row_o, head_o = strides(call.out)
    batch_do, row_do, head_do = strides(call.dout)
    (row_sum,) = struct.unpack_from("<Q", bytes(row_sums.kernarg), 0x20)
    slots = {
        0x00: [*pointers(call.out, call.dout), ("Q", row_sum)],
        0x30: numbers(head_o, batch_o, row_o, head_do, batch_do, row_do),
        0x90: numbers(4 * rows_q, 0 if is_group else 16 * rows_q, 4, rows_q, 8),
    }
    sums: list[Tensor] = []
    if is_group:
        names = ("q", "k", "q_padded", "k_padded")
        sums = [call.arguments[f"cu_seqlens_{name}"] for name in names]
        slots[0xE0] = pointers(sums[0], sums[2])
    assert differing_slots(row_sums, block(ROW_SUMS, slots)) == []

    at = bytes(gradients.kernarg)
    sum_of_dq, dk, dv = (struct.unpack_from("<Q", at, i)[0] for i in (0x00, 0x10, 0x20))
    (batch_q, row_q, head_q), (batch_k, row_k, head_k) = strides(call.q), strides(call.k)
    batch_v, row_v, head_v = strides(call.v)
    each = 4 * 8 * 2  # bytes of a row of all query heads
    each_batch = 0 if is_group else rows_k * each
    shuffled_rows = 48 if is_gfx950 and is_group else longest_q
    slots = {
        0x00: [("Q", sum_of_dq), ("Q", dk), ("Q", dv)],
        0x30: pointers(call.q, call.k, call.v, call.dout, call.lse),
        0x80: [("Q", row_sum), ("f", 0.3), ("f", 1.4426950408889634)],
        0xB0: numbers(rows_q, TS * row_k, head_q, batch_q, row_q, 2, head_k, batch_k, row_k),
        0x140: numbers(each, rows_k, 8, 8, 4, head_v, batch_v, row_v, head_do, batch_do, row_do),
        0x1F0: numbers(16, each_batch, 16, each_batch, each, 4 * rows_q),
        0x250: pointers(*sums),
        0x290: numbers(shuffled_rows),
    }
    assert differing_slots(gradients, block(GRADIENTS, slots)) == []
    assert len({sum_of_dq, dk, dv, row_sum}) == 4
    if is_gfx950:
        check_dq(launches[2], call, sum_of_dq, longest_q, sums)


def check_dq(
    launch: Launch, call: BackwardCall, sum_of_dq: int, longest: int, sums: list[Tensor]
) -> None:
    """Of the third kernel: float32 sums of a batch, or shuffled ones of packed sequences."""
    batch_dq, row_dq, head_dq = strides(call.gradients["dq"])
    rows = call.q.shape[-3]
    head, row = (4 * 8 * rows, 4 * 8) if not sums else (48 * 128 * 2, 128 * 2)
    slots = {
        0x00: [("Q", sum_of_dq), *pointers(call.gradients["dq"])],
        0x20: numbers(head, 4 * head, row, head_dq, batch_dq, row_dq, rows, 8),
        0xA0: pointers(*sums[::2]),
    }
    assert differing_slots(launch, block(DQ, slots)) == []
    assert list(launch.grid) == [-(-longest // 64), 4, 3]


def test_errors_of_the_runtime(rng, tmp_path, use_tree, runtime):
    """A launch that fails is an error, and the kernels after it are not launched."""
    write_backward_tree(tmp_path, "gfx950")
    use_tree(tmp_path)
    options = {"atomic_fp32": True}
    call = BackwardCall(rng, torch.float16, (8, 8), batch=1, options=options)
    for launches in range(3):
        runtime.reset()
        runtime.fail("hipModuleLaunchKernel", 1, after=launches)
        with (
            runtime.stands_for(runtime.target("MI355X")),
            pytest.raises(HipError, match=r"hipModuleLaunchKernel of .* on device 0"),
        ):
            call.run()
        assert len(runtime.launches()) == launches


def test_windows(rng, tmp_path, use_tree, runtime):
    """How far a window reaches from the top-left corner, with sides that are open or too long."""
    kernel = PlainGradients(hdims=(128, 128), mask=3, bf16_cvt=0)
    others = [
        PlainOther("odo", hdims=(128, 128)),
        PlainOther("dq_convert", hdims=(128, 128), bf16_cvt=0),
    ]
    write_backward_tree(tmp_path, "gfx942", [kernel], others)
    use_tree(tmp_path)
    sq, sk = 20, 50
    for mask, expected in {
        "t:3,5": (6, 4),
        "t:-1,5": (6, sq),
        "b:3,5": (6 + sk - sq, 4 - sk + sq),
        "b:-1,5": (6 + sk - sq, sk - (sk - sq)),
        "t:999999999999,0": (1, 1 + sq + sk),
    }.items():
        call = BackwardCall(rng, hdims=(72, 72), lengths=((sq, sk),), batch=1, mask=mask)
        runtime.reset()
        with runtime.stands_for(runtime.target("MI300X")):
            call.run()
        at = bytes(runtime.launches()[1].kernarg)
        assert tuple(struct.unpack_from("<i", at, i)[0] for i in (0x2A0, 0x2B0)) == expected, mask
