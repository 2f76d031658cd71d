"""A backward pass of AITER's kernels: what is the same in every call, and the launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...amd.kernel_arguments import (
    AITER_DQ_ARGUMENTS,
    AITER_GRADIENT_ARGUMENTS,
    AITER_ROW_SUM_ARGUMENTS,
)
from ...jit.shared_struct import SharedStruct
from ...planning.target import AmdTarget
from ...problem.arguments import Tensors
from ...problem.memory import write_values, write_zeros
from ...problem.problem import Problem, Strides
from ..launcher import AITER_BACKWARD, AITER_BACKWARD_TENSORS, Launcher
from .choice import BackwardChoice
from .faults import reads_behind_rows
from .layouts import (
    ELEMENT_BYTES,
    Room,
    gradient_layout,
    keys_are_in_place,
    queries_are_in_place,
    room_of_keys,
    room_of_queries,
)

_FLOAT_BYTES = 4
_SHUFFLED_ROWS = 16  # of a tile of shuffled dq
_NARROW_SHUFFLED, _WIDE_SHUFFLED = 128, 192  # columns that its rows have
_MOST_ROWS_READ_BEHIND = 15
_WINDOW_MASK = 3
_zeros = torch.zeros
_pack_tensors = AITER_BACKWARD_TENSORS.packer.pack


class AiterBackwardLaunch:
    """Loaded kernels with all that they need but the tensors' addresses."""

    def __init__(self, problem: Problem, target: AmdTarget, choice: BackwardChoice) -> None:
        """Build and load the launcher and the kernels, as far as that has not been done.

        Raises what ``Launcher`` and its ``load`` do.
        """
        row = choice.row
        self._launcher = Launcher(problem, target, "aiter")
        self._problem = problem
        addresses = [
            self._launcher.load(of.image, each.threads, each.file, each.symbol, "")
            for each, of in choice.kernels
        ]
        self._packed = _packed_pass(addresses, problem, choice)
        self._reads_cu_seqlens = target.has_host_memory
        # Rows behind the last that some kernels read.
        self._spare = _MOST_ROWS_READ_BEHIND if reads_behind_rows(row, target.arch) else 0
        self._rows = math.prod(problem.lse_shape)
        self._moves_lse = self._spare > 0 or not _is_contiguous(problem)
        self._has_key_rooms = not keys_are_in_place(row, problem)
        self._dk_room = room_of_keys(row, problem, problem.hdim_q)
        self._dv_room = room_of_keys(row, problem, problem.hdim_v)
        self._adds_to_dq = choice.adds_to_dq
        self._dq_room = None
        if choice.adds_to_dq and not queries_are_in_place(problem):
            self._dq_room = room_of_queries(problem)
        self._has_shuffled_dq = choice.has_shuffled_dq
        self._converts_dq = row.has_atomic_fp32 and choice.dq is None
        self._dq_floats = self._rows * problem.hdim_q if row.has_atomic_fp32 else 0
        tile_bytes = _SHUFFLED_ROWS * _shuffled_columns(problem) * ELEMENT_BYTES
        tiles = problem.batch * problem.heads_q
        self._floats_of_shuffled_tile = tiles * tile_bytes // _FLOAT_BYTES

    def __call__(self, tensors: Tensors) -> None:
        launcher, gradients = self._launcher, tensors.gradients
        q, k, v, out, lse, cu_seqlens = tensors[:6]
        assert lse is not None
        assert gradients is not None
        dout, dq, dk, dv = gradients.dout, gradients.dq, gradients.dk, gradients.dv
        seqlen_q, seqlen_k = max_seqlen_q, max_seqlen_k = self._problem.sizes[:2]
        sums: tuple[Tensor, ...] = ()
        sums_q = sums_k = padded_q = padded_k = 0
        keeps_rows_q = keeps_rows_k = False
        if cu_seqlens is not None:
            max_seqlen_q = _longest(cu_seqlens.max_seqlen_q, seqlen_q)
            max_seqlen_k = _longest(cu_seqlens.max_seqlen_k, seqlen_k)
            sums = cu_seqlens[:4]
            sums_q, sums_k, padded_q, padded_k = [x.data_ptr() for x in sums]
            keeps_rows_q = self._has_unused_rows(cu_seqlens.q, cu_seqlens.q_padded, seqlen_q)
            keeps_rows_k = self._has_unused_rows(cu_seqlens.k, cu_seqlens.k_padded, seqlen_k)
        if self._moves_lse:
            lse = self._moved_lse(lse)
        # One allocation for both: what dq is added up in, and behind it the sums of rows.
        dq_floats = self._dq_floats
        if self._has_shuffled_dq:
            dq_floats = -(-max_seqlen_q // _SHUFFLED_ROWS) * self._floats_of_shuffled_tile
        between = _zeros(dq_floats + self._rows + self._spare, dtype=torch.float32, device=q.device)
        between_address = between.data_ptr()
        sum_of_dq, sum_address = between, between_address
        if self._adds_to_dq:
            sum_of_dq = self._zeros_for_dq(dq)
            sum_address = sum_of_dq.data_ptr()
        each_dk, each_dv = self._rooms_of_keys(dk, dv, keeps_rows_k)
        # Written out: with a star in the call it would take longer.
        addresses = _pack_tensors(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            dout.data_ptr(),
            lse.data_ptr(),
            between_address + dq_floats * _FLOAT_BYTES,
            sum_address,
            dq.data_ptr(),
            each_dk.data_ptr(),
            each_dv.data_ptr(),
            sums_q,
            sums_k,
            padded_q,
            padded_k,
            max_seqlen_q,
            max_seqlen_k,
            launcher.current_stream(launcher.device_index),
        )
        if launcher.launching is None:
            status = launcher.entry(self._packed, addresses)
        else:
            touched = (q, k, v, out, dout, lse, between, sum_of_dq, dq, each_dk, each_dv, *sums)
            with launcher.launching(touched):
                status = launcher.entry(self._packed, addresses)
        if status != 0:
            raise launcher.error(status)
        if self._converts_dq:
            cvt = self._problem.bf16_cvt if self._problem.dtype == "bf16" else "rtne"
            heads_first = between.as_strided(*_sums_as_dq(self._problem))
            used = cu_seqlens.used_rows("q", seqlen_q) if cu_seqlens and keeps_rows_q else None
            write_values(dq, prepared_for_bf16(heads_first, cvt), used)
        elif self._adds_to_dq and sum_of_dq is not dq:
            write_values(dq, sum_of_dq)
        if each_dk is not dk:
            used = cu_seqlens.used_rows("k", seqlen_k) if cu_seqlens and keeps_rows_k else None
            write_values(dk, self._summed(each_dk), used)
            write_values(dv, self._summed(each_dv), used)

    def _has_unused_rows(self, sums: Tensor, padded: Tensor, rows: int) -> bool:
        """Whether there may be rows of no sequence, which stay as they are."""
        return padded is not sums or (self._reads_cu_seqlens and int(sums[-1]) != rows)

    def _moved_lse(self, lse: Tensor) -> Tensor:
        """The lse as the kernels read it: contiguous, with as many rows behind it as they read."""
        moved = lse.new_zeros(self._rows + self._spare)
        moved[: self._rows].view(self._problem.lse_shape).copy_(lse)
        return moved

    def _zeros_for_dq(self, dq: Tensor) -> Tensor:
        if self._dq_room is not None:
            return dq.new_empty_strided(*self._dq_room).zero_()
        write_zeros(dq)
        return dq

    def _rooms_of_keys(self, dk: Tensor, dv: Tensor, keeps_rows: bool) -> tuple[Tensor, Tensor]:
        """Where dk and dv of each query head go; sequences without queries are skipped."""
        if not self._has_key_rooms:
            if keeps_rows:
                return _zeros_like(dk), _zeros_like(dv)
            if self._problem.mode == "gm1":
                # Quicker than to ask what write_zeros asks, for tensors that are new, as most are.
                if dk.is_inference() or dv.is_inference():
                    write_zeros(dk)
                    write_zeros(dv)
                else:
                    dk.zero_()
                    dv.zero_()
            return dk, dv
        if self._problem.mode == "gm1":
            return dk.new_zeros(self._dk_room.shape), dv.new_zeros(self._dv_room.shape)
        return dk.new_empty_strided(*self._dk_room), dv.new_empty_strided(*self._dv_room)

    def _summed(self, each: Tensor) -> Tensor:
        """Over the query heads that share a key head; torch adds up in float32."""
        if self._problem.gqa == 1:
            return each
        by_key_head: Tensor = each.unflatten(-2, (-1, self._problem.gqa))
        return by_key_head.sum(-2)


def _longest(given: int | None, rows: int) -> int:
    """The longest rows of a sequence; all of them where nobody says, as none is longer."""
    return rows if given is None else min(given, rows)


def _zeros_like(x: Tensor) -> Tensor:
    """Make a zero tensor with the same strides, whatever they are."""
    return x.new_empty_strided(x.shape, x.stride()).zero_()


def _sums_as_dq(problem: Problem) -> Room:
    """How float32 sums, in which heads come before rows, are seen as dq is."""
    row, head = problem.hdim_q, problem.hdim_q * problem.seqlen_q
    shape, strides = (problem.seqlen_q, problem.heads_q, problem.hdim_q), (row, head, 1)
    if problem.mode == "gm1":
        return Room(shape, strides)
    return Room((problem.batch, *shape), (problem.heads_q * head, *strides))


def _is_contiguous(problem: Problem) -> bool:
    """Whether the lse is as the kernels take it; that of autograd is, before there is any."""
    assert problem.gradients is not None
    given = problem.gradients.lse
    if not given:
        return True
    expected = 1
    for size, stride in zip(reversed(problem.lse_shape), reversed(given), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def prepared_for_bf16(sums: Tensor, bf16_cvt: str) -> Tensor:
    """Float32 values, changed so that rounding to nearest even makes of them what is asked for.

    Away from zero, half of a bf16's last digit is added to the magnitude; then, as towards zero,
    what has no place in a bf16 is dropped.
    """
    if bf16_cvt == "rtne":
        return sums
    bits = sums.view(torch.int32)
    if bf16_cvt == "rtna":
        bits = bits + 0x8000
    return (bits & -0x10000).view(torch.float32)


# ---- Arguments -----------------------------------------------------------------------------------


def _packed_pass(addresses: Sequence[int], problem: Problem, choice: BackwardChoice) -> bytes:
    row = choice.row
    first, second, third = *addresses, *([0] if choice.dq is None else [])
    blocks = {
        "row_sum_arguments": _row_sum_arguments(problem),
        "gradient_arguments": _gradient_arguments(problem, choice),
        "dq_arguments": _dq_arguments(problem, choice),
    }
    numbers = {
        "row_sum_kernel": first,
        "gradient_kernel": second,
        "dq_kernel": third,
        "batch": problem.batch,
        "heads": problem.heads_q,
        "row_sum_rows": choice.row_sums.ts,
        "gradient_rows": row.ts,
        "dq_rows": 1 if choice.dq is None else choice.dq.ts,
        "has_tile_pairs": choice.mask in (1, 2),
        "has_shuffled_dq": choice.has_shuffled_dq,
    }
    packed = bytearray(_packed(AITER_BACKWARD, numbers))
    for name, block in blocks.items():
        at = AITER_BACKWARD.offsets[name]
        packed[at : at + len(block)] = block
    return bytes(packed)


def _packed(struct: SharedStruct, values: Mapping[str, float]) -> bytes:
    """A struct with these values and 0 in all other places; ``values`` names none that it lacks."""
    unknown = values.keys() - struct.leaves.keys()
    assert not unknown, unknown
    return struct.packer.pack(*(values.get(name, 0) for name in struct.leaves))


def _in_bytes(prefix: str, strides: Strides) -> dict[str, int]:
    batch, seq, head = (x * ELEMENT_BYTES for x in strides)
    return {f"{prefix}_Bs": batch, f"{prefix}_Seqs": seq, f"{prefix}_Hs": head}


def _row_sum_arguments(problem: Problem) -> bytes:
    rows = problem.seqlen_q
    return _packed(
        AITER_ROW_SUM_ARGUMENTS,
        {
            **_in_bytes("s_o", problem.out),
            **_in_bytes("s_do", gradient_layout(problem).dout),
            "s_d_Hs": rows * _FLOAT_BYTES,
            "s_d_Bs": problem.heads_q * rows * _FLOAT_BYTES if problem.mode == "gm0" else 0,
            "s_d_Seqs": _FLOAT_BYTES,
            "s_seq_len_q": rows,
            "s_head_dim": problem.hdim_v,
        },
    )


def _gradient_arguments(problem: Problem, choice: BackwardChoice) -> bytes:
    row = choice.row
    dk, dv = _key_gradient_strides(problem, choice)
    mask_x, mask_y = _window_corner(problem) if choice.mask == _WINDOW_MASK else (0, 0)
    in_bytes = {
        **_in_bytes("s_q", problem.q),
        **_in_bytes("s_k", problem.k),
        **_in_bytes("s_v", problem.v),
        **_in_bytes("s_do", gradient_layout(problem).dout),
        **_in_bytes("s_dk", dk),
        **_in_bytes("s_dv", dv),
    }
    return _packed(
        AITER_GRADIENT_ARGUMENTS,
        {
            **in_bytes,
            "scalar": problem.softmax_scale,
            "log2e": math.log2(math.e),
            "s_seq_len_q": problem.seqlen_q,
            "s_Ts": row.ts * in_bytes["s_k_Seqs"] % (1 << 32),
            "s_gqa": problem.gqa,
            "s_seq_len_k": problem.seqlen_k,
            "s_qk_head_dim": problem.hdim_q,
            "s_v_head_dim": problem.hdim_v,
            "s_q_head_num": problem.heads_q,
            "s_lse_Hs": problem.seqlen_q * _FLOAT_BYTES,
            "mask_x": mask_x,
            "mask_y": mask_y,
        },
    )


def _key_gradient_strides(problem: Problem, choice: BackwardChoice) -> tuple[Strides, Strides]:
    layout = gradient_layout(problem)
    if keys_are_in_place(choice.row, problem):
        return layout.dk, layout.dv
    rooms = (room_of_keys(choice.row, problem, n) for n in (problem.hdim_q, problem.hdim_v))
    dk, dv = (
        Strides(x.strides[0] if problem.batch > 1 and len(x.shape) > 3 else 0, *x.strides[-3:-1])
        for x in rooms
    )
    return dk, dv


def _window_corner(problem: Problem) -> tuple[int, int]:
    """How far a window reaches from the top-left corner: to the right, and down."""
    sq, sk = problem.seqlen_q, problem.seqlen_k
    mask = problem.mask
    shift = 0 if mask.top_left else sk - sq
    open_left, open_right = (sq - 1, sk - 1) if mask.top_left else (sk - 1, sq - 1)
    # No window is wider than what it lies on.
    left = open_left if mask.left is None else min(mask.left, sq + sk)
    right = open_right if mask.right is None else min(mask.right, sq + sk)
    return 1 + right + shift, 1 + left - shift


def _shuffled_columns(problem: Problem) -> int:
    return _WIDE_SHUFFLED if problem.hdim_q == _WIDE_SHUFFLED else _NARROW_SHUFFLED


def _dq_arguments(problem: Problem, choice: BackwardChoice) -> bytes:
    """Without strides between heads of shuffled sums, which follow from each call's lengths."""
    if choice.has_shuffled_dq:
        strides = {"s_dq_acc_Seqs": _shuffled_columns(problem) * ELEMENT_BYTES}
    else:
        row = problem.hdim_q * _FLOAT_BYTES
        head = problem.seqlen_q * row
        has_batches = problem.mode == "gm0" and problem.batch > 1
        strides = {
            "s_dq_acc_Seqs": row,
            "s_dq_acc_Hs": head,
            "s_dq_acc_Bs": problem.heads_q * head if has_batches else 0,
        }
    return _packed(
        AITER_DQ_ARGUMENTS,
        {
            **strides,
            **_in_bytes("s_dq", gradient_layout(problem).dq),
            "s_seq_len_q": problem.seqlen_q,
            "s_head_dim": problem.hdim_q,
        },
    )
